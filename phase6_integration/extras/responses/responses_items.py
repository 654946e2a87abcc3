"""Output items of /v1/responses, with the events of a stream: an item is added, grows by deltas and is done."""

from collections.abc import Iterable
from typing import Any

import msgspec

Json = dict[str, Any]
Events = Iterable[tuple[str, Json]]  # the type of each, and its fields
KINDS = {  # of items: how an id begins, and what the deltas are of
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}


class Item:
    """An output item. It has one part, its text, which for a call is the arguments."""

    def __init__(self, kind: str, answer: str, index: int, call: Json | None = None) -> None:
        prefix, self.grows = KINDS[kind]
        self.kind = kind
        self.id = f"{prefix}_{answer}_{index}"
        self.index = index
        self.pieces: list[str] = []
        self.scores: list[bytes] = []  # the logprobs of a stream, as JSON
        self.number = call and call.get("index")  # of a call, among the calls
        self.about = {"call_id": call["id"], "name": call["function"]["name"]} if call else {}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> Json:
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.about else {**place, "content_index": 0}

    @property
    def logprobs(self) -> Json:
        scores = msgspec.Raw(b"[" + b",".join(self.scores) + b"]")
        return {"logprobs": scores} if self.kind == "message" else {}

    @property
    def part(self) -> Json:
        annotations = {"annotations": ()} if self.kind == "message" else {}
        return {"type": self.grows, "text": self.text, **annotations, **self.logprobs}

    def json(self, status: str) -> Json:
        item = {"id": self.id, "type": self.kind, "status": status, **self.about}
        if self.about:
            return {**item, "arguments": self.text}
        more = {"role": "assistant"} if self.kind == "message" else {"summary": ()}
        return {**item, **more, "content": () if status == "in_progress" else (self.part,)}

    def added(self) -> Events:
        yield "response.output_item.added", {"output_index": self.index, "item": self.json("in_progress")}
        if not self.about:
            yield "response.content_part.added", {**self.place, "part": self.part}

    def grown(self, delta: str, scores: bytes) -> Events:
        """`scores`: the logprobs of the delta, as JSON."""
        self.pieces.append(delta)
        event = {**self.place, "delta": delta}
        if self.kind == "message":
            event["logprobs"] = msgspec.Raw(scores)
            self.scores += [scores[1:-1]] if scores != b"[]" else []
        yield f"response.{self.grows}.delta", event

    def done(self, status: str) -> Events:
        if self.about:
            yield f"response.{self.grows}.done", {**self.place, "name": self.about["name"], "arguments": self.text}
        else:
            yield f"response.{self.grows}.done", {**self.place, "text": self.text, **self.logprobs}
            yield "response.content_part.done", {**self.place, "part": self.part}
        yield "response.output_item.done", {"output_index": self.index, "item": self.json(status)}
