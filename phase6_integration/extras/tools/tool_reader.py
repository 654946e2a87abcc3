"""ToolReader: splits an answer into reasoning, content and tool calls while it is generated.

It is a generator that waits for text by `yield from`: a pattern that ends in the middle of a possible match is tried
again with more text. It never looks at where one piece of text ends and the next begins, so the pieces do not change
what it finds.
"""

import secrets
from collections.abc import Generator, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import regex

from phase6_integration.extras.tools.call_arguments import of_python, of_text, text_of
from phase6_integration.extras.tools.tool_formats import THINK, ToolFormat

STRING = r'"([^"\\]{0,64})"'  # a key, a name, an id or a type in a call
_SPACE = regex.compile(r"\s*+")
_OUTSIDE = {
    '"': regex.compile(r'[^"{}\[\]]*+'),
    "\"'": regex.compile(r"[^\"'(){}\[\]]*+"),
}  # of strings, by their quotes
_INSIDE = {quote: regex.compile(rf"(?:[^{quote}\\]++|\\.)*+", regex.DOTALL) for quote in "\"'"}
T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]


class Section(Enum):
    """The kind of a piece of an answer."""

    REASONING = auto()
    CONTENT = auto()
    ARGUMENTS = auto()  # of the last call


class MalformedError(ValueError):
    """The text is not a call."""


