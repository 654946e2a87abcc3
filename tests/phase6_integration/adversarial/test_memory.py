"""Class: one legal request, or many, that take all memory of the server (CWE-770).

Published cases: `n` without a bound copies requests until vLLM is killed (CVE-2026-34756), a chunked body without a
limit in cpp-httplib, the HTTP library of llama.cpp's server (CVE-2025-46728), video frames without a limit in vLLM
(CVE-2026-5497). Here `n` and bodies had limits, and the answer had none: n=128, max_tokens=1500 and logprobs=20 took
955 MB, up to 5,000 bytes a token, and 17 GB in a context of 32,768 tokens.
"""

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase6_integration import connect
from phase6_integration.api.application import Exchanges
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.extras.edge.memory_budget import SMALL_BODY, MemoryBudget
from phase6_integration.extras.edge.middleware import Edge
from phase6_integration.extras.observe.access_log import AccessLog
from phase6_integration.process.messages import frame
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.middleware_app import NO_WINGS

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello"},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    RESPONSES: {"input": "Hello"},
}


class Reader(Call):
    """Reads, and keeps nothing of it but its size."""

    async def _send(self, message: Any) -> None:
        self.size = getattr(self, "size", 0) + len(message.get("body", b""))
        await super()._send({**message, "body": b""} if "body" in message else message)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def words(request: Request) -> list[int]:
    """Four tokens of some letters each, again and again."""
    return list(islice(cycle((300, 700, 1200, 2000)), request.params.max_tokens))


def scored(path: str, count: int | None) -> dict[str, Any]:
    if count is None:
        return {}
    if path == RESPONSES:
        return {"top_logprobs": count}
    return {"logprobs": True, "top_logprobs": count} if path == CHAT else {"logprobs": count}


def sized(path: str, tokens: int, n: int) -> dict[str, Any]:
    return {"max_output_tokens": tokens} if path == RESPONSES else {"max_tokens": tokens, "n": n}


def grown(engine: FakeEngine) -> int:
    """The tokens of the shortest live output."""
    return min((output.generated for output, _ in engine._live.values()), default=0)


async def warm(app: Any, path: str) -> None:
    """One request, so that nothing is loaded or filled for the first time while memory is measured."""
    async with Call(app, path, {**HELLO[path], **sized(path, 8, 1), **scored(path, 20)}):
        pass


def silent(request: Request) -> list[int]:
    """Special tokens: they wait for the text after them, which never comes."""
    return [1] * request.params.max_tokens


SHAPES = [
    (words, COMPLETIONS, 4, 400, {"logprobs": 20}),
    (words, CHAT, 4, 400, {"logprobs": True, "top_logprobs": 20}),
    (words, COMPLETIONS, 8, 400, {}),
    (words, COMPLETIONS, 1, 8, {"prompt": [300] * 800, "logprobs": 20, "echo": True}),
    (words, COMPLETIONS, 64, 1, {}),
    (words, RESPONSES, 1, 1000, {"top_logprobs": 20}),
    (silent, COMPLETIONS, 1, 1500, {"logprobs": 20}),
]


