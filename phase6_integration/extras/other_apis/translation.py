"""What another API over the core's chat needs: its request becomes the equivalent chat request, and its answer
consists of parts, which the deltas of the chat open, extend and close."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, Discriminator, create_model

from phase6_integration.api.chat import ChatFormatter, continue_chat
from phase6_integration.api.errors import own_names
from phase6_integration.api.field_types import Hint, Unsupported
from phase6_integration.api.formatter import encode, pieces
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields.request_fields import ChatRequest

Json = dict[str, Any]
Events = Iterable[tuple[str, Json]]  # the type of each, and its fields
M = TypeVar("M", bound=BaseModel)
TEXTS = {"reasoning": "reasoning_content", "text": "content"}  # fields of a chat's delta, by the kind of their part


# The request.


def also_takes(no_effect: str = "", *others: tuple[Any, str]) -> Callable[[type[M]], type[M]]:
    """Add the fields of an API that this server does not have. `no_effect` ones may have any value; the others only
    null and the value beside their names, which changes nothing."""
    fields: Json = dict.fromkeys(no_effect.split(), (Hint, None))
    for harmless, names in others:
        only = Unsupported(*(() if harmless is None else (harmless,)))
        fields |= dict.fromkeys(names.split(), (Annotated[Any, only], None))

    def extended(model: type[M]) -> type[M]:
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
        )

    return extended


def by_type(message: str, default: str | None = None) -> Discriminator:
    """Chooses between the objects of a union by their `type`. `message` lists the types."""

    def kind(value: Any) -> str | None:
        return f"={value.get('type', default)}" if isinstance(value, dict) else None

    return Discriminator(kind, custom_error_type="type", custom_error_message=message)


def chat_request(body: BaseModel, names: Mapping[str, str], own: Json) -> ChatRequest:
    """The chat request equivalent to a body. A field comes from `own`; else from the body, at its path in `names` or
    at the same name."""
    same = {name: getattr(body, name, None) for name in ChatRequest.model_fields}
    renamed = {name: _at(body, path) for name, path in names.items()}
    fields = {**same, **renamed, **own}
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


async def answer_as(
    formatter: type[ChatFormatter], body: BaseModel, own: Json, request: Request, server: ServerState, **more: Any
) -> Response:
    """The answer to the equivalent chat request, written by a formatter, which is given `more`. Errors name the
    fields as the other API does."""
    with own_names(formatter.own_fields):
        chat = chat_request(body, formatter.own_fields, own)
        return await continue_chat(chat, request, server, partial(formatter, **more))


# The answer.


@dataclass(slots=True)
class Part:
    """A part of an answer: "reasoning", "text" or a "call", of which the text is the arguments."""

    index: int
    kind: str
    call: Json  # of a call, its first delta, with its number, id and name
    pieces: list[str] = field(default_factory=list)
    scores: list[bytes] = field(default_factory=list)  # logprobs that were streamed, as JSON

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def object_of(text: str) -> msgspec.Raw:
    """The object that a call's arguments are, as JSON. It is empty if they were cut off or are nested too deeply to
    be read."""
    try:
        value = json.loads(text or "{}")
        return msgspec.Raw(encode(value if isinstance(value, dict) else {}))
    except (ValueError, RecursionError):
        return msgspec.Raw(b"{}")


class TranslatedFormatter(ChatFormatter):
    """Writes the answer to a chat as another API has it: whole, or as the events of its parts."""

    done = b""  # the last event says it

    def __init__(self, *chat: Any) -> None:
        super().__init__(*chat)
        self.parts: list[Part] = []
        self.last: Json = {}  # the choice of the last delta; without one nothing has begun

    @abstractmethod
    def answer(self, choice: Json) -> Json:
        """The whole answer, once its parts are known. `choice` is the chat's."""

    @abstractmethod
    def begun(self) -> Events: ...

    @abstractmethod
    def opened(self, part: Part) -> Events: ...

    @abstractmethod
    def grown(self, part: Part, text: str) -> Events: ...

    @abstractmethod
    def closed(self, part: Part, last: bool) -> Events: ...

    @abstractmethod
    def ended(self) -> Events: ...

    def whole(self) -> Iterator[bytes]:
        choice = self.delta(0, self._unwritten.pop(0))
        for _ in self._grow({**choice, "logprobs": None}):
            continue
        yield from pieces(self.answer(choice))

    def event(self, choice: Json) -> bytes:
        return self.encoded(() if self.last else self.begun(), self._grow(choice))

    def last_chunk(self) -> bytes:
        return self.encoded(self._close(last=True), self.ended())

    def encoded(self, *events: Events) -> bytes:
        lines = (
            b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
            for some in events
            for kind, fields in some
        )
        return b"".join(lines)

    def open(self, kind: str, call: Json | None = None) -> Events:
        """Close the last part and begin another."""
        yield from self._close(last=False)
        self.parts.append(Part(len(self.parts), kind, call or {}))
        yield from self.opened(self.parts[-1])

    def _close(self, last: bool) -> Events:
        return self.closed(self.parts[-1], last) if self.parts else ()

    def _grow(self, choice: Json) -> Events:
        """Take a delta of the chat. The first delta of a call has its id and name."""
        self.last, delta = choice, choice["delta"]
        for kind, name in TEXTS.items():
            if text := delta.get(name):
                if not self.parts or self.parts[-1].kind != kind:
                    yield from self.open(kind)
                yield from self._add(text)
        for call in delta.get("tool_calls") or ():
            if not self.parts or self.parts[-1].call.get("index") != call["index"]:
                yield from self.open("call", call)
            if text := call["function"].get("arguments"):
                yield from self._add(text)

    def _add(self, text: str) -> Events:
        self.parts[-1].pieces.append(text)
        return self.grown(self.parts[-1], text)
