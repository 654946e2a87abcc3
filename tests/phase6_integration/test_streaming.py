"""A stream from its status to [DONE], to clients that read, wait, stall and leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phase0_request.request import FinishReason
from phase6_integration.health import Health
from phase6_integration.messages import Ended, EngineRequest, Started
from phase6_integration.server.app import create_app
from phase6_integration.server.errors import RequestError
from phase6_integration.server.logs import Account
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.streaming import PIECE, ClientLeftError, ResponseWriter, SlowReaderError, _Sender
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, says

pytestmark = pytest.mark.usefixtures("one_tokenizer")
PATHS = ("/v1/completions", "/v1/chat/completions")
HELLO = [{"role": "user", "content": "Hello"}]
FAILURES = [
    (FinishReason.ERROR, 500, "internal_error"),
    (FinishReason.TIMEOUT, 408, "deadline_passed"),
]


def body(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    return {**prompt, "max_tokens": 8, **more}


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # a stream that never ends is a failure, not a hang


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_before_the_first_token_has_a_status(
    path: str, reason: FinishReason, status: int, code: str, stream: bool
) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda _: [reason])
        async with Call(create_app(engine, ServerSettings()), path, body(path, stream=stream)) as call:
            pass
        assert (call.status, call.json["error"]["code"]) == (status, code)
        assert "a reason that no client may see" not in call.content.decode()
        assert engine.live == 0

    run(test)


@pytest.mark.parametrize("path", PATHS)
def test_no_status_is_sent_before_there_is_room(path: str) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.room.clear()
        async with Call(create_app(engine, ServerSettings()), path, body(path, stream=True)) as call:
            while not engine.submitted:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert call.status is None
            engine.room.set()
        assert call.status == 200
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert call.headers["x-accel-buffering"] == "no"
        assert call.events[-1] == "[DONE]"

    run(test)


@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
def test_what_fails_in_its_first_step_has_a_status_too(reason: FinishReason, status: int, code: str) -> None:
    """No byte of a request that failed right after admission has been sent."""

    class AtOnce(FakeEngine):
        def _send(self, message: object) -> None:
            if isinstance(message, EngineRequest):
                error = "why" if reason is FinishReason.ERROR else None
                told = {"started": [Started(message.id, 0.0, 0)], "ended": [Ended(message.id, reason, error)]}
                asyncio.get_running_loop().call_soon(lambda: self._tell(**told))

    async def test() -> None:
        async with Call(create_app(AtOnce(), ServerSettings()), PATHS[0], body(PATHS[0], stream=True)) as call:
            pass
        assert (call.status, call.json["error"]["code"]) == (status, code)

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
def test_what_fails_later_is_an_event_and_done_comes_after_it(
    path: str, reason: FinishReason, status: int, code: str
) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda submit: [*submit.prompt[:3], reason])
        async with Call(create_app(engine, ServerSettings()), path, body(path, stream=True)) as call:
            pass
        *chunks, failure, done = call.events
        assert (call.status, done, failure["error"]["code"]) == (200, "[DONE]", code)
        assert set(failure["error"]) == {"message", "type", "param", "code"}
        assert chunks, "what came before the failure was sent"
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert "a reason that no client may see" not in call.content.decode()

    run(test)


def test_what_came_together_with_a_failure_is_sent_before_it() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda submit: [*submit.prompt * 20, FinishReason.ERROR])
        asked = body(PATHS[0], stream=True, max_tokens=50)
        async with Call(create_app(engine, ServerSettings()), PATHS[0], asked) as call:
            await call.until(lambda call: call.sends >= 2)
            call.reads.clear()
            while engine.live:
                await asyncio.sleep(0)
            call.reads.set()
        *chunks, failure, _ = call.events
        assert "".join(map(text_of, chunks)) == "Hello" * 20
        assert failure["error"]["code"] == "internal_error"

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_is_unavailable_not_a_fault_of_the_request(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.flow.clear()
        app = create_app(engine, ServerSettings())
        async with Call(app, "/v1/completions", body("", stream=stream)) as call:
            while not engine.submitted:
                await asyncio.sleep(0)
            if stream:
                await call.until(lambda call: call.status is not None)
            engine._process_failed(Health.DEAD, "its process has ended with status -9")
        error = call.events[-2]["error"] if stream else call.json["error"]
        assert error["code"] == "dead"
        assert error["type"] == "service_unavailable_error"
        assert call.status == (200 if stream else 503)
        assert "-9" not in call.content.decode()

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_requests(path: str, stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.flow.clear()  # it would never end by itself
        app = create_app(engine, ServerSettings())
        async with Call(app, path, body(path, stream=stream, n=3)) as call:
            while len(engine.submitted) < 3:
                await asyncio.sleep(0)
            call.leave()
        assert sorted(engine.dropped) == sorted(one.id for one in engine.submitted)
        assert engine.live == 0
        assert not call.complete

    run(test)


def test_a_disconnect_aborts_a_waiting_request() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.room.clear()
        async with Call(create_app(engine, ServerSettings()), PATHS[0], body(PATHS[0], stream=True)) as call:
            while not engine.submitted:
                await asyncio.sleep(0)
            call.leave()
        assert call.status is None
        assert engine.live == 0

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_given_up_on(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine()
        app = create_app(engine, ServerSettings(send_timeout=0.01))
        async with Call(app, PATHS[0], body(PATHS[0], stream=stream, user="u")) as call:
            call.reads.clear()
        assert not call.complete
        assert engine.live == 0
        account = call.scope["state"]["account"]
        found = account.user, account.error
        assert found == ("u", "the client left what it was sent unread for 0.01 seconds"), "the account of the request"

    run(test)


def test_a_client_that_stops_reading_in_the_middle_is_given_up_on() -> None:
    async def test() -> None:
        engine = FakeEngine()
        app = create_app(engine, ServerSettings(send_timeout=1.0))  # its first sends must succeed
        async with Call(app, PATHS[0], body(PATHS[0], stream=True, max_tokens=1000)) as call:
            await call.until(lambda call: len(call.events) >= 3)
            call.reads.clear()
            while not call.waits:
                await asyncio.sleep(0)
            engine.flow.clear()
        assert not call.complete
        assert engine.live == 0
        assert len(engine.dropped) == 1, "the engine was told"

    run(test)


def test_a_client_that_does_not_even_read_comments_is_given_up_on() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.flow.clear()
        app = create_app(engine, ServerSettings(send_timeout=1.0, keepalive=0.001))
        async with Call(app, PATHS[0], body(PATHS[0], stream=True)) as call:
            await call.until(lambda call: b": keep-alive" in call.content)
            call.reads.clear()
        assert not call.complete
        assert engine.live == 0

    run(test)


def test_silence_is_filled_with_comments() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.flow.clear()
        app = create_app(engine, ServerSettings(keepalive=0.001))
        async with Call(app, PATHS[1], body(PATHS[1], stream=True)) as call:
            await call.until(lambda call: call.content.count(b": keep-alive\n\n") >= 3)
            engine.flow.set()
        assert call.events[-1] == "[DONE]"
        assert b"".join(call.content.split(b": keep-alive\n\n")).startswith(b"data: "), "comments stand between events"

    run(test)


def test_no_comment_is_sent_where_there_is_no_silence() -> None:
    async def test() -> None:
        app = create_app(FakeEngine(), ServerSettings())
        async with Call(app, PATHS[0], body(PATHS[0], stream=True)) as call:
            pass
        assert b": keep-alive" not in call.content

    run(test)


def test_what_has_gathered_is_joined() -> None:
    """While the client does not read, tokens gather in one chunk, and its logprobs stay beside them."""

    async def test() -> None:
        engine = FakeEngine()
        app = create_app(engine, ServerSettings())
        async with Call(app, PATHS[0], body(PATHS[0], stream=True, max_tokens=200, logprobs=2)) as call:
            await call.until(lambda call: call.sends >= 2)
            call.reads.clear()
            while engine.live:
                await asyncio.sleep(0)
            call.reads.set()
        assert len(call.events) < 100
        assert "".join(map(text_of, call.events[:-1])) == "Hello" * 200
        found = [event["choices"][0]["logprobs"] for event in call.events[:-1]]
        assert sum(len(one["top_logprobs"]) for one in found) == 200
        assert [offset for one in found for offset in one["text_offset"]] == list(range(0, 1000, 5))

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_are_the_whole(path: str, n: int) -> None:
    async def test() -> None:
        app = create_app(
            FakeEngine(says("Streams of \u00e9\u4e16\u754c\U0001f600, cut nowhere inside a character.")),
            ServerSettings(),
        )
        asked = body(path, n=n, max_tokens=100, stream_options={"include_usage": True}, stream=True)
        async with Call(app, path, asked) as streamed:
            pass
        del asked["stream"], asked["stream_options"]
        async with Call(app, path, asked) as whole:
            pass
        *chunks, last, done = streamed.events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == whole.json["usage"]
        assert {chunk["usage"] for chunk in chunks} == {None}
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
        for choice in whole.json["choices"]:
            mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            reasons = [one["finish_reason"] for one in mine if one["finish_reason"]]
            assert reasons == [choice["finish_reason"]] == ["stop"]
            assert mine[-1]["finish_reason"], "nothing comes after the end"
            if "chat" in path:
                opening, *rest = mine
                assert opening["delta"] == {"role": "assistant", "content": ""}
                pieces = [one["delta"].get("content") for one in rest]
                assert "".join(piece or "" for piece in pieces) == choice["message"]["content"]
            else:
                pieces = [one["text"] for one in mine]
                assert "".join(pieces) == choice["text"]
            assert all(pieces[:-1]), "no chunk before the last is empty"
            assert "\ufffd" not in "".join(piece or "" for piece in pieces)

    run(test)


def test_usage_in_every_chunk_grows() -> None:
    async def test() -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        app = create_app(FakeEngine(says("one two " * 8, end=False)), ServerSettings())
        async with Call(app, PATHS[1], body(PATHS[1], stream=True, stream_options=options)) as call:
            pass
        counts = [event["usage"]["completion_tokens"] for event in call.events[:-1]]
        assert counts == sorted(counts)
        assert counts[0] == 0, "the role comes before any token"
        assert counts[-1] == 8
        assert call.events[-2]["choices"] == []

    run(test)


def test_what_may_begin_a_stop_string_is_held_back_and_the_stop_is_not_sent() -> None:
    async def test() -> None:
        app = create_app(FakeEngine(says("one two three four", end=False)), ServerSettings())
        asked = body(PATHS[0], stream=True, stop=["two thr", "never"], max_tokens=50)
        async with Call(app, PATHS[0], asked) as call:
            pass
        chunks = call.events[:-1]
        assert "".join(map(text_of, chunks)) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"][0]["stop_reason"] == "two thr"

    run(test)


def test_a_fault_of_ours_in_the_middle_is_an_event_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        app = create_app(FakeEngine(), ServerSettings())
        monkeypatch.setattr("phase6_integration.server.completions.for_completion", lambda *_: 1 / 0)
        async with Call(app, PATHS[0], body(PATHS[0], stream=True, logprobs=1)) as call:
            pass
        assert call.events[-1] == "[DONE]"
        assert call.events[-2]["error"]["code"] == "internal_error"
        assert "ZeroDivision" not in json.dumps(call.events)

    run(test)
    assert "ZeroDivisionError" in caplog.text


def test_a_fault_of_ours_before_the_answer_is_a_500_with_the_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = FakeEngine()
        app = create_app(engine, ServerSettings())
        monkeypatch.setattr("phase6_integration.server.completions.for_completion", lambda *_: 1 / 0)
        asked = body(PATHS[0], logprobs=1)
        async with Call(app, PATHS[0], asked, {"x-request-id": "mine"}) as call:
            pass
        assert (call.status, call.json["error"]["code"]) == (500, "internal_error")
        assert "mine" in call.json["error"]["message"]
        assert "ZeroDivision" not in call.content.decode()
        assert engine.live == 0

    run(test)


# The parts by themselves.


class Outputs:
    """A stream that was admitted: two chunks of five characters, then a failure of its iteration, if there is one."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure
        self.states = [SimpleNamespace(times=SimpleNamespace(finished=None, admitted=1.0))]
        self.aborted = False

    async def admitted(self, _: float | None = None) -> bool:
        return True

    async def __aiter__(self) -> AsyncIterator[list[Any]]:
        for _ in range(2):
            yield [SimpleNamespace(text=b"chunk", finish_reason=None)]
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        self.aborted = True


