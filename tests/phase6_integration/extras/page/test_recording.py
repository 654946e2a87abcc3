"""The engine's side of the live record: when it writes a snapshot, however many ask for one."""

from typing import Any

import pytest

from phase5_continuous.extras.record.recorder import Recorder
from phase6_integration.extras.page.record_messages import NAME, Watch, decode_line, encode
from phase6_integration.extras.page.recording import record
from phase6_integration.process.engine_process import Loop
from phase6_integration.process.messages import SideMessage
from tests.phase6_integration.scripted_loop import Line, ask, idle_loop


def snapshots(line: Line) -> int:
    return sum("snapshot" in decode_line(message.body) for message in line.sent if isinstance(message, SideMessage))


def watch(on: bool) -> SideMessage:
    return SideMessage(NAME, encode(Watch(on)))


def watched_loop(now: list[float]) -> tuple[Loop, Line]:
    """A loop with something to tell, and one reader of its record."""
    loop, line = idle_loop(extras=[record])
    loop.core.clock = lambda: now[0]
    loop.handle(ask("a", max_tokens=1))
    loop.turn()
    loop.handle(watch(True))
    loop.turn()
    assert snapshots(line) == 1
    return loop, line


def test_readers_that_come_together_share_a_snapshot_and_those_after_them_wait() -> None:
    """Fault: each of thousands of connections made the step thread write the whole cache."""
    loop, line = watched_loop(now := [1.0])
    for now[0] in (1.01, 1.02, 1.09):
        for _ in range(100):
            loop.handle(watch(True))
        loop.turn()
    assert snapshots(line) == 1
    now[0] = 1.2
    loop.turn()
    loop.turn()
    assert snapshots(line) == 2


def test_a_snapshot_that_waits_is_written_by_an_idle_engine_too() -> None:
    loop, line = watched_loop(now := [1.0])
    timeouts: list[float | None] = []

    def receive(wait: bool, timeout: float | None = None) -> list[Any]:
        timeouts.append(timeout)
        if timeout is None:
            raise EOFError  # it sleeps until a message comes
        now[0] += timeout
        return []

    line.receive = receive  # type: ignore[method-assign]
    loop.handle(watch(True))
    with pytest.raises(EOFError):
        loop.run()
    assert snapshots(line) == 2
    assert len(timeouts) < 5


def test_no_snapshot_is_written_for_readers_that_have_left() -> None:
    loop, line = watched_loop(now := [1.0])
    before = len(line.sent)
    for _ in range(100):
        loop.handle(watch(False))
        loop.handle(watch(True))
    loop.handle(watch(False))
    now[0] = 9.0
    loop.turn()
    assert len(line.sent) == before


def test_a_snapshot_that_takes_long_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large cache, written ten times a second, would leave the steps no time."""
    loop, line = watched_loop(now := [1.0])
    snapshot = Recorder.snapshot

    def slow(recorder: Recorder) -> None:
        snapshot(recorder)
        now[0] += 0.5

    monkeypatch.setattr(Recorder, "snapshot", slow)
    for now[0] in (2.0, 5.0, 12.0, 13.0):
        loop.handle(watch(True))
        loop.turn()
    assert snapshots(line) == 3, "at 2, not at 5, and at 12.5"
