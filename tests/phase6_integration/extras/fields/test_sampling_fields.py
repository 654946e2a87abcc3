"""Fields of requests that are parameters of the draw: each reaches the engine."""

from dataclasses import fields
from typing import Any

from phase0_request import SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api import parsing
from phase6_integration.extras.fields import sampling_fields
from phase6_integration.extras.fields.request_fields import ChatRequest, CompletionRequest
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.streams import post

TOKENIZER = Tokenizer.from_pretrained()
CONVERTED = {"bad_words", "logit_bias", "logprobs", "max_tokens", "min_tokens", "prediction", "prompt_logprobs"}


def test_no_parameter_of_a_schema_is_forgotten() -> None:
    both = {field.name for field in fields(SamplingParams)} & {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
    }
    assert both == {*parsing.SAME, *sampling_fields.SAME} | CONVERTED


def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine(scheduling_policy="priority")
    given: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["END", "end"],
        "stop_token_ids": [9, 10],
        "seed": 11,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logprobs": 2,
        "ignore_eos": True,
    }
    response = post(
        engine, "/v1/completions", prompt="Hello", priority=-3, cache_salt="tenant", logit_bias={"5": -1.5}, **given
    )
    assert response.status_code == 200, response.text
    (asked,) = engine.submitted
    assert asked.params == SamplingParams(**given, logit_bias={5: -1.5})
    assert (asked.priority, asked.cache_salt) == (-3, "tenant")
    assert asked.prompt_tokens == tuple(TOKENIZER.encode("Hello"))
