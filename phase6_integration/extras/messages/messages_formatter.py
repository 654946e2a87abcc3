"""MessagesFormatter: writes the answer to a chat request as Anthropic's Messages API has it, whole or as events."""

from collections.abc import Iterator, Mapping
from typing import Any

from phase0_request.request import FinishReason
from phase6_integration.api.chat import ChatFormatter
from phase6_integration.api.errors import RequestError
from phase6_integration.api.formatter import encode, object_of

Json = dict[str, Any]
TYPES = {  # of errors, by their status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
FIELDS = {"thinking": ("reasoning_content", "thinking_delta"), "text": ("content", "text_delta")}  # of a chat's delta


NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ()}  # clients go on without


def error_body(error: RequestError, request_id: str) -> bytes:
    """The error as this API has it, and `param` and `code` as everywhere on this server."""
    kind = TYPES.get(error.status, "invalid_request_error")
    own = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    details = {"details": NO_THREADS} if error.param == "thread" else {}
    return encode({"type": "error", "error": {**own, **details}, "request_id": request_id})


class MessagesFormatter(ChatFormatter):
    """The message of a chat answer becomes content blocks, and its deltas become their events."""

    prefix = "msg_"
    own_fields: Mapping[str, str] = {
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "user": "metadata.user_id",
    }
    done = b""  # the last event says it

    def __init__(self, *chat: Any) -> None:
        super().__init__(*chat)
        self._content: list[Json] = []  # the blocks so far; the last may be open
        self._call: int | None = None  # the number of the call that the last block is
        self._is_begun = False
        self._stop: Json = {}

    def whole(self) -> Iterator[bytes]:
        for _ in self._grown(self.delta(0, self._unwritten.pop(0))):
            continue
        self._close()
        yield encode({**self._message(self.usage), "content": self._content, **self._stop})

    # A stream.

    def event(self, choice: Json) -> bytes:
        """The events of a delta of the chat answer."""
        return self._encoded(self._begun(), self._grown(choice))

    def last_chunk(self) -> bytes:
        return self._encoded(self._begun(), self._closed(), self._ended())

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self.request_id) + b"\n\n"

    def _encoded(self, *events: Iterator[Json]) -> bytes:
        lines = (
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for part in events for event in part
        )
        return b"".join(lines)

    def _begun(self) -> Iterator[Json]:
        if not self._is_begun:
            self._is_begun = True
            message = {**self._message(self._usage(0)), "content": (), "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": message}

    def _grown(self, choice: Json) -> Iterator[Json]:
        """The events of a delta. The first delta of a call has its id and name."""
        delta = choice["delta"]
        for kind, (field, name) in FIELDS.items():
            if text := delta.get(field):
                if self._call is not None or not self._content or self._content[-1]["type"] != kind:
                    signature = {"signature": ""} if kind == "thinking" else {}
                    yield from self._opened({"type": kind, kind: "", **signature})
                self._content[-1][kind] += text
                yield self._delta({"type": name, kind: text})
        for call in delta.get("tool_calls") or ():
            if call["index"] != self._call:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": ""}
                yield from self._opened(block, call["index"])
            if text := call["function"].get("arguments"):
                self._content[-1]["input"] += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
        if choice["finish_reason"] is not None:
            self._stop = self._stopped(choice)

    def _opened(self, block: Json, call: int | None = None) -> Iterator[Json]:
        yield from self._closed()
        self._content.append(block)
        self._call = call
        shown = block if call is None else {**block, "input": {}}
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(shown)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _closed(self) -> Iterator[Json]:
        if self._content:
            self._close()
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _ended(self) -> Iterator[Json]:
        yield {"type": "message_delta", "delta": self._stop, "usage": _usage(self.usage)}
        yield {"type": "message_stop"}

    # Both.

    def _close(self) -> None:
        """The input of a call is an object. That of one that was cut off is not complete, and left empty."""
        if self._call is not None:
            self._content[-1]["input"] = object_of(self._content[-1]["input"])
        self._call = None

    def _stopped(self, choice: Json) -> Json:
        reason, stop = choice["finish_reason"], choice["stop_reason"]
        sequence = stop if isinstance(stop, str) else None
        if reason == FinishReason.LENGTH:
            kind = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._content):
            kind = "tool_use"
        else:
            kind = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": kind, "stop_sequence": sequence}

    def _message(self, usage: Json) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "usage": _usage(usage)}


def _usage(chat: Json) -> Json:
    """In this API the input tokens are those that were not cached."""
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": chat["completion_tokens"],
    }
