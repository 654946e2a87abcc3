"""/v1/embeddings: the hidden states are those of transformers, and the answers in the official client's types."""

import asyncio
import math
from array import array
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import CreateEmbeddingResponse

from phase0_request.params import SamplingParams
from phase2_prefill_decode.extras.outcome import extras_of
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.engine import NanoServingEngine
from tests.phase2_prefill_decode.models import saved, variant
from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.fake_engine import FakeEngine, client, embedding
from tests.phase6_integration.posting import SETTINGS, error_of, post

pytestmark = pytest.mark.usefixtures("one_tokenizer")

PATH = "/v1/embeddings"
EMBED = SamplingParams(max_tokens=1, embed=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def test_an_embedding_is_the_hidden_state_of_transformers(tmp_path: Path) -> None:
    """Of 64 prompts beside others that generate, with chunks, a prefix cache and a pool so small that some are
    preempted."""
    oracle = variant("qwen3")
    shared = [prompt * 2 for prompt in prompts(300)]
    asked = [[*shared[number % len(shared)], *range(5, 5 + number // 4)] for number in range(64)]
    small = {"kv_cache_pages": 34, "page_size": 4, "max_chunk_size": 7, "max_num_batched_tokens": 24}
    with NanoServingEngine.from_pretrained(saved(oracle, tmp_path), dtype="float32", **small) as made:
        mixed = [params for _ in asked for params in (GREEDY, EMBED)]
        answers = made.generate([prompt for prompt in asked for _ in range(2)], mixed)[1::2]
        stats = made.get_stats()
    assert stats["preemptions"] > 0
    assert stats["cache_hit_rate"] > 0
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            (theirs,) = oracle.model(torch.tensor([prompt])).last_hidden_state[:, -1]
        ours = torch.tensor(array("f", extras_of(answer.request).embedding or b""))
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def ask(engine: FakeEngine | None = None, **body: Any) -> dict[str, Any]:
    response = post(PATH, body, engine)
    assert response.status_code == 200, response.text
    if "encoding_format" not in body:  # the types of the client are those of the numbers that it makes of base64
        CreateEmbeddingResponse.model_validate(response.json(), strict=True)
    return dict(response.json())


def unit(prompt_tokens: int, dimensions: int | None = None) -> list[float]:
    """The embedding of the engine without a model, of length 1."""
    state = embedding(prompt_tokens)[:dimensions]
    return [number / math.dist(state, [0] * len(state)) for number in state]


@pytest.mark.parametrize(
    ("given", "lengths"),
    [([5, 6, 7], [3]), ([[5], [6, 7, 8]], [1, 3]), ("Hello", None), (["Hello", "How are you?", "Hello"], None)],
)
def test_an_input_has_any_of_four_forms(given: Any, lengths: list[int] | None) -> None:
    engine = FakeEngine()
    answer = ask(engine, input=given)
    found = [len(request.prompt_tokens) for request in engine.submitted]
    assert lengths is None or found == lengths
    assert [one["index"] for one in answer["data"]] == list(range(len(found)))
    for one, length in zip(answer["data"], found, strict=True):
        assert one["embedding"] == pytest.approx(unit(length))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(found)
    assert (answer["object"], answer["model"], answer["pooling"]) == ("list", "tiny_chat", "last")


@pytest.mark.parametrize("dimensions", [1, 2, None])
def test_fewer_dimensions_are_of_length_1_again_in_both_encodings(dimensions: int | None) -> None:
    texts = {"input": [5, 6], "dimensions": dimensions}
    numbers = ask(**texts)["data"][0]["embedding"]
    text = ask(**texts, encoding_format="base64")["data"][0]["embedding"]
    assert array("f", b64decode(text)).tolist() == numbers == pytest.approx(unit(2, dimensions))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"input": wrong}, "input", "input")
        for wrong in (None, 5, "", [], [[]], [""], ["a", 5], [4096], [-1], {"a": 1})
    ),
    ({"input": [[5]] * 1025}, "input", "n x inputs may be at most 1024, got 1 x 1025"),
    ({"input": [5] * 2049}, "input", "maximum context length is 2048"),
    ({"dimensions": 10_000}, "dimensions", "embeddings of this model have"),
    ({"dimensions": 0}, "dimensions", "dimensions"),
    ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"pooling": "mean"}, "pooling", "'last'"),
    ({"temperature": 1}, "temperature", "not a field of this request"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, words: str) -> None:
    response = post(PATH, {"input": "Hello", **body})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"].split(".")[0] == param
    assert words in error["message"]


def test_options_of_a_prompt_are_those_of_a_completion() -> None:
    engine = FakeEngine(scheduling_policy="priority")
    options = {"truncate_prompt_tokens": 2, "priority": 3, "cache_salt": "mine", "user": "u", "request_id": "one"}
    ask(engine, input=[5, 6, 7], model="tiny_chat", **options)
    (request,) = engine.submitted
    assert (request.prompt_tokens, request.priority, request.cache_salt) == ((6, 7), 3, "mine")
    assert request.id.startswith("embd-one-")
    assert (request.params.max_tokens, request.params.embed) == (1, True)


def test_inputs_count_as_prompts_in_the_metrics() -> None:
    async def read() -> str:
        async with client(FakeEngine(), SETTINGS) as http:
            await http.post(PATH, json={"input": [[5, 6], [7]]})
            return str((await http.get("/metrics")).text)

    found = asyncio.run(read()).splitlines()
    counts = {line.split("{")[0]: float(line.split()[-1]) for line in found if line.startswith("vllm:")}
    assert counts["vllm:prompt_tokens_total"] == 3
    assert counts["vllm:e2e_request_latency_seconds_count"] == 2


def test_an_unknown_model_is_not_found() -> None:
    assert post(PATH, {"input": "Hello", "model": "other"}, settings=ServerSettings()).status_code == 404
