"""IncrementalParser: reads an answer while it is generated, and tells its reasoning, content and tool calls apart.

A format is a generator over characters that waits, by `yield from`, for text that has not arrived. It never looks at
where one piece of text ends and the next begins, so the pieces do not change what it finds.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    text: str


class ContentDelta(AnswerDelta):
    """Text for the user."""


class ReasoningDelta(AnswerDelta):
    """Text that the model wrote before its answer."""


class CallStart(AnswerDelta):
    """A tool call begins; the text is the name of the function."""


class ArgumentsDelta(AnswerDelta):
    """More of the arguments of the last call, which are JSON."""


class MalformedError(ValueError):
    """The text is not of the format."""


class IncrementalParser(ABC):
    """One format. What it reads and cannot parse becomes content, with nothing left out."""

    markers: tuple[str, ...]  # that have to be in the text, also where they are control tokens of the vocabulary

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # of the text that has become no event yet
        self._at = 0  # the next character to read
        self._last = False  # whether no more text comes
        self._streams: type[AnswerDelta] | None = None  # what the text from `start` is, whatever follows it
        self._events: list[AnswerDelta] = []
        self._running = self._answer()

    def push(self, text: str, last: bool = False) -> list[AnswerDelta]:
        """Add text; `last` with the end of it. Returns what is certain now."""
        self._text, self._last = self._text[self._start :] + text, last
        self._at, self._start = self._at - self._start, 0
        next(self._running, None)
        if self._streams is not None:
            self._emit(self._streams)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _answer(self) -> Wait[None]:
        """Read a whole answer."""

    def _emit(self, kind: type[AnswerDelta], end: int | None = None) -> None:
        """The text from `start` is an event."""
        end = self._at if end is None else max(end, self._start)
        if end > self._start:
            self._events.append(kind(self._text[self._start : end]))
        self._start = end

    def _skip(self) -> None:
        """The text from `start` is no part of any event."""
        self._start = self._at

    def _peek(self) -> Wait[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self._last:
            yield
        return self._text[self._at : self._at + 1]

    def _next(self) -> Wait[str]:
        character = yield from self._peek()
        if not character:
            raise MalformedError
        self._at += 1
        return character

    def _space(self) -> Wait[str]:
        """Read whitespace. Returns the character after it."""
        while (character := (yield from self._peek())).isspace():
            self._at += 1
        return character

    def _optional(self, word: str) -> Wait[bool]:
        """Read this word, if it is next."""
        while len(self._text) < self._at + len(word) and word.startswith(self._text[self._at :]) and not self._last:
            yield
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _one_of(self, words: Collection[str]) -> Wait[str]:
        """Read the longest of these words that is next."""
        found = ""
        while (character := (yield from self._peek())) and any(word.startswith(found + character) for word in words):
            found += yield from self._next()
        if found not in words:
            raise MalformedError
        return found

    def _until(self, marker: str, kind: type[AnswerDelta]) -> Wait[bool]:
        """Emit the text up to a marker, which is read and not emitted, nor is whitespace before it. False if there is
        none: then all the text is emitted."""
        while (found := self._text.find(marker, self._at)) < 0:
            if self._last:
                self._at = len(self._text)
                self._emit(kind)
                return False
            self._at = len(self._text) - overlap(self._text, marker, self._at)
            self._emit(kind, len(self._text[: self._at].rstrip()))
            yield
        self._emit(kind, len(self._text[:found].rstrip()))
        self._at = found + len(marker)
        return True


def overlap(text: str, word: str, start: int = 0) -> int:
    """The length of the longest beginning of `word` that `text` ends with, from `start` on."""
    lengths = range(min(len(word) - 1, len(text) - start), 0, -1)
    return next((length for length in lengths if text.endswith(word[:length])), 0)
