"""ToolReader: splits an answer into reasoning, content and tool calls while it is generated.

It is a generator over characters that waits, by `yield from`, for text that has not arrived. It never looks at where
one piece of text ends and the next begins, so the pieces do not change what it finds.
"""

import re
import secrets
import string
from collections.abc import Collection, Generator
from enum import Enum, auto
from sys import getsizeof
from typing import Any, TypeAlias, TypeVar

from phase6_integration.wings.tools.tool_formats import ToolFormat

BEGIN, END = "<think>", "</think>"  # of reasoning, as Qwen3 and DeepSeek-R1 write it
MAX_WORD = 64  # characters of a key, an id or a type in a call
_ALPHABET = string.ascii_letters + string.digits
_OUTSIDE, _INSIDE = re.compile(r'[^"{}\[\]]*'), re.compile(r'[^"\\]*')  # of strings
T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]


class Part(Enum):
    """What a piece of an answer is."""

    REASONING = auto()
    CONTENT = auto()
    ARGUMENTS = auto()  # of the last call


class MalformedError(ValueError):
    """The text is no call."""


class ToolReader:
    """Reads one answer. What looks like a call and is none, or of a function that is not one of `names`, is content. A
    call begins once its name and the beginning of its arguments are read; from then on the arguments are streamed."""

    def __init__(
        self,
        format: ToolFormat | None = None,
        names: Collection[str] = (),
        *,
        reasons: bool = False,
        begun: bool = False,
        parallel: bool = True,
        must_call: bool = False,
        include_reasoning: bool = True,
    ) -> None:
        """`reasons`: the answer may begin with reasoning, and has done so in the prompt if that has `begun` it.
        `parallel`: false drops all calls but the first. `must_call`: there is no content; the beginning of a call that
        was cut off is dropped."""
        self._format, self._names, self._quoted_names = format, names, [f'{name}"' for name in names]
        self._reasons, self._begun, self._include_reasoning = reasons, begun, include_reasoning
        self._parallel, self._must_call = parallel, must_call
        self._text = ""
        self._start = 0  # of the text that has been added to no part
        self._at = 0  # the next character to read
        self._last = False  # whether no more text comes
        self._streams: Part | None = None  # what the text from `start` is part of, whatever follows it
        self._content = self._new_reasoning = ""
        self._new_calls: list[dict[str, Any]] = []
        self.calls = 0  # so far
        self._running = self._answer()

    def push(self, text: str, last: bool) -> str:
        """Add text; `last` with the end of it. Returns the new content; what else is new stays here until `take`."""
        self._text, self._last = self._text[self._start :] + text, last
        self._at, self._start = self._at - self._start, 0
        next(self._running, None)
        if self._streams is not None:
            self._emit(self._streams)
        content, self._content = self._content, ""
        return "" if self._must_call else content

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._new_reasoning or self._new_calls)

    @property
    def text_bytes(self) -> int:
        arguments = (call["function"]["arguments"] for call in self._new_calls)
        return sum(map(getsizeof, (self._new_reasoning, *arguments)))

    def take(self) -> dict[str, Any]:
        """The fields of a delta beside the content. A call has its id and name where it begins."""
        fields = {"reasoning_content": self._new_reasoning, "tool_calls": self._new_calls}
        self._new_reasoning, self._new_calls = "", []
        return {name: value for name, value in fields.items() if value}

    # What is found.

    def _emit(self, part: Part, end: int | None = None) -> None:
        """The text from `start` is this part."""
        end = self._at if end is None else max(end, self._start)
        text, self._start = self._text[self._start : end], end
        self._add(part, text)

    def _add(self, part: Part, text: str) -> None:
        match part:
            case Part.CONTENT:
                self._content += text
            case Part.REASONING if self._include_reasoning:
                self._new_reasoning += text
            case Part.ARGUMENTS if text and (self._parallel or self.calls == 1):
                if not self._new_calls:
                    self._new_calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                self._new_calls[-1]["function"]["arguments"] += text

    def _skip(self) -> None:
        """The text from `start` is no part of the answer."""
        self._start = self._at

    def _begin_call(self, name: str) -> None:
        self.calls += 1
        if self._parallel or self.calls == 1:
            function = {"name": name, "arguments": ""}
            call = {"index": self.calls - 1, "id": self._new_id(), "type": "function", "function": function}
            self._new_calls.append(call)

    def _new_id(self) -> str:
        length = self._format.id_length if self._format else None
        if length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(length))

    # An answer.

    def _answer(self) -> Wait[None]:
        if self._reasons:
            yield from self._reasoning()
        if self._format is None:
            self._streams = Part.CONTENT
            while not self._last:
                self._at = len(self._text)
                yield
            self._at = len(self._text)
            return
        if self._format.bare:
            yield from self._try(self._calls(self._format))
        while (yield from self._until(self._format.markers[0], Part.CONTENT)):
            yield from self._try(self._calls(self._format))

    def _reasoning(self) -> Wait[None]:
        """It comes first, or not at all."""
        if not self._begun:
            yield from self._space()
        if self._begun or (yield from self._optional(BEGIN)):
            yield from self._space()
            self._skip()
            yield from self._until(END, Part.REASONING)
            yield from self._space()
            self._skip()

    def _try(self, calls: Wait[None]) -> Wait[None]:
        """Read calls; from where they are malformed on, the text is content."""
        try:
            yield from calls
            yield from self._space()
            self._skip()
        except MalformedError:
            self._emit(self._streams or Part.CONTENT)
        self._streams = None

    def _calls(self, format: ToolFormat) -> Wait[None]:
        """What may follow the marker."""
        first = yield from self._space()
        if format.named and first not in ("[", "{"):
            return (yield from self._named_call())
        if first and first == format.opening:
            self._at += 1
        yield from self._call()
        while (character := (yield from self._space())) and character in format.separators:
            self._at += character != "{"
            yield from self._call()
        yield from self._optional(format.closing)
        return None

    def _named_call(self) -> Wait[None]:
        """`f[ARGS]{...}`, with an id before the arguments, or without the marker."""
        name = yield from self._one_of(self._names)
        if (yield from self._optional("[CALL_ID]")):
            while (yield from self._peek()).isalnum():
                self._at += 1
        yield from self._optional("[ARGS]")
        yield from self._arguments(name)

    def _call(self) -> Wait[None]:
        """`{"name": "f", "arguments": {...}}`, in any order."""
        yield from self._symbol("{")
        name, arguments, begun = "", "", False
        while True:
            key = yield from self._string()
            yield from self._symbol(":")
            if key == "name" and not name:
                yield from self._symbol('"')
                name = (yield from self._one_of(self._quoted_names))[:-1]
            elif key in ("arguments", "parameters") and not arguments and not begun:
                if name:
                    yield from self._arguments(name)
                    begun = True
                else:
                    arguments = yield from self._object()
            elif key in ("type", "id"):
                yield from self._string()
            else:
                raise MalformedError
            if (yield from self._space()) != ",":
                break
            self._at += 1
        if not name:
            raise MalformedError
        if not (yield from self._optional("}")) and not begun:
            raise MalformedError
        if not begun:
            self._begin_call(name)
            self._add(Part.ARGUMENTS, arguments or "{}")
        self._skip()

    def _arguments(self, name: str) -> Wait[None]:
        """An object that is streamed."""
        if (yield from self._space()) != "{":
            raise MalformedError
        self._skip()
        self._begin_call(name)
        self._streams = Part.ARGUMENTS
        yield from self._object()
        self._emit(Part.ARGUMENTS)
        self._streams = None

    def _object(self) -> Wait[str]:
        """Read an object to its closing brace. Returns it, unless it is streamed."""
        if (yield from self._space()) != "{":
            raise MalformedError
        begin, depth, quoted = self._at - self._start, 0, False
        while True:
            if plain := (_INSIDE if quoted else _OUTSIDE).match(self._text, self._at):
                self._at = plain.end()
            character = yield from self._next()
            if character == "\\":
                yield from self._next()
            elif character == '"':
                quoted = not quoted
            elif not quoted:
                depth += (character in "{[") - (character in "}]")
                if not depth:
                    return self._text[self._start + begin : self._at]

    # Characters and words.

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
        """Read white space. Returns the character after it."""
        while (character := (yield from self._peek())).isspace():
            self._at += 1
        return character

    def _symbol(self, symbol: str) -> Wait[None]:
        if (yield from self._space()) != symbol:
            raise MalformedError
        self._at += 1

    def _string(self) -> Wait[str]:
        """A short string without escapes."""
        yield from self._symbol('"')
        string = ""
        while (character := (yield from self._next())) != '"':
            string += character
            if character == "\\" or len(string) > MAX_WORD:
                raise MalformedError
        return string

    def _optional(self, word: str) -> Wait[bool]:
        """Read this word, if it is next."""
        while len(self._text) < self._at + len(word) and word.startswith(self._text[self._at :]) and not self._last:
            yield
        is_next = self._text.startswith(word, self._at)
        self._at += len(word) if is_next else 0
        return is_next

    def _one_of(self, words: Collection[str]) -> Wait[str]:
        """Read the longest of these words that is next."""
        word = ""
        while (character := (yield from self._peek())) and any(name.startswith(word + character) for name in words):
            word += yield from self._next()
        if word not in words:
            raise MalformedError
        return word

    def _until(self, marker: str, part: Part) -> Wait[bool]:
        """The text up to a marker is this part, but for white space before the marker. False if there is none: then all
        the text is."""
        while (place := self._text.find(marker, self._at)) < 0:
            if self._last:
                self._at = len(self._text)
                self._emit(part)
                return False
            self._at = len(self._text) - _overlap(self._text, marker, self._at)
            self._emit(part, len(self._text[: self._at].rstrip()))
            yield
        self._emit(part, len(self._text[:place].rstrip()))
        self._at = place + len(marker)
        return True


def _overlap(text: str, word: str, start: int) -> int:
    """The length of the longest beginning of `word` that `text` ends with, from `start` on."""
    lengths = range(min(len(word) - 1, len(text) - start), 0, -1)
    return next((length for length in lengths if text.endswith(word[:length])), 0)
