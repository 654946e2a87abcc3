"""Watchers: the readers of the engine's record. Each has a bounded queue, so that no reader slows the engine down."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator
from enum import Enum, auto

from phase0_request.tokenizer import Tokenizer
from phase5_continuous.extras.record.lines import Line, Vocabulary
from phase6_integration.extras.page.record_messages import NAME, Watch, decode_line, encode
from phase6_integration.process.async_engine import AsyncEngine, Observer
from phase6_integration.process.messages import SideMessage

MOST_LINES = 4096  # that wait for a reader; it misses what comes after them


class WatchState(Enum):
    """What the reader has: nothing, a header, or the engine's state after every line so far."""

    NOTHING = auto()
    HEADER = auto()
    PRESENT = auto()


class Watcher:
    """Lines go in with `put`, and out with `lines`, in order. A reader that is too slow misses some, and continues
    from a snapshot. So does a late reader, from the header that the others already have."""

    def __init__(self, header: Line | None, tokenizer: Tokenizer | None) -> None:
        self._header = header
        self._state = WatchState.NOTHING
        self._waiting = deque[Line]()
        self._missed = 0
        self._ended = False
        self._news = asyncio.Event()
        self._vocabulary = None if tokenizer is None else Vocabulary(tokenizer.label)

    def put(self, line: Line) -> bool:
        """Add a line. Returns whether the queue overflowed, so that a snapshot is needed to continue."""
        if "record" in line:
            self._header, self._missed, self._state = None, 0, WatchState.HEADER
        elif "snapshot" in line:
            begun = self._state is WatchState.HEADER or self._header is not None or self._missed
            if self._state is WatchState.PRESENT or not begun:
                return False  # for another reader, or of the record before this reader's
            self._begin_again()
        elif self._state is WatchState.NOTHING:
            self._missed += self._missed > 0
            return False
        else:
            self._state = WatchState.PRESENT
        self._waiting.append(line)
        self._news.set()
        if len(self._waiting) <= MOST_LINES:
            return False
        self._missed, self._state = len(self._waiting), WatchState.NOTHING
        self._waiting.clear()
        return True

    def _begin_again(self) -> None:
        if self._header is not None:
            self._waiting.append(self._header)
        if self._missed:
            self._waiting.append({"gone": {"dropped": self._missed}})
        self._header, self._missed, self._state = None, 0, WatchState.PRESENT

    def end(self) -> None:
        """There are no more lines."""
        self._ended = True
        self._news.set()

    async def lines(self, silence: float) -> list[Line] | None:
        """The waiting lines; an empty list after this many seconds without any; None at the end."""
        if not self._ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence):  # wait_for would swallow a cancellation that comes with a line
                    await self._news.wait()
        self._news.clear()
        taken, self._waiting = self._waiting, deque()
        if self._ended and not taken:
            return None
        return [line if self._vocabulary is None else self._vocabulary.add({**line}) for line in taken]


class Watchers(Observer):
    """The server's side of the live record: makes the engine write while someone reads, and passes the lines on."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._watchers: list[Watcher] = []
        self._header: Line | None = None  # of the record, while someone reads it
        self.by_client: Counter[str] = Counter()  # how many responses are being sent
        engine.observers.append(self)

    async def watch(self, text: bool, silence: float) -> AsyncGenerator[list[Line]]:
        """The engine's record from now on, some lines at a time, until the engine ends; an empty list after this many
        seconds without a line. With `text` it has the tokens of requests, for all readers or for none."""
        watcher = Watcher(self._header, self._engine.tokenizer if text else None)
        self._watchers.append(watcher)
        self._ask(Watch(True, text))
        try:
            while (lines := await watcher.lines(silence)) is not None:
                yield lines
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._header = None
                self._ask(Watch(False))

    def received(self, message: SideMessage) -> None:
        """Pass a line on to the readers."""
        if message.name != NAME:
            return
        line = decode_line(message.body)
        if "record" in line:
            self._header = line
        for watcher in self._watchers:
            if watcher.put(line):
                self._ask(Watch(True))

    def ended(self) -> None:
        self._header = None
        for watcher in self._watchers:
            watcher.end()

    def _ask(self, watch: Watch) -> None:
        self._engine.send(SideMessage(NAME, encode(watch)))