@pytest.mark.parametrize(("script", "path", "n", "tokens", "more"), SHAPES)
@pytest.mark.parametrize("stream", [False, True])
@awaited
async def test_an_answer_takes_no_more_than_its_lease(
    script: Any, path: str, n: int, tokens: int, more: dict[str, Any], stream: bool
) -> None:
    """The cost model in bytes, against what the allocator counts once all but the last tokens are there. The stream's
    client reads nothing."""
    engine = FakeEngine(script)
    app = create_app(engine, ServerSettings())
    budget: MemoryBudget = app.state.answers
    budget.free = 0
    await warm(app, path)
    tracemalloc.start()
    asked = {**HELLO[path], **sized(path, tokens, n), "stream": stream, **more}
    async with Reader(app, path, asked) as call:
        if stream:
            call.reads.clear()
        while grown(engine) < tokens - 1 or len(engine.submitted) <= n:
            await asyncio.sleep(0)
        engine.flow.clear()
        gc.collect()  # what a generator has left behind is no part of the answer
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/tests/*")])
        tracemalloc.stop()
        held = sum(trace.size for trace in snapshot.traces)
        assert held <= budget.used, "the model is a bound"
        assert budget.used <= 6 * held, "and not far from the truth"
        engine.flow.set()
        call.reads.set()
    assert (call.status, call.complete) == (200, True)
    assert budget.used == 0


@pytest.mark.parametrize(
    ("path", "more"), [(CHAT, {"logprobs": True, "top_logprobs": 20}), (COMPLETIONS, {"logprobs": 20})]
)
@awaited
async def test_an_answer_with_logprobs_is_never_whole_in_memory(path: str, more: dict[str, Any]) -> None:
    """From its first token to its last byte it takes less than 600 bytes a token. It took 2,700 to 5,000. What the
    first answers leave for the next ones does not count: the names of tokens, say."""

    n, tokens = 24, 120
    bound = n * tokens * 600

    app = create_app(FakeEngine(words), ServerSettings())
    peaks: list[int] = []
    while len(peaks) < 4 and min(peaks, default=bound) >= bound:
        tracemalloc.start()
        async with Reader(app, path, {**HELLO[path], "max_tokens": tokens, "n": n, **more}) as call:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (call.status, call.complete) == (200, True)
    assert min(peaks) < bound


@awaited
async def test_an_answer_that_can_never_fit_is_refused_before_any_work() -> None:
    """128 choices in a context of 32,768 tokens with 20 alternatives each took 17 GB."""
    engine = FakeEngine()
    engine.max_model_len = 32_768
    app = create_app(engine, ServerSettings())
    asked = {**HELLO[CHAT], "n": 128, "logprobs": True, "top_logprobs": 20}
    async with Call(app, CHAT, asked) as call:
        pass
    error = call.json["error"]
    assert (call.status, error["code"], error["param"]) == (400, "answer_too_large", "max_tokens")
    assert error["type"] == "invalid_request_error"
    assert str(app.state.answers.limit // 4) in error["message"]
    assert engine.submitted == []
    assert app.state.answers.used == 0


@pytest.mark.parametrize(("stream", "leaves"), [(False, True), (True, False)])
@awaited
async def test_an_answer_that_does_not_fit_now_is_refused_until_another_has_gone(stream: bool, leaves: bool) -> None:
    """Whether that one was read to its end, or its client has left."""
    engine = FakeEngine(words)
    app = create_app(engine, connect.settings(max_buffered_bytes=3 << 20))
    asked = {**HELLO[COMPLETIONS], "max_tokens": 900, "logprobs": 20, "stream": stream}
    small = {**HELLO[COMPLETIONS], "max_tokens": 900, "stream": stream}
    engine.flow.clear()
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(Call(app, COMPLETIONS, asked)) for _ in range(6)]
        while len(engine.submitted) < 6:
            await asyncio.sleep(0)
        async with Call(app, COMPLETIONS, asked) as refused:
            pass
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        assert len(engine.submitted) == 6
        one = await stack.enter_async_context(Call(app, COMPLETIONS, small))
        for call in held * leaves:
            call.leave()
        engine.flow.set()
    assert one.status == 200, "a small answer is not locked out"
    async with Call(app, COMPLETIONS, asked) as again:
        pass
    assert again.status == 200
    assert app.state.answers.used == 0


VOCABULARY = 151_936
SHARED: dict[str, dict[str, Any]] = {
    "allowed tokens": {"allowed_token_ids": [*range(VOCABULARY)]},
    "bad words": {"bad_words": [f"{'word ' * 40}{number}" for number in range(64)]},
    "prompt": {"prompt": [300] * 2000, "stop_token_ids": [*range(128)]},
    "prompts": {"prompt": [[number] for number in range(64)], "logit_bias": {str(n): 1.0 for n in range(1024)}},
}


@pytest.mark.parametrize("more", SHARED.values(), ids=SHARED)
@awaited
async def test_what_the_completions_of_a_request_share_is_checked_sent_and_counted_once(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ids of a vocabulary in `allowed_token_ids`, with n=128: the event loop stood still for 10 s and the engine
    took 480 MB more, since a list of 0.95 MB was checked and sent 128 times."""
    checked, sent = [0], [0]
    check = SamplingParams.__post_init__

    def counting(params: SamplingParams) -> None:
        checked[0] += 1
        check(params)

    class Engine(FakeEngine):
        def _send(self, message: Any) -> None:
            sent[0] += len(frame(message))
            super()._send(message)

    engine = Engine()
    engine.config = replace(engine.config, vocab_size=VOCABULARY)
    app = create_app(engine, ServerSettings())
    app.state.answers.free = 0
    await warm(app, COMPLETIONS)
    monkeypatch.setattr(SamplingParams, "__post_init__", counting)

    async def cost(n: int) -> tuple[int, int, int]:
        """Params checked, bytes sent and bytes of the budget."""
        checked[0] = sent[0] = 0
        engine.room.clear()
        live = engine.live
        asked = {**HELLO[COMPLETIONS], **more, "max_tokens": 1, "n": n, "seed": 5}
        async with Call(app, COMPLETIONS, asked) as call:
            while engine.live == live and not call.status:
                await asyncio.sleep(0)
            found = checked[0], sent[0], app.state.answers.used
            engine.room.set()
        assert call.status == 200
        return found

    prompts = 64 if isinstance(more.get("prompt", [0])[0], list) else 1
    one, many = await cost(1), await cost(128 // prompts)
    assert many[0] == one[0] <= 2
    assert many[1] - one[1] < 128 * 200
    assert many[2] - one[2] < 128 * 11_000
    assert one[2] >= VOCABULARY // 8 or "allowed_token_ids" not in more


@awaited
async def test_bodies_that_never_end_leave_the_budget_alone_and_small_requests_pass() -> None:
    """500 clients send all but the end of the largest body. All of it was kept: 125 MB here, 2 GB with the defaults."""
    size, limit = 256 << 10, 16 << 20
    settings = connect.settings(max_body_bytes=size, max_buffered_bytes=limit, receive_timeout=60)
    ended: list[int] = []
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def request(pieces: int, whole: bool) -> tuple[Any, Any, Any]:
        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "app": NO_WINGS, "method": "POST", "path": "/v1/completions", "headers": headers}
        left = iter(range(pieces))

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            if (number := next(left, None)) is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            body = bytes(16 << 10)
            return {"type": "http.request", "body": body, "more_body": not whole or number + 1 < pieces}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ended.append(message["status"])
                assert message["status"] == 200 or (b"retry-after", b"5") in message["headers"]

        return scope, receive, send

    limits = Edge(app, settings)
    tracemalloc.start()
    refusing = AccessLog(Exchanges(limits), root="")
    calls = [asyncio.create_task(refusing(*request(15, whole=False))) for _ in range(500)]
    refused = 500 - limits.bodies.limit // ((15 << 14) - SMALL_BODY)
    while len(ended) < refused - 1:
        await asyncio.sleep(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(ended) == {503}
    assert peak < limits.bodies.limit + 500 * 2 * SMALL_BODY
    await refusing(*request(1, whole=True))
    assert ended[-1] == 200
    gone.set()
    await asyncio.gather(*calls)
    assert limits.bodies.used == 0


def test_a_budget_is_never_overdrawn() -> None:
    """A request holds what it covers, once, and gives all of it back."""
    budget = MemoryBudget(100)
    with budget.hold(40) as one, budget.hold() as other:
        one.cover(30)
        assert budget.used == 40
        other.cover(60)
        for hold in (one, other):
            with pytest.raises(Exception, match="in use"):
                hold.cover(61)
        assert budget.used == 100
    assert budget.used == 0
