"""POST /v1/responses: OpenAI's Responses API, without state. A request becomes a chat request; the answer is written as
output items and their events.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.api.errors import RequestError
from phase6_integration.api.formatter import encode
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.extras.other_apis.responses_request import ResponsesRequest, chat_fields
from phase6_integration.extras.other_apis.translation import Events, Json, Part, TranslatedFormatter, answer_as

DEFAULTS = asdict(SamplingParams())
ITEMS = {  # of each kind of part: the type of its item, how an id begins, and what the deltas are of
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "text": ("message", "msg", "output_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}
router = APIRouter(tags=["model"])


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)  # of clients with a base URL without /v1
async def create_response(
    body: Annotated[ResponsesRequest, json_body(ResponsesRequest)], request: Request, server: Server
) -> Response:
    """A conversation of input items that the assistant continues. Nothing is stored: the input is the whole
    conversation."""
    return await answer_as(ResponsesFormatter, body, chat_fields(body), request, server, asked=body)


class ResponsesFormatter(TranslatedFormatter):
    """A part of the answer is an output item. It is added, grows by deltas and is done."""

    prefix = "resp_"
    length_field = "max_output_tokens"
    own_fields: Mapping[str, str] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, server: ServerState, *chat: Any, asked: ResponsesRequest) -> None:
        super().__init__(server, *chat)
        self._echo = _echo(asked, {**DEFAULTS, **server.settings.sampling_defaults})
        self._sequence = itertools.count()
        self._failed = False

    def answer(self, choice: Json) -> Json:
        if not self.parts:
            self.parts.append(Part(0, "text", {}))
        output = self._output()
        for item in output:
            if item["type"] == "message":
                item["content"] = ({**item["content"][0], "logprobs": _scores(choice)},)
        return self._response(self._final, output, self.usage)

    # A stream.

    def encoded(self, *events: Events) -> bytes:
        numbers = ({"sequence_number": number} for number in self._sequence)
        return super().encoded((kind, {**next(numbers), **fields}) for some in events for kind, fields in some)

    def begun(self) -> Events:
        for kind in ("created", "in_progress"):
            yield f"response.{kind}", {"response": self._response("in_progress", ())}

    def opened(self, part: Part) -> Events:
        yield "response.output_item.added", {"output_index": part.index, "item": self._item(part, "in_progress")}
        if not part.call:
            yield "response.content_part.added", {**self._place(part), "part": _content(part)}

    def grown(self, part: Part, text: str) -> Events:
        event = {**self._place(part), "delta": text}
        if part.kind == "text":
            scores = encode(list(_scores(self.last)))
            event["logprobs"] = msgspec.Raw(scores)
            part.scores += [scores[1:-1]] if scores != b"[]" else []
        yield f"response.{ITEMS[part.kind][2]}.delta", event

    def closed(self, part: Part, last: bool) -> Events:
        place, done = self._place(part), f"response.{ITEMS[part.kind][2]}.done"
        if part.call:
            yield done, {**place, "name": part.call["function"]["name"], "arguments": part.text}
        else:
            yield done, {**place, "text": part.text, **_logprobs(part)}
            yield "response.content_part.done", {**place, "part": _content(part)}
        item = self._item(part, self._final if last else "completed")
        yield "response.output_item.done", {"output_index": part.index, "item": item}

    def ended(self) -> Events:
        yield f"response.{self._final}", {"response": self._response(self._final, self._output(), self.usage)}

    def last_chunk(self) -> bytes:
        opened = b"" if self.parts else self.encoded(self.open("text"))
        return opened + super().last_chunk()

    def failed(self, error: RequestError) -> bytes:
        """The error as an event, and as the answer's state."""
        self._failed = True
        told = {"code": error.code, "message": error.message, "param": error.param}
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        failed = self._response("failed", self._output(), error={"code": code, "message": error.message})
        begun = () if self.last else self.begun()
        return self.encoded(begun, [("error", told), ("response.failed", {"response": failed})])

    # Both.

    @property
    def _final(self) -> str:
        is_cut = self._failed or self.last["finish_reason"] == FinishReason.LENGTH
        return "incomplete" if is_cut else "completed"

    def _place(self, part: Part) -> Json:
        place = {"item_id": self._id(part), "output_index": part.index}
        return place if part.call else {**place, "content_index": 0}

    def _id(self, part: Part) -> str:
        return f"{ITEMS[part.kind][1]}_{self.id.removeprefix(self.prefix)}_{part.index}"

    def _item(self, part: Part, status: str) -> Json:
        item = {"id": self._id(part), "type": ITEMS[part.kind][0], "status": status}
        if part.call:
            return {**item, "call_id": part.call["id"], "name": part.call["function"]["name"], "arguments": part.text}
        more = {"role": "assistant"} if part.kind == "text" else {"summary": ()}
        return {**item, **more, "content": () if status == "in_progress" else (_content(part),)}

    def _output(self) -> tuple[Json, ...]:
        """The items. Only the last one may have been cut."""
        last = len(self.parts) - 1
        return tuple(self._item(part, self._final if part.index == last else "completed") for part in self.parts)

    def _response(
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


def _content(part: Part) -> Json:
    annotations = {"annotations": ()} if part.kind == "text" else {}
    return {"type": ITEMS[part.kind][2], "text": part.text, **annotations, **_logprobs(part)}


def _logprobs(part: Part) -> Json:
    return {"logprobs": msgspec.Raw(b"[" + b",".join(part.scores) + b"]")} if part.kind == "text" else {}


def _scores(choice: Json) -> Iterator[Json]:
    """The logprobs of a chat answer. Here every token has bytes; a special token has no text."""
    for entry in (choice["logprobs"] or {}).get("content", ()):
        top = [{**other, "bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
        yield {**entry, "bytes": entry["bytes"] or [], "top_logprobs": top}


def _usage(chat: Json) -> Json:
    """Clients need every count; unknown ones are 0."""
    read, written = chat.get("prompt_tokens_details") or {}, chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens", 0)},
        "total_tokens": chat["total_tokens"],
    }


def _echo(asked: ResponsesRequest, defaults: Json) -> Json:
    """The request fields that the answer repeats, with the defaults of those not given."""
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
    given = asked.model_dump(include=set(repeated), exclude_none=True, warnings=False)  # no tag of a choice of tools
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


def attach(app: FastAPI) -> None:
    app.include_router(router)
