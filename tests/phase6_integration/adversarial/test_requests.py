"""Class: bodies that crash, copy or reach what they should not.

Published cases, each of which is a 400 here that names the field: `n` without a bound (CVE-2026-34756, vLLM), an empty
prompt (CVE-2024-8768, vLLM), negative numbers (CVE-2026-21869, llama.cpp), arguments of the chat template
(CVE-2025-62426, vLLM) and the template itself (the class of CVE-2024-34359, llama-cpp-python, and CVE-2026-5760,
SGLang), tools with a pattern (CVE-2025-48944, vLLM), regular expressions and schemas for guided decoding (the same
class: test_grammars), tensors (CVE-2025-62164), images by address (CVE-2025-6242, vLLM: server-side request forgery).
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.adversarial.mutations import edits
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Hi"}]
COMMON: dict[str, Any] = {
    "max_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "n": 2,
    "seed": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "logit_bias": {"7": 1.5},
    "repetition_penalty": 1.1,
    "user": "u",
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "request_id": "r",
}
VALID: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**COMMON, "prompt": ["one", "two"], "logprobs": 2, "echo": True}),
    (COMPLETIONS, {**COMMON, "prompt": [[5, 6], [7]]}),
    (CHAT, {**COMMON, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    (TOKENIZE, {"prompt": "one", "add_special_tokens": True, "return_token_strs": True}),
    (TOKENIZE, {"messages": MESSAGES, "add_generation_prompt": True}),
    (DETOKENIZE, {"tokens": [5, 6, 7]}),
]
ORDERLY = {200, 400, 404}


class Raw(Call):
    """A body as bytes."""

    def __init__(self, app: Any, path: str, body: bytes) -> None:
        super().__init__(app, path, None, {"content-length": str(len(body))})
        self._body = body


@pytest.mark.parametrize("examples", [120, pytest.param(5_000, marks=pytest.mark.slow)])
def test_no_body_is_a_fault_of_the_server(examples: int) -> None:
    engine = FakeEngine(max_model_len=64)
    app = create_app(engine, ServerSettings(max_choices=8, template_timeout=60))
    loop = asyncio.new_event_loop()

    async def ask(path: str, body: bytes) -> Raw:
        async with Raw(app, path, body) as call:
            pass
        return call

    @settings(max_examples=examples)
    @given(st.sampled_from(VALID).flatmap(lambda one: st.tuples(st.just(one[0]), edits(one[1]))))
    def is_answered_in_order(asked: tuple[str, bytes]) -> None:
        call = loop.run_until_complete(ask(*asked))
        assert call.status in ORDERLY, call.content
        assert call.complete
        assert engine.live == 0
        assert app.state.quotas.answers.used == 0
        if call.status != 200:
            assert call.json["error"].keys() == {"message", "type", "param", "code"}

    try:
        is_answered_in_order()
    finally:
        loop.close()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "n": 1_000_000}, "n"),
    (COMPLETIONS, {"prompt": "a", "best_of": 1_000_000}, "best_of"),
    (COMPLETIONS, {"prompt": ["a"] * 1000}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt.0"),
    (COMPLETIONS, {"prompt": [1 << 31]}, "prompt.0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_embeds": "gASV"}, "prompt_embeds"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ cycler.__init__.__globals__ }}"}, "chat_template"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"pattern": "("}}]},
        "tools.0.function.name",
    ),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
@awaited
async def test_what_broke_other_servers_is_refused_by_its_name(path: str, body: dict[str, Any], field: str) -> None:
    engine = FakeEngine()
    async with Call(create_app(engine, ServerSettings()), path, body) as call:
        pass
    assert (call.status, call.json["error"]["param"]) == (400, field)
    assert engine.submitted == []


@awaited
async def test_an_image_by_address_is_not_fetched() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}

    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": [part]}]}
    async with Call(create_app(engine, ServerSettings()), CHAT, body) as call:
        pass
    assert call.status == 400
    assert "169.254" not in call.content.decode()
    assert engine.submitted == []
