"""ChatTemplate: renders a conversation as text in which the control tokens that the template wrote are marked.

The text of a message must never become a control token such as `<|im_end|>`, whatever the template does with it: trim
it, cut it, join it to other text. So before compiling the template, this module replaces the name of each control token
in its source by a mark. The template wrote every mark in the result, and all else is text. The marks are surrogates,
code points that no valid text contains, so no message can hold one.

A template is a program of the model, and what it makes of a message may be a thousand times as long. It runs in a
sandbox, and ends when it has written too much or for too long.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from threading import Lock
from typing import Any

from phase0_request.params import MAX_TOKENS

MAX_CHARS = 32 * MAX_TOKENS  # that are written to render a conversation
SECONDS = 5.0  # to render it
Messages = Sequence[Mapping[str, Any]]
_FIRST_MARK, _LAST_MARK = 0xDC00, 0xDFFF
_MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")


class ChatTemplate:
    """A model's chat template, with the names of its control tokens and the variables that hold them."""

    def __init__(self, source: str, control: Iterable[str], named_tokens: Mapping[str, str]) -> None:
        """`named_tokens` are the template's variables: bos_token, eos_token and so on."""
        values = set(named_tokens.values())
        used = [name for name in control if (name in source or name in values) and not name.isidentifier()]
        if len(used) > _LAST_MARK - _FIRST_MARK:
            raise ValueError(f"the chat template names {len(used)} control tokens; at most 1024 can be marked")
        mark_of = {name: chr(_FIRST_MARK + number) for number, name in enumerate(used)}
        self._name_of = {mark: name for name, mark in mark_of.items()}
        longest_first = "|".join(map(re.escape, sorted(used, key=len, reverse=True)))
        self._source = re.sub(longest_first, lambda name: mark_of[name[0]], source) if used else source
        self._variables: dict[str, Any] = {name: mark_of.get(token, token) for name, token in named_tokens.items()}

    def render(
        self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The rendered text, split at the control tokens that the template wrote: every second part, from index 1, is
        the name of one, and the others are text. ValueError if the template rejects the messages, in the words of its
        `raise_exception`; what Python says of it is the cause.

        `variables` are the template's own (`tools`, `documents`, `enable_thinking`) and transformers'
        `continue_final_message`: the rendered text ends where the last message does.
        """
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        try:
            json.dumps([list(map(dict, messages)), dict(variables or {})], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("a message holds half of a surrogate pair; it is no text") from None
        except RecursionError:
            raise ValueError("a message is nested too deeply") from None
        # Imported here because it takes a second and a plain prompt does not need it.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        try:
            with _COMPILING:
                environment = _compile_jinja_template(self._source).environment  # transformers keeps what it compiles
                environment.concat, environment.filters["tojson"] = _joined, _to_json
            _LIMITS.set(_Limits())
            rendered = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                **{**(variables or {}), **self._variables},
            )
        except Exception as error:  # a template can raise anything
            told = isinstance(error, TemplateError | _LimitError)
            why = ": " + "".join(self._split(str(error))) if told else ""
            raise ValueError(f"the chat template refused the messages{why}") from error
        return self._split(str(rendered[0][0]))

    def _split(self, marked: str) -> list[str]:
        parts = _MARK.split(marked)
        parts[1::2] = [self._name_of.get(mark, mark) for mark in parts[1::2]]
        return parts


class _LimitError(ValueError):
    """A template wrote too much, or ran for too long."""


class _Limits:
    """The text and the time that one render may still use."""

    def __init__(self) -> None:
        self.chars, self.end = MAX_CHARS, time.monotonic() + SECONDS

    def take(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise _LimitError(f"it writes more than {MAX_CHARS} characters")
        if time.monotonic() > self.end:
            raise _LimitError(f"it took longer than {SECONDS:g} seconds")


_LIMITS = ContextVar[_Limits]("limits")  # of the render that runs in this thread
_COMPILING = Lock()


def _joined(pieces: Iterable[str]) -> str:
    """The output of a template, a macro or a block, piece by piece."""
    kept, limits = list[str](), _LIMITS.get()
    for piece in pieces:
        limits.take(len(piece))
        kept.append(piece)
    return "".join(kept)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """transformers' filter `tojson`. With an indent, each number of a nested list has its own line."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined([encoder.encode(value)] if indent is None else encoder.iterencode(value))
