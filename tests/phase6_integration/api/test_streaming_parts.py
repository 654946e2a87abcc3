"""The sender and the writer of a response, without an app around them."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import Account
from phase6_integration.api.streaming import PIECE, ClientLeftError, ResponseWriter, SlowReaderError, _Sender
from tests.phase6_integration.streams import run


class Outputs:
    """A stream that was admitted: two chunks of five characters, then a failure of its iteration, if there is one."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure
        self.outputs = [SimpleNamespace(generated=0, times=SimpleNamespace(finished=None, admitted=1.0))]
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
    n = 1
    excluding: tuple[str, ...] = ()

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

    server: Any = SimpleNamespace(settings=ServerSettings(), answered=[])
    formatter: Any = Formatter()
    outputs: Any = Outputs(failure)
    return _Sender(server, formatter, outputs, ResponseWriter(send, 30), Account(), "id"), sent


@pytest.mark.parametrize("error", [SlowReaderError("unread"), ClientLeftError()])
def test_nothing_is_sent_to_a_client_that_left_or_does_not_read(error: Exception) -> None:
    async def test() -> None:
        one, sent = sender(error)
        lease: Any = SimpleNamespace(cover=lambda _: None)
        with pytest.raises(type(error)):
            await one.stream(lease)
        assert sent == [b"", b"chunk", b"chunk"]

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
