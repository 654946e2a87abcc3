"""ResponsesFormatter: writes the answer to a chat request as OpenAI's Responses API has it, whole or as events."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.api.chat import ChatFormatter
from phase6_integration.api.errors import RequestError
from phase6_integration.api.formatter import encode, pieces
from phase6_integration.api.state import ServerState
from phase6_integration.extras.responses.responses_items import Events, Item, Json
from phase6_integration.extras.responses.responses_request import ResponsesRequest

DEFAULTS = asdict(SamplingParams())
TEXT_FIELDS = {"reasoning": "reasoning_content", "message": "content"}  # of a chat answer, by the kind of their items


class ResponsesFormatter(ChatFormatter):
    """The message of a chat answer becomes output items, and its deltas become their events."""

    prefix = "resp_"
    length_field = "max_output_tokens"
    own_fields: Mapping[str, str] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    done = b""  # the last event says it

    def __init__(self, server: ServerState, *chat: Any, asked: ResponsesRequest) -> None:
        super().__init__(server, *chat)
        self._echo = _echo(asked, {**DEFAULTS, **server.settings.sampling_defaults})
        self._items: list[Item] = []
        self._sequence = itertools.count()
        self._is_begun = self._cut = False  # whether the first event is sent; whether the answer was cut by its length

    def whole(self) -> Iterator[bytes]:
        choice = self.delta(0, self._unwritten.pop(0))
        for _ in self._grown({**choice, "logprobs": None}):
            continue
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
        return self._encoded(self._begun(), self._grown(choice))

    def last_chunk(self) -> bytes:
        opened = () if self._items else self._opened("message")
        return self._encoded(opened, self._closed("incomplete" if self._cut else "completed"), self._ended())

    def failed(self, error: RequestError) -> bytes:
        """The error as an event, and as the state of the answer."""
        return self._encoded(self._begun(), self._failed(error))

    def _encoded(self, *events: Events) -> bytes:
        lines = []
        for kind, fields in itertools.chain(*events):
            data = encode({"type": kind, "sequence_number": next(self._sequence), **fields})
            lines += [b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"]
        return b"".join(lines)

    def _begun(self) -> Events:
        if self._is_begun:
            return
        self._is_begun = True
        for kind in ("created", "in_progress"):
            yield f"response.{kind}", {"response": self._answer("in_progress", ())}

    def _grown(self, choice: Json) -> Events:
        """The events of a delta. The first delta of a call has its id and name."""
        delta = choice["delta"]
        self._cut = choice["finish_reason"] == FinishReason.LENGTH
        for kind, field in TEXT_FIELDS.items():
            if text := delta.get(field):
                if not self._items or self._items[-1].kind != kind:
                    yield from self._opened(kind)
                yield from self._items[-1].grown(text, encode(list(_scores(choice))))
        for call in delta.get("tool_calls") or ():
            if not self._items or self._items[-1].number != call["index"]:
                yield from self._opened("function_call", call)
            if text := call["function"].get("arguments"):
                yield from self._items[-1].grown(text, b"[]")

    def _opened(self, kind: str, call: Json | None = None) -> Events:
        yield from self._closed("completed")
        yield from self._add(kind, call).added()

    def _closed(self, status: str) -> Events:
        if self._items:
            yield from self._items[-1].done(status)

    def _ended(self) -> Events:
        yield f"response.{self._final}", {"response": self._answer(self._final, self._output(), self.usage)}

    def _failed(self, error: RequestError) -> Events:
        self._cut = True
        yield "error", {"code": error.code, "message": error.message, "param": error.param}
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        failed = self._answer("failed", self._output(), error={"code": code, "message": error.message})
        yield "response.failed", {"response": failed}

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
    format = asked.text.format if asked.text else None
    sampling = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    repeated = {
        **{name: defaults[name] for name in sampling},
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "top_logprobs": 0,
        "user": None,
    }
    given = asked.model_dump(include=set(repeated), exclude_none=True)
    return {
        **repeated,
        **given,
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"}},
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "truncation": asked.truncation or "disabled",
    }
