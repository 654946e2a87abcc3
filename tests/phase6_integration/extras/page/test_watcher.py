"""Readers of a live record: each rebuilds the state of one that misses nothing, however late it came or slow it is."""

import asyncio
import json

import pytest

from phase0_request.tokenizer import Tokenizer
from phase1_kv_pool import PagedCache
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.extras.record.replay import Replay
from phase5_continuous.scheduler import Scheduler
from phase6_integration.extras.page import watcher as module
from phase6_integration.extras.page.record_messages import NAME, Watch, decode_watch, encode
from phase6_integration.extras.page.watcher import Watcher, Watchers
from phase6_integration.process.messages import SideMessage
from tests.phase5_continuous.support import Engine, request
from tests.phase6_integration.fake_engine import FakeEngine

HEADER = {"record": 1, "num_pages": 8, "page_size": 4}


class Live:
    """An engine with more to do than its pages hold, whose lines go to readers."""

    def __init__(self) -> None:
        self.engine = Engine(Scheduler(PagedCache(12, 4), watermark=0))
        self.engine.submit(*(request(f"request {number}", 9, 12) for number in range(6)))
        self.watchers: list[Watcher] = []
        self.header: Line | None = None
        self.whole = Replay()  # misses nothing
        self.recorder = Recorder(self.engine.core, self.write, text=True)

    def write(self, line: Line) -> None:
        if "record" in line:
            self.header = line
        self.whole.apply(json.loads(json.dumps(line)))
        for watcher in self.watchers:
            if watcher.put(line):
                self.recorder.snapshot()

    def join(self) -> Watcher:
        watcher = Watcher(self.header, None)
        self.watchers.append(watcher)
        self.recorder.snapshot()
        return watcher


def read(watcher: Watcher) -> list[Line]:
    return asyncio.run(watcher.lines(0)) or [] if watcher._news.is_set() else []  # else it would wait, on this loop


def check(replay: Replay, whole: Replay) -> None:
    assert replay.tables == whole.tables
    live = [
        {r: each for r, each in one.requests.items() if each.state in ("waiting", "running")} for one in (replay, whole)
    ]
    assert live[0] == live[1]


def test_a_reader_that_comes_later_has_the_header_and_the_present() -> None:
    live = Live()
    first, late, replay = live.join(), None, Replay()
    for _ in range(70):
        if live.engine.core.steps == 9 and late is None:
            late = live.join()
        live.engine.step()
        if late is not None:
            for line in read(late):
                replay.apply(line)
            check(replay, live.whole)
    assert live.header is not None
    assert replay.header == live.header
    assert sum("snapshot" in line for line in read(first)) == 1, "the snapshot was for the other one"


def test_a_reader_begins_with_the_header_of_its_own_record() -> None:
    """Fault: the last snapshot of a record whose readers had just left came before the header of the next."""
    reader = Watcher(None, None)
    for line in ({"snapshot": True, "step": 4}, {"step": 5}, HEADER, {"snapshot": True, "step": 6}):
        reader.put(line)
    assert read(reader) == [HEADER, {"snapshot": True, "step": 6}]


def test_a_reader_that_is_too_slow_misses_lines_is_told_how_many_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 5)
    live = Live()
    slow, replay, dropped = live.join(), Replay(), 0
    for number in range(70):
        live.engine.step()
        if number % 13 == 12:
            for line in read(slow):
                dropped += line.get("gone", {}).get("dropped", 0)
                replay.apply(line)
            check(replay, live.whole)
    assert dropped >= 12


def test_the_text_of_each_token_comes_once_to_each_reader() -> None:
    tokenizer = Tokenizer.from_pretrained()
    one, other = Watcher(None, tokenizer), Watcher(None, tokenizer)
    for line in (HEADER, {"out": [0], "ids": [35]}, {"out": [0, 0], "ids": [35, 470]}):
        one.put(line)
    assert [line.get("vocab") for line in read(one)] == [None, {"35": "A"}, {"470": " page"}]
    other.put(HEADER)
    other.put({"out": [0], "ids": [35]})
    assert [line.get("vocab") for line in read(other)] == [None, {"35": "A"}]


# The engine's side and its readers.


async def follow(watchers: Watchers, seen: list[Line]) -> None:
    async for lines in watchers.watch(False, 60):
        seen.extend(lines)


def test_the_engine_writes_while_somebody_reads_and_readers_end_with_it() -> None:
    async def watched() -> tuple[list[Line], list[Watch]]:
        engine, first, second = FakeEngine(), list[Line](), list[Line]()
        watchers = Watchers(engine)
        one = asyncio.create_task(follow(watchers, first))
        other = asyncio.create_task(follow(watchers, second))
        await asyncio.sleep(0)
        for line in (HEADER, {"step": 1, "t": 0.0}):
            engine.handle(SideMessage(NAME, encode(line)))
        while len(first) < 2:
            await asyncio.sleep(0)
        engine.handle(SideMessage(NAME, encode({"step": 2, "t": 0.1})))
        engine.handle(SideMessage("of another extra", b"?"))
        one.cancel()  # at the moment when a line arrives
        await asyncio.wait({one})
        assert len(engine.sent) == 2, "one still reads"
        await engine.drain(1)
        await asyncio.wait_for(other, 1)
        assert first == second[:2]
        return second, [decode_watch(message.body) for message in engine.sent]

    second, sent = asyncio.run(watched())
    assert second == [HEADER, {"step": 1, "t": 0.0}, {"step": 2, "t": 0.1}]
    assert [message.on for message in sent] == [True, True, False]
