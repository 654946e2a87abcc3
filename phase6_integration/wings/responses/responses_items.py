"""Output items of /v1/responses, with the events of a stream: an item is added, grows by deltas and is done."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from phase6_integration.api.formatter import encode

Json = dict[str, Any]
Events = Iterator[tuple[str, Json]]  # the type of each, after "response.", and its fields


class Item:
    """An output item. It has one part, and grows by its deltas."""

    type: str
    prefix: str  # of its id
    grows: str  # what its deltas are of

    def __init__(self, answer: str, index: int) -> None:
        self.id = f"{self.prefix}_{answer}_{index}"
        self.index = index
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def part(self) -> Json:
        """The content: one part."""
        return {"type": self.grows, "text": self.text}

    def json(self, status: str) -> Json:
        content = () if status == "in_progress" else (self.part,)
        return {"id": self.id, "type": self.type, "status": status, "summary": (), "content": content}

    def added(self) -> Events:
        yield "output_item.added", {"output_index": self.index, "item": self.json("in_progress")}
        yield "content_part.added", {**self.place, "part": self.part}

    def grown(self, delta: str, logprobs: Iterable[Json]) -> Events:
        self.pieces.append(delta)
        yield f"{self.grows}.delta", {**self.place, "delta": delta}

    def done(self, status: str) -> Events:
        yield f"{self.grows}.done", {**self.place, "text": self.text}
        yield "content_part.done", {**self.place, "part": self.part}
        yield "output_item.done", {"output_index": self.index, "item": self.json(status)}


class ReasoningItem(Item):
    type, prefix, grows = "reasoning", "rs", "reasoning_text"


class MessageItem(Item):
    """The text of the answer. The logprobs of a stream are kept as JSON."""

    type, prefix, grows = "message", "msg", "output_text"

    def __init__(self, answer: str, index: int) -> None:
        super().__init__(answer, index)
        self.scores: list[bytes] = []

    @property
    def logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self.scores) + b"]")

    @property
    def part(self) -> Json:
        return {**super().part, "annotations": (), "logprobs": self.logprobs}

    def json(self, status: str) -> Json:
        content = () if status == "in_progress" else (self.part,)
        return {"id": self.id, "type": self.type, "status": status, "role": "assistant", "content": content}

    def grown(self, delta: str, logprobs: Iterable[Json]) -> Events:
        self.pieces.append(delta)
        scores = encode(list(logprobs))
        self.scores += [scores[1:-1]] if scores != b"[]" else []
        yield "output_text.delta", {**self.place, "delta": delta, "logprobs": msgspec.Raw(scores)}

    def done(self, status: str) -> Events:
        (_, fields), *others = super().done(status)
        yield "output_text.done", {**fields, "logprobs": self.logprobs}
        yield from others


class CallItem(Item):
    """A call of a function. Its text is the arguments."""

    type, prefix, grows = "function_call", "fc", "function_call_arguments"

    def __init__(self, answer: str, index: int, call: Json) -> None:
        super().__init__(answer, index)
        self.number = call.get("index")  # among the calls
        self.about = {"call_id": call["id"], "name": call["function"]["name"]}

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    def json(self, status: str) -> Json:
        return {"id": self.id, "type": self.type, "status": status, **self.about, "arguments": self.text}

    def added(self) -> Events:
        yield "output_item.added", {"output_index": self.index, "item": self.json("in_progress")}

    def done(self, status: str) -> Events:
        yield f"{self.grows}.done", {**self.place, "name": self.about["name"], "arguments": self.text}
        yield "output_item.done", {"output_index": self.index, "item": self.json(status)}
