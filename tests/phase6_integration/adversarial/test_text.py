"""Text that attacks: programs in a model's own files, ids that its tokenizer does not know, penalties that overflow."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase6_integration.api import tokenization
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.tokenizer_worker import KilledError, TokenizerWorker, encode
from tests.phase6_integration.asgi import awaited
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.life import PATIENCE, ROOT

CHAT = "/v1/chat/completions"
LIMIT = 1.0  # seconds for a template
HELLO = [{"role": "user", "content": "Hello"}]


def model(directory: Path, **config: Any) -> Path:
    """The bundled model without its weights."""
    shutil.copytree(BUNDLED, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    changed = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(changed))
    return directory


BOMBS = {
    "power": "{{ what|length ** (9**9) }}",
    "text": "{{ what * 10**9 }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long": "{{ what * 2 * 10**6 }}",
}
ARMED = "{% set what = messages[0].content %}" + "".join(
    f"{{% if what == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items()
)


@awaited
async def test_template_bombs_are_400s_and_everything_else_is_answered() -> None:
    """A template is a program. It ran in one of four threads, which nothing can stop: it froze the event loop (powers),
    took 4.9 GB (text), or took the threads for ever (loops). The class of CVE-2025-61620 (vLLM)."""
    settings = ServerSettings(template_timeout=LIMIT, chat_template=ARMED + "{{ messages[0].content }}")

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
        assert "took longer than 1 seconds" in refused[2].text
        assert "at most 4194304 fit" in refused[3].text
        text = await http.post("/tokenize", json={"prompt": "Hello"})
        assert text.json()["tokens"] == Tokenizer.from_pretrained().encode("Hello")


@pytest.mark.slow
@pytest.mark.parametrize("template", ["{{ 9**(9**9) }}", "{{ 'a'*10**9 }}"])
@awaited
async def test_a_bomb_that_explodes_when_the_template_is_compiled(template: str) -> None:
    """Jinja computes constants before it renders anything."""
    async with client(FakeEngine(), ServerSettings(template_timeout=LIMIT, chat_template=template)) as http:
        for _ in range(2):
            assert (await http.post(CHAT, json={"messages": HELLO})).status_code == 400
            assert (await http.post("/tokenize", json={"prompt": "Hello"})).status_code == 200


@awaited
async def test_a_normalizer_that_makes_gigabytes_of_a_letter_ends_alone(tmp_path: Path) -> None:
    """The tokenizer.json of a model may replace each letter by ten, nine times over: 6.2 GB in the server's process."""
    directory = model(tmp_path / "model")
    described = json.loads((directory / "tokenizer.json").read_text())
    steps = normalizers.Sequence([normalizers.Replace("z", "z" * 10)] * 9)
    described["normalizer"] = json.loads(steps.__getstate__())
    (directory / "tokenizer.json").write_text(json.dumps(described))

    async with client(FakeEngine(model=str(directory)), ServerSettings(template_timeout=LIMIT)) as http:
        for path, body in (
            ("/v1/completions", {"prompt": "z"}),
            (CHAT, {"messages": [{"role": "user", "content": "z"}]}),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 400, refused.text
            assert "the tokenizer" in refused.text or "the chat template" in refused.text
        assert (await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})).status_code == 200


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
    """The markers of tools were: a normalizer that multiplies `_` stopped the server for 27 s and took 1.3 GB, with one
    ordinary request."""

    class Unable:
        """What the server has of a tokenizer's library: all but what encodes."""

        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            assert not name.startswith(("encode", "train", "post_process", "normal")), f"{name} on the event loop"
            return getattr(self._backend, name)

    engine = FakeEngine()
    assert engine.tokenizer is not None
    engine.tokenizer._backend = Unable(engine.tokenizer._backend)  # type: ignore[assignment]
    for parser in (None, "deepseek_r1"):
        async with client(engine, ServerSettings(template_timeout=60, reasoning_parser=parser)) as http:
            for path, body in ASKED:
                limit = {"max_tokens": 2} if path.endswith("completions") else {}
                answer = await http.post(path, json={**body, **limit})
                assert answer.status_code == 200, (path, body, answer.text)
                assert "server_error" not in answer.text


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@awaited
async def test_a_tokenizer_process_that_was_killed_is_replaced() -> None:
    """While it does nothing, and at its time limit. The results of the others are their own."""
    expected = {word: [tuple(Tokenizer.from_pretrained().encode(word, False))] for word in ("page", "cache", "token")}

    worker = TokenizerWorker(str(BUNDLED), None)

    async def encoded(seconds: float = 60.0) -> dict[str, Any]:
        return {word: await worker.run(seconds, encode, [word], False) for word in expected}

    assert await encoded() == expected
    assert worker.server._running is not None
    parent = worker.server._running[0].pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    for killed_too in ([], [parent]):
        for pid in [int(children.read_text()), *killed_too]:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(KilledError):  # of the first job at most
            await worker.run(60.0, encode, ["page"], False)
        assert await encoded() == expected
    with pytest.raises(KilledError) as killed:
        await encoded(seconds=1e-6)
    assert killed.value.late
    assert await encoded() == expected
    worker.close()


@awaited
async def test_a_tokenizer_process_that_cannot_be_started_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: when the machine had no memory for the process, a sound prompt got a 400."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    made: list[TokenizerWorker] = []  # none that runs already

    def make(*setup: Any) -> TokenizerWorker:
        made.append(TokenizerWorker(*setup))
        return made[-1]

    monkeypatch.setattr(tokenization, "TokenizerWorker", make)
    async with client(FakeEngine()) as http:
        with monkeypatch.context() as shortage:
            shortage.setattr("subprocess.Popen", no_memory)
            refused = await http.post("/tokenize", json={"prompt": "Hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "tokenizer_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        assert (await http.post("/tokenize", json={"prompt": "Hello"})).status_code == 200
    for worker in made:
        worker.close()


def test_tokenizer_processes_end_with_a_server_that_is_killed() -> None:
    """They inherit its stdout, which is at its end when none of them is left."""
    program = f"""
import asyncio, os
from phase6_integration.process.tokenizer_worker import TokenizerWorker, encode
worker = TokenizerWorker({str(BUNDLED)!r}, "none")
print(asyncio.run(worker.run(60.0, encode, ["Hello"], False)), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, timeout=PATIENCE, text=True
    )
    assert done.stdout.startswith("[(")
    assert done.returncode == -signal.SIGKILL


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


@awaited
async def test_a_repetition_penalty_that_overflows_is_a_400() -> None:
    """Logits divided by 1e-45 are infinite: a 500 on demand."""
    async with client(FakeEngine()) as http:
        for path, body in (("/v1/completions", {"prompt": "Hi"}), (CHAT, {"messages": HELLO})):
            refused = await http.post(path, json={**body, "repetition_penalty": 1e-45})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "repetition_penalty")
