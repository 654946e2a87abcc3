"""Tool call parsers: the formats in which model families write the calls of tools."""

import re
from collections.abc import Collection

from phase6_integration.wings.tools.incremental import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    IncrementalParser,
    MalformedError,
    Wait,
)

MAX_WORD = 64  # characters of a key, an id or a type in a call
_OUTSIDE, _INSIDE = re.compile(r'[^"{}\[\]]*'), re.compile(r'[^"\\]*')  # of strings


class ToolParser(IncrementalParser):
    """Finds the calls of these functions. What looks like a call and is none, or of another function, is content. A
    call begins once its name and the beginning of its arguments are read; from then on they are streamed."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._quoted_names = [f'{name}"' for name in names]

    def _try(self, calls: Wait[None]) -> Wait[None]:
        """Read calls; from where they are malformed on, the text is content."""
        try:
            yield from calls
            yield from self._space()
            self._skip()
        except MalformedError:
            self._emit(self._streams or ContentDelta)
        self._streams = None

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
            self._events += [CallStart(name), ArgumentsDelta(arguments or "{}")]
        self._skip()

    def _arguments(self, name: str) -> Wait[None]:
        """An object that is streamed."""
        if (yield from self._space()) != "{":
            raise MalformedError
        self._skip()
        self._events.append(CallStart(name))
        self._streams = ArgumentsDelta
        yield from self._object()
        self._emit(ArgumentsDelta)
        self._streams = None

    def _object(self) -> Wait[str]:
        """Read an object to its closing brace. Returns it, unless it is streamed."""
        if (yield from self._space()) != "{":
            raise MalformedError
        begin, depth, quoted = self._at - self._start, 0, False
        while True:
            if found := (_INSIDE if quoted else _OUTSIDE).match(self._text, self._at):
                self._at = found.end()
            character = yield from self._next()
            if character == "\\":
                yield from self._next()
            elif character == '"':
                quoted = not quoted
            elif not quoted:
                depth += (character in "{[") - (character in "}]")
                if not depth:
                    return self._text[self._start + begin : self._at]

    def _symbol(self, symbol: str) -> Wait[None]:
        if (yield from self._space()) != symbol:
            raise MalformedError
        self._at += 1

    def _string(self) -> Wait[str]:
        """A short string without escapes."""
        yield from self._symbol('"')
        found = ""
        while (character := (yield from self._next())) != '"':
            found += character
            if character == "\\" or len(found) > MAX_WORD:
                raise MalformedError
        return found


class HermesParser(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, of Hermes and Qwen."""

    markers = ("<tool_call>", "</tool_call>")

    def _answer(self) -> Wait[None]:
        while (yield from self._until("<tool_call>", ContentDelta)):
            yield from self._try(self._tagged())

    def _tagged(self) -> Wait[None]:
        yield from self._call()
        yield from self._space()
        yield from self._optional("</tool_call>")


class LlamaParser(ToolParser):
    """`{"name": "f", "parameters": {...}}`, of Llama 3: an answer that begins so, or what follows `<|python_tag|>`.
    Further calls follow after a semicolon."""

    markers = ("<|python_tag|>",)

    def _answer(self) -> Wait[None]:
        yield from self._try(self._calls())
        while (yield from self._until("<|python_tag|>", ContentDelta)):
            yield from self._try(self._calls())

    def _calls(self) -> Wait[None]:
        yield from self._call()
        while (character := (yield from self._space())) in (";", ",", "{"):
            self._at += character != "{"
            yield from self._call()


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or for each call `[TOOL_CALLS]f[ARGS]{...}`, of
    Mistral."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _answer(self) -> Wait[None]:
        while (yield from self._until("[TOOL_CALLS]", ContentDelta)):
            yield from self._try(self._calls())

    def _calls(self) -> Wait[None]:
        first = yield from self._space()
        if first == "[":
            separator = "["
            while separator in ("[", ","):
                self._at += 1
                yield from self._call()
                separator = yield from self._space()
            yield from self._optional("]")
        elif first == "{":
            yield from self._call()
        else:
            name = yield from self._one_of(self._names)
            if (yield from self._optional("[CALL_ID]")):
                while (yield from self._peek()).isalnum():
                    self._at += 1
            yield from self._optional("[ARGS]")
            yield from self._arguments(name)
