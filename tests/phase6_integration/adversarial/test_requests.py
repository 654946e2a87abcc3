"""Class: bodies that crash, copy or reach what they should not, and errors that repeat what was sent.

Published cases, each of which is a 400 here that names the field: `n` without a bound (CVE-2026-34756, vLLM), an empty
prompt (CVE-2024-8768, vLLM), negative numbers (CVE-2026-21869, llama.cpp), arguments of the chat template
(CVE-2025-62426, vLLM) and the template itself (the class of CVE-2024-34359, llama-cpp-python, and CVE-2026-5760,
SGLang), tools with a pattern (CVE-2025-48944, vLLM), regular expressions and schemas for guided decoding (the same
class: test_grammars), tensors (CVE-2025-62164), images by address (CVE-2025-6242, vLLM: server-side request forgery).
`../test_refusals` and `../test_request_fields` have all that is refused.
"""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.adversarial.mutations import edits
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.running import error_of

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Hi"}]
COMMON: dict[str, Any] = (
    {"max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2, "seed": 1}
    | {"stop": ["a", "b"], "stop_token_ids": [5], "logit_bias": {"7": 1.5}, "repetition_penalty": 1.1, "user": "u"}
    | {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s", "request_id": "r"}
)
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
    app = create_app(engine, ServerSettings(max_choices=8))
    with asyncio.Runner() as runner:

        async def ask(path: str, body: bytes) -> Raw:
            async with Raw(app, path, body) as call:
                pass
            return call

        @settings(max_examples=examples)
        @given(st.sampled_from(VALID).flatmap(lambda valid: st.tuples(st.just(valid[0]), edits(valid[1]))))
        def is_answered_in_order(asked: tuple[str, bytes]) -> None:
            call = runner.run(ask(*asked))
            assert call.status in ORDERLY, call.content
            assert call.complete
            assert engine.live == 0
            assert app.state.answers.used == 0
            if call.status != 200:
                error_of(call.json)

        is_answered_in_order()


SECRET = "hunter2-secret"
IMAGE = {"type": "image_url", "image_url": {"url": f"http://169.254.169.254/{SECRET}"}}
REFUSED: list[tuple[str, Any, str | None]] = [  # with the field that is named
    (COMPLETIONS, {"prompt": SECRET, "n": 1_000_000}, "n"),
    (COMPLETIONS, {"prompt": SECRET, "best_of": 1_000_000}, "best_of"),
    (COMPLETIONS, {"prompt": [SECRET] * 1000}, "prompt"),
    (COMPLETIONS, {"prompt": "", "user": SECRET}, "prompt"),
    (COMPLETIONS, {"prompt": [1 << 31], "user": SECRET}, "prompt.0"),
    (COMPLETIONS, {"prompt": SECRET, "prompt_embeds": "gASV"}, "prompt_embeds"),
    (COMPLETIONS, {"prompt": f"{SECRET} " * 3000}, "prompt"),
    (COMPLETIONS, {"prompt": {SECRET: 1}}, "prompt"),
    (COMPLETIONS, {"prompt": SECRET, "temperature": SECRET}, "temperature"),
    (COMPLETIONS, {"prompt": SECRET, "model": SECRET}, "model"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": SECRET}}, "logit_bias.1"),
    (COMPLETIONS, {"prompt": "a", "stop": [SECRET * 20]}, "stop.0"),
    (COMPLETIONS, f'{{"prompt": "{SECRET}'.encode(), None),
    (COMPLETIONS, f'["{SECRET}"]'.encode(), None),
    (COMPLETIONS, b"\xff\xfe" + SECRET.encode(), None),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ cycler.__init__.__globals__ }}"}, "chat_template"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": SECRET}}, "chat_template_kwargs.tokenize"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"pattern": SECRET}}]},
        "tools.0.function",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{"role": "assistant", "content": SECRET, "tool_calls": 7}]}, "messages.0.tool_calls"),
    (TOKENIZE, {"prompt": 5, "model": SECRET}, "prompt"),
    (DETOKENIZE, {"tokens": [SECRET]}, "tokens.0"),
    (f"/v1/{SECRET}", {}, None),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
@awaited
async def test_what_broke_other_servers_is_refused_by_its_name_and_not_repeated(
    path: str, body: Any, field: str | None
) -> None:
    engine = FakeEngine()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with Raw(create_app(engine, ServerSettings()), path, content) as call:
        pass
    assert call.status == (404 if field == "model" or SECRET in path else 400)
    assert SECRET not in call.content.decode() + str(call.headers)
    param = error_of(call.json)["param"]
    assert param == field if field is None else param.startswith(field)
    assert engine.submitted == []