class Formatter:
    text_bytes = 0

    def accumulate(self, chunk: Any) -> None:
        self.text_bytes += len(chunk.text)

    def to_chunk(self, chunk: Any) -> bytes:
        return bytes(chunk.text)

    def whole(self) -> Any:
        return iter([b"{}"])


def sender(failure: Exception | None = None) -> tuple[Any, list[bytes]]:
    """A `_Sender`, and the bytes that it sends."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    server: Any = SimpleNamespace(settings=ServerSettings())
    formatter: Any = Formatter()
    outputs: Any = Outputs(failure)
    return _Sender(server, formatter, outputs, ResponseWriter(send, 30), Account(), "id"), sent


def test_the_lease_of_an_answer_grows_with_its_text() -> None:
    async def test() -> None:
        one, sent = sender()
        covered: list[int] = []
        lease: Any = SimpleNamespace(cover=covered.append)
        await one.whole(lease, 100)
        assert covered == [105, 110], "after each turn: the size of the lease and the text so far"
        assert sent[-1] == b"{}"

    run(test)


@pytest.mark.parametrize("error", [SlowReaderError("unread"), ClientLeftError()])
def test_nothing_is_sent_to_a_client_that_left_or_does_not_read(error: Exception) -> None:
    async def test() -> None:
        one, sent = sender(error)
        with pytest.raises(type(error)):
            await one.stream()
        assert sent == [b"", b"chunk", b"chunk"]

    run(test)


def test_the_reason_of_a_failure_is_noted_as_the_engine_gave_it() -> None:
    async def test() -> None:
        one, _ = sender()
        with pytest.raises(RequestError):
            one._check(SimpleNamespace(finish_reason=FinishReason.ERROR, error="NaN logits", health=None))
        assert (one.account.error, one.account.finish_reasons) == ("NaN logits", ["error"])

    run(test)


def test_other_streams_have_a_turn_after_a_large_event() -> None:
    async def test() -> None:
        one, sent = sender()
        large, small = (SimpleNamespace(text=b"x" * size, finish_reason=None) for size in (PIECE + 1, 1))
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(sent)))
        await one._send([large, small])
        assert turns == [2], "after the two pieces of the large event, before the small one"
        assert len(sent) == 3

    run(test)


def test_a_client_that_leaves_comments_unread_has_its_requests_aborted() -> None:
    async def test() -> None:
        one, _ = sender()

        async def keep_alive(_: float) -> None:
            raise SlowReaderError("unread")

        one.writer.keep_alive = keep_alive
        await one._keep_alive()
        assert (one.account.error, one.outputs.aborted) == ("unread", True)

    run(test)


def test_no_comment_is_sent_and_no_turn_is_wasted_while_a_send_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        sends: list[Any] = []
        slept: list[float] = []
        turn = asyncio.sleep

        async def send(message: Any) -> None:
            sends.append(message)
            await asyncio.Event().wait()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await turn(0)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        writer = ResponseWriter(send, 30)
        tasks = [asyncio.create_task(work) for work in (writer.write(b"event"), writer.keep_alive(1e-6))]
        for _ in range(10):
            await turn(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert len(sends) == 1, "a comment was sent while a send was under way"
        assert min(slept, default=1) > 0, "it asks in every turn of the event loop whether the send has ended"

    run(test)
