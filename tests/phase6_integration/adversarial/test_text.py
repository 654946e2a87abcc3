"""Text that attacks: messages that a template multiplies, ids without text, penalties that overflow."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from phase0_request import chat_template
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.asgi import awaited
from tests.phase6_integration.fake_engine import FakeEngine, client

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def model(directory: Path, **config: Any) -> Path:
    """The bundled model without its weights."""
    shutil.copytree(BUNDLED, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    changed = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(changed))
    return directory


BOMBS = {
    "repetition": "{{ what * 10**7 }}",
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "long": "{{ what * 2 * 10**6 }}",
}
ARMED = "{% set what = messages[0].content %}" + "".join(
    f"{{% if what == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items()
)


@awaited
async def test_template_bombs_are_400s_and_everything_else_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may make a template render without end. The class of CVE-2025-61620 (vLLM)."""
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    settings = ServerSettings(chat_template=ARMED + "{{ messages[0].content }}")

    def body(content: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

    async with client(FakeEngine(), settings) as http:
        bombs = [asyncio.create_task(http.post(CHAT, json=body(name))) for name in BOMBS]
        assert (await http.get("/version")).status_code == 200
        assert not any(bomb.done() for bomb in bombs)
        beside = await asyncio.gather(*(http.post(CHAT, json=body("Hello")) for _ in BOMBS))
        assert [answer.status_code for answer in beside] == [200] * len(BOMBS)
        refused = [await bomb for bomb in bombs]
        assert {(one.status_code, one.json()["error"]["param"]) for one in refused} == {(400, "messages")}
        reasons = "more than 33554432", "took longer than 1", "at most 32768 fit"
        assert [reason for reason, response in zip(reasons, refused, strict=True) if reason not in response.text] == []
        text = await http.post("/tokenize", json={"prompt": "Hello"})
        assert text.json()["tokens"] == Tokenizer.from_pretrained().encode("Hello")


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "tools": [TOOL]}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "n": 2, "stream": True}),
    (CHAT, {"messages": HELLO, "bad_words": ["word"], "stop": ["end"], "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}, "tools": [TOOL]}),
    ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 2, "truncate_prompt_tokens": 4}),
    (
        "/v1/responses",
        {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}]},
    ),
    ("/tokenize", {"messages": HELLO, "tools": [TOOL], "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@awaited
async def test_nothing_is_encoded_on_the_event_loop() -> None:
    """The markers of tools were: a slow normalizer stopped the server for 27 s, with one ordinary request."""

    class Elsewhere:
        """A backend of which nothing that encodes may be used in this thread."""

        def __init__(self, backend: Any) -> None:
            self._backend, self._here = backend, threading.current_thread()

        def __getattr__(self, name: str) -> Any:
            if name.startswith(("encode", "train", "post_process", "normal")):
                assert threading.current_thread() is not self._here, f"{name} on the event loop"
            return getattr(self._backend, name)

    engine = FakeEngine()
    assert engine.tokenizer is not None
    engine.tokenizer._backend = Elsewhere(engine.tokenizer._backend)  # type: ignore[assignment]
    for parser in (None, "deepseek_r1"):
        async with client(engine, connect.settings(reasoning_parser=parser)) as http:
            for path, body in ASKED:
                limit = {"max_tokens": 2} if path.endswith("completions") else {}
                answer = await http.post(path, json={**body, **limit})
                assert answer.status_code == 200, (path, body, answer.text)
                assert "server_error" not in answer.text


@awaited
async def test_padded_ids_are_tokens_without_text_everywhere(tmp_path: Path) -> None:
    """A model's embedding may have more rows than its tokenizer has tokens. A client may send such ids
    in a prompt; /detokenize and echo refused them."""
    directory = model(tmp_path / "model", vocab_size=4160)

    async with client(FakeEngine(model=str(directory)), ServerSettings()) as http:
        text = await http.post("/detokenize", json={"tokens": [300, 4100, 301, 4159]})
        assert text.json()["prompt"] == Tokenizer.from_pretrained().decode([300, 301])
        body = {"prompt": [300, 4100, 301], "max_tokens": 3, "echo": True, "logprobs": 1}
        answer = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        assert answer["text"] == 2 * Tokenizer.from_pretrained().decode([300, 301])
        assert answer["logprobs"]["tokens"][1::3] == ["token_id:4100"] * 2
        refused = await http.post("/detokenize", json={"tokens": [4160]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