class ToolReader:
    """Reads one answer. Malformed calls, and calls of other functions, are passed through as content.
    A call begins once its name and the beginning of its arguments are read. From then on the arguments are streamed."""

    def __init__(
        self,
        format: ToolFormat | None = None,
        functions: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        *,
        reasons: bool = False,
        begun: bool = False,
        parallel: bool = True,
        must_call: bool = False,
        include_reasoning: bool = True,
    ) -> None:
        """`functions`: those that may be called, and the schema of the arguments of each. `reasons`: the answer may
        begin with reasoning, and has done so in the prompt if that has `begun` it. `parallel`: false drops all calls
        but the first. `must_call`: there is no content; the beginning of a call that was cut off is dropped."""
        self._format, self._functions = format, functions
        self._reasons, self._begun, self._include_reasoning = reasons, begun, include_reasoning
        self._parallel, self._must_call = parallel, must_call
        self._text = ""
        self._start = 0  # where the text begins that belongs to no section yet
        self._at = 0  # the next character to read
        self._last = False  # all text has come
        self._streams: Section | None = None  # the section of the text from `start`, whatever follows it
        self._content = self._new_reasoning = ""
        self._new_calls: list[dict[str, Any]] = []
        self.calls = 0  # so far
        self._running = self._answer()

    def push(self, text: str, last: bool) -> str:
        """Add text, `last` if it is the end. Returns the new content; everything else that is new stays here until
        `take`."""
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

    def take(self) -> dict[str, Any]:
        """The fields of a delta beside the content. A call has its id and name where it begins."""
        fields = {"reasoning_content": self._new_reasoning, "tool_calls": self._new_calls}
        self._new_reasoning, self._new_calls = "", []
        return {name: value for name, value in fields.items() if value}

    # What is found.

    def _emit(self, section: Section, end: int | None = None) -> None:
        """Add the text from `start` to this section."""
        end = self._at if end is None else max(end, self._start)
        text, self._start = self._text[self._start : end], end
        self._add(section, text)

    def _add(self, section: Section, text: str) -> None:
        match section:
            case Section.CONTENT:
                self._content += text
            case Section.REASONING if self._include_reasoning:
                self._new_reasoning += text
            case Section.ARGUMENTS if text and (self._parallel or self.calls == 1):
                if not self._new_calls:
                    self._new_calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                self._new_calls[-1]["function"]["arguments"] += text

    def _skip(self) -> None:
        """Drop the text from `start`."""
        self._start = self._at

    def _begin_call(self, name: str) -> None:
        self.calls += 1
        if self._parallel or self.calls == 1:
            token, length = secrets.token_hex(12), self._format.id_length if self._format else None
            id, function = token[:length] if length else f"call_{token}", {"name": name, "arguments": ""}
            self._new_calls.append({"index": self.calls - 1, "id": id, "type": "function", "function": function})

    # An answer.

    def _answer(self) -> Wait[None]:
        if self._reasons:
            yield from self._reasoning()
        if self._format is None:
            self._streams = Section.CONTENT
            while not self._last:
                self._at = len(self._text)
                yield
            self._at = len(self._text)
            return
        if self._format.bare:
            yield from self._try(self._calls(self._format))
        while (yield from self._until(regex.escape(self._format.markers[0]), Section.CONTENT)):
            yield from self._try(self._calls(self._format))

    def _reasoning(self) -> Wait[None]:
        """It comes first, or not at all."""
        if self._begun or (yield from self._next(THINK.begin)):
            yield from self._skip_space()
            yield from self._until(THINK.end, Section.REASONING)
            yield from self._skip_space()

    def _try(self, calls: Wait[None]) -> Wait[None]:
        """Read calls. From the point where they are malformed, the text is content."""
        try:
            yield from calls
            yield from self._skip_space()
        except MalformedError:
            self._emit(self._streams or Section.CONTENT)
        self._streams = None

    def _calls(self, format: ToolFormat) -> Wait[None]:
        """What may follow the marker."""
        if format.named and not (yield from self._next(r"(?=[\[{])")):
            return (yield from self._named_call())
        yield from self._next(format.opening)
        yield from self._call()
        while (yield from self._next(format.separator)):
            yield from self._call()
        for pattern in format.closing:
            yield from self._next(pattern)
        return None

    def _named_call(self) -> Wait[None]:
        """`f[ARGS]{...}`, with an id before the arguments, or without the marker."""
        name = yield from self._name(r"([\w.-]{1,64})(?=[^\w.-])")
        yield from self._next(r"\[CALL_ID\]\w{0,64}(?=\W)")
        yield from self._next(r"\[ARGS\]")
        yield from self._arguments(name)

    def _call(self) -> Wait[None]:
        """`{"name": "f", "arguments": {...}}`, in any order, or as the model writes it."""
        written = self._format.written if self._format else "json"
        if written != "json" and not (yield from self._next(r"(?=\{)")):
            name, arguments = yield from (self._python() if written == "python" else self._elements())
            self._begin_call(name)
            self._add(Section.ARGUMENTS, arguments)
            return self._skip()
        name, arguments, begun = "", "", False
        yield from self._need(r"\{")
        while True:
            key = (yield from self._need(STRING + r"\s{0,64}:"))[1]
            if key == "name" and not name:
                name = yield from self._name(STRING)
            elif key in ("arguments", "parameters") and not arguments and not begun:
                if name:
                    yield from self._arguments(name)
                    begun = True
                else:
                    arguments = yield from self._object()
            elif key in ("type", "id"):
                yield from self._need(STRING)
            else:
                raise MalformedError
            if not (yield from self._next(",")):
                break
        if not name or not ((yield from self._next(r"\}")) or begun):
            raise MalformedError
        if not begun:
            self._begin_call(name)
            self._add(Section.ARGUMENTS, arguments or "{}")
        self._skip()

    def _python(self) -> Wait[tuple[str, str]]:
        """`f(a=1, b="x")`."""
        name = yield from self._name(r"([\w.-]{1,64})(?=\()")
        try:
            return name, of_python((yield from self._object("\"'")))
        except ValueError:
            raise MalformedError from None

    def _elements(self) -> Wait[tuple[str, str]]:
        """`<function=f>`, with each argument in an element of its own, as text."""
        name = yield from self._name(r"<function=([\w.-]{1,64})>")
        properties, values = self._functions[name].get("properties"), dict[str, Any]()
        while parameter := (yield from self._next(r"<parameter=([^>\n]{1,64})>")):
            text = yield from self._text_before("</parameter>")
            schema = properties.get(parameter[1]) if isinstance(properties, Mapping) else None
            values[parameter[1]] = of_text(text.removeprefix("\n").removesuffix("\n"), schema)
        yield from self._need("</function>")
        try:
            return name, text_of(values)
        except ValueError:
            raise MalformedError from None

    def _arguments(self, name: str) -> Wait[None]:
        """An object that is streamed."""
        yield from self._need(r"(?=\{)")
        self._skip()
        self._begin_call(name)
        self._streams = Section.ARGUMENTS
        yield from self._object()
        self._emit(Section.ARGUMENTS)
        self._streams = None

    def _object(self, quotes: str = '"') -> Wait[str]:
        """Read what begins with a bracket to the one that closes it. Returns it, unless it is streamed."""
        yield from self._need(r"(?=[{(])")
        begin, depth, quote = self._at - self._start, 0, ""
        while True:
            plain = (_INSIDE[quote] if quote else _OUTSIDE[quotes]).match(self._text, self._at)
            self._at = plain.end() if plain else self._at
            character = self._text[self._at : self._at + 1]
            if character in ("", "\\"):  # of an escape the second half is missing
                if self._last:
                    self._at = len(self._text)
                    raise MalformedError
                yield
                continue
            self._at += 1
            if character in quotes:
                quote = "" if quote else character
            else:
                depth += 1 if character in "{[(" else -1
                if not depth:
                    return self._text[self._start + begin : self._at]

    # Pieces of a call.

    def _next(self, pattern: str) -> "Wait[regex.Match[str] | None]":
        """Read white space, and what this pattern matches if it is next. Waits for the text that decides it."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()
            match = regex.compile(pattern).match(self._text, self._at, partial=True)
            if match is None or not match.partial or self._last:
                break
            yield
        if match is None or match.partial:
            return None
        self._at = match.end()
        return match

    def _need(self, pattern: str) -> "Wait[regex.Match[str]]":
        match = yield from self._next(pattern)
        if match is None:
            raise MalformedError
        return match

    def _name(self, pattern: str) -> Wait[str]:
        """The name of a function."""
        name: str = (yield from self._need(pattern))[1]
        if name not in self._functions:
            raise MalformedError
        return name

    def _skip_space(self) -> Wait[None]:
        yield from self._next(r"(?=\S)")
        self._skip()

    def _text_before(self, marker: str) -> Wait[str]:
        """The text up to a marker, which is read, too."""
        begin, pattern = self._at - self._start, regex.compile(regex.escape(marker))
        while not (found := pattern.search(self._text, self._at, partial=True)) or found.partial:
            self._at = found.start() if found else len(self._text)
            if self._last:
                raise MalformedError
            yield
        self._at = found.end()
        return self._text[self._start + begin : found.start()]

    def _until(self, marker: str, section: Section) -> Wait[bool]:
        """Add the text up to a marker, a pattern, to this section, without the white space before the marker. Without a
        marker, add all text and return False."""
        pattern = regex.compile(marker)
        while not (found := pattern.search(self._text, self._at, partial=True)) or found.partial:
            self._at = found.start() if found and not self._last else len(self._text)
            self._emit(section, None if self._last else len(self._text[: self._at].rstrip()))
            if self._last:
                return False
            yield
        self._emit(section, len(self._text[: found.start()].rstrip()))
        self._at = found.end()
        return True
