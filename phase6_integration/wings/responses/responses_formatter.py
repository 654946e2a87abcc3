"""ResponsesFormatter: writes the answer to a chat request as OpenAI's Responses API has it, whole or as events."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from sys import getsizeof
from typing import Any

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.api.chat import ChatFormatter
from phase6_integration.api.errors import RequestError
from phase6_integration.api.formatter import encode, pieces
from phase6_integration.api.state import ServerState
from phase6_integration.wings.responses.responses_items import Events, Item, Json
from phase6_integration.wings.responses.responses_request import ResponsesRequest

REQUEST = 12 << 10  # bytes that the request and this formatter take beside their text
TEXTS = 5  # times that the text of a stream is in memory at its end: kept, and in the last events
ECHOES = 4  # times that fields of the request are: kept, and in the first and the last events
DEFAULTS = asdict(SamplingParams())
TEXT_FIELDS = {"reasoning": "reasoning_content", "message": "content"}  # of a chat answer, by the kind of their items


class ResponsesFormatter(ChatFormatter):
    """The message of a chat answer becomes output items, and its deltas become their events."""

    prefix = "resp_"
    length_field = "max_output_tokens"
    done = b""  # the last event says it

    def __init__(self, server: ServerState, *chat: Any, asked: ResponsesRequest) -> None:
        super().__init__(server, *chat)
        self.excluding = ["text.format" if "response_format" in name else name for name in self.excluding]
        self._echo = _echo(asked, {**DEFAULTS, **server.settings.sampling_defaults})
        self._items: list[Item] = []
        self._sequence = itertools.count()
        self._begun = self._cut = False  # whether the first event is sent; whether the answer was cut by its length
        self._kept = REQUEST + ECHOES * len(encode(self._echo))  # bytes

    @property
    def text_bytes(self) -> int:
        return super().text_bytes + self._kept

    # The whole answer.

    def whole(self) -> Iterator[bytes]:
        choice = self.choice(0, self._unwritten.pop(0))
        self._cut = choice["finish_reason"] == FinishReason.LENGTH
        message = choice["message"]
        for kind, field in TEXT_FIELDS.items():
            if text := message.get(field):
                self._add(kind).pieces.append(text)
        for call in message.get("tool_calls") or ():
            self._add("function_call", call).pieces.append(call["function"]["arguments"])
        if not self._items:
            self._add("message")
        output = self._output()
        for item in output:
            if item["type"] == "message":
                item["content"] = ({**item["content"][0], "logprobs": _scores(choice)},)
        yield from pieces(self._answer(self._final, output, self.usage))

    # A stream.

    def event(self, choice: Json) -> bytes:
        """The events of a delta of the chat answer."""
        delta = choice["delta"]
        self._cut = choice["finish_reason"] == FinishReason.LENGTH
        events = self._begin()
        for kind, field in TEXT_FIELDS.items():
            if text := delta.get(field):
                events += self._grow(kind, text, _scores(choice))
        for call in delta.get("tool_calls") or ():
            events += self._grow_call(call)
        return b"".join(events)

    def last_chunk(self) -> bytes:
        events = [] if self._items else self._open("message")
        events += self._close("incomplete" if self._cut else "completed")
        final = self._answer(self._final, self._output(), self.usage)
        return b"".join((*events, self._event(f"response.{self._final}", {"response": final})))

    def failed(self, error: RequestError) -> bytes:
        """The error as an event, and as the state of the answer."""
        events = self._begin()
        self._cut = True
        events.append(self._event("error", {"code": error.code, "message": error.message, "param": error.param}))
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        failed = self._answer("failed", self._output(), error={"code": code, "message": error.message})
        return b"".join((*events, self._event("response.failed", {"response": failed})))

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        answer = self._answer("in_progress", ())
        return [self._event(f"response.{kind}", {"response": answer}) for kind in ("created", "in_progress")]

    def _grow(self, kind: str, text: str, scores: Iterable[Json] = ()) -> list[bytes]:
        events = [] if self._items and self._items[-1].kind == kind else self._open(kind)
        grown = self._events(self._items[-1].grown(text, scores))
        self._kept += TEXTS * (getsizeof(text) + (sum(map(len, grown)) if self.logprobs else 0))
        return events + grown

    def _grow_call(self, call: Json) -> list[bytes]:
        """The events of a delta of a tool call. The first delta of a call has its id and name."""
        goes_on = self._items and self._items[-1].number == call["index"]
        events = [] if goes_on else self._open("function_call", call)
        if text := call["function"].get("arguments"):
            events += self._grow("function_call", text)
        return events

    def _open(self, kind: str, call: Json | None = None) -> list[bytes]:
        return self._close("completed") + self._events(self._add(kind, call).added())

    def _close(self, status: str) -> list[bytes]:
        return self._events(self._items[-1].done(status)) if self._items else []

    def _events(self, events: Events) -> list[bytes]:
        return [self._event(f"response.{kind}", fields) for kind, fields in events]

    def _event(self, kind: str, fields: Json) -> bytes:
        data = encode({"type": kind, "sequence_number": next(self._sequence), **fields})
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"))

    # Both.

    @property
    def _final(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _add(self, kind: str, call: Json | None = None) -> Item:
        self._items.append(Item(kind, self.id.removeprefix(self.prefix), len(self._items), call))
        return self._items[-1]

    def _output(self) -> tuple[Json, ...]:
        """The items. Only the last one may have been cut."""
        last = len(self._items) - 1
        return tuple(item.json(self._final if item.index == last else "completed") for item in self._items)

    def _answer(
        self, status: str, output: tuple[Json, ...], usage: Json | None = None, error: Json | None = None
    ) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self.model,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage and _usage(usage),
            **self._echo,
        }


def _scores(choice: Json) -> Iterator[Json]:
    """The logprobs of a chat answer. Here every token has bytes; a special token has none of text."""
    for entry in (choice["logprobs"] or {}).get("content", ()):
        top = [{**other, "bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
        yield {**entry, "bytes": entry["bytes"] or [], "top_logprobs": top}


def _usage(chat: Json) -> Json:
    """Clients need every count; the ones that are not known are 0."""
    read, written = chat.get("prompt_tokens_details") or {}, chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens", 0)},
        "total_tokens": chat["total_tokens"],
    }


def _echo(asked: ResponsesRequest, defaults: Json) -> Json:
    """The fields of the request that the answer repeats, with the defaults of those that are not given."""

    def given(name: str, default: Any) -> Any:
        value = getattr(asked, name)
        return default if value is None else value

    sampling = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    format = asked.text.format if asked.text else None
    choice = given("tool_choice", "auto")
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": given("metadata", {}),
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        **{name: given(name, defaults[name]) for name in sampling},
        "top_logprobs": given("top_logprobs", 0),
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "user": asked.user,
        "background": False,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }
