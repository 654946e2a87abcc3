"""A stream from its status to [DONE], to clients that read, wait, stall and leave."""

import asyncio

import pytest

from phase6_integration.api.formatter import Formatter
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.streaming import PIECE, ResponseWriter
from phase6_integration.connect import create_app
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, says
from tests.phase6_integration.streams import LINE_BREAKS, PATHS, body, run, text_of

pytestmark = pytest.mark.usefixtures("one_tokenizer")


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
            assert call.status is None, f"the request is not admitted yet, and status {call.status} was sent"
            engine.room.set()
        assert call.status == 200
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert call.headers["x-accel-buffering"] == "no"
        assert call.events[-1] == "[DONE]"

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waits_for", ["room", "flow"])
def test_a_disconnect_aborts_the_requests(path: str, stream: bool, waits_for: str) -> None:
    """Those that wait to be admitted, and those that run."""

    async def test() -> None:
        engine = FakeEngine()
        getattr(engine, waits_for).clear()  # it would never end by itself
        app = create_app(engine, ServerSettings())
        async with Call(app, path, body(path, stream=stream, n=3)) as call:
            while len(engine.submitted) < 3:
                await asyncio.sleep(0)
            call.leave()
        wanted, dropped = sorted(one.id for one in engine.submitted), sorted(engine.dropped)
        assert dropped == wanted, f"the client left: {wanted} should be aborted in the engine; aborted are {dropped}"
        assert engine.live == 0
        assert not call.complete, "nothing more is sent to a client that has left"

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


def test_tokens_of_which_nothing_is_sent_do_not_end_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Formatter, "to_chunk", lambda self, chunk: b"")
    monkeypatch.setattr(ResponseWriter, "silence", 60.0)

    async def test() -> None:
        async with Call(create_app(FakeEngine(), ServerSettings()), PATHS[1], body(PATHS[1], stream=True)) as call:
            pass
        comments = call.content.count(b": keep-alive\n\n")
        assert comments > 0, "tokens came, nothing has been sent for 60 s, and the client gets no comment"
        assert call.events == ["[DONE]"]

    run(test)


def test_other_streams_have_a_turn_after_a_large_event() -> None:
    async def test() -> None:
        ticks = 0

        async def send(_: object) -> None:
            nonlocal ticks
            ticks += 1

        writer = ResponseWriter(send, ())
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: turns.append(ticks))
        for size in (PIECE + 1, 1):
            await writer.add(b"x" * size)
        await writer.send()
        assert (turns, ticks) == ([2], 3), "after the status and the large event, before the small one"

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
        assert b": keep-alive" not in streamed.content, "a comment is for a silence"
        assert last["choices"] == []
        assert last["usage"] == whole.json["usage"]
        assert {chunk["usage"] for chunk in chunks} == {None}
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1, "all events have the id of one answer"
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


@pytest.mark.parametrize("path", PATHS)
def test_a_line_break_of_unicode_is_escaped(path: str) -> None:
    """Clients split a stream by `str.splitlines`, as `iter_lines` of httpx2 does."""

    async def test() -> None:
        app = create_app(FakeEngine(says(LINE_BREAKS)), ServerSettings())
        async with Call(app, path, body(path, stream=True, max_tokens=64)) as call:
            pass
        assert call.content.decode().splitlines() == call.content.decode().removesuffix("\n").split("\n")
        assert "".join(map(text_of, call.events[:-1])) == LINE_BREAKS, "the client reads the text as it was"
        async with Call(app, path, body(path, max_tokens=64)) as call:
            pass
        assert len(call.content.decode().splitlines()) == 1

    run(test)
