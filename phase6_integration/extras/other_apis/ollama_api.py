"""Ollama's API, for clients that know no other: a request becomes a chat request, and the answer becomes lines of
JSON."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field, Tag

from phase6_integration.api.chat import ChatFormatter
from phase6_integration.api.errors import RequestError
from phase6_integration.api.field_types import FromClient, FunctionName, Name, RequestModel, Unsupported, by_kind
from phase6_integration.api.formatter import encode
from phase6_integration.api.schemas import MAX_CALLS, MAX_MESSAGES
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.extras.fields.request_fields import MAX_TOOLS, Tool
from phase6_integration.extras.other_apis.ollama_models import OPTIONS, router, served
from phase6_integration.extras.other_apis.translation import Json, also_takes, answer_as, object_of

CHAT, GENERATE = "/api/chat", "/api/generate"
OPENED = {"role": "assistant", "content": ""}


class OllamaCall(FromClient):
    class OllamaFunction(FromClient):
        name: FunctionName
        arguments: Json | None = None

    function: OllamaFunction


class OllamaMessage(FromClient):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: Name | None = None
    images: Annotated[Any, Unsupported([])] = None


@also_takes("num_ctx num_batch num_gpu main_gpu num_thread num_keep numa use_mmap use_mlock")
class Options(RequestModel):
    """The fields of `OPTIONS`, which the chat request checks. Options about loading a model have no effect."""

    num_predict: Any = None
    repeat_penalty: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


@also_takes("keep_alive", (False, "logprobs"), (0, "top_logprobs"))  # the model stays
class Fields(RequestModel):
    stream_type: ClassVar[str] = "application/x-ndjson"

    model: Name
    options: Options | None = None
    format: (
        Annotated[
            Annotated[Literal["json", ""], Tag("=text")] | Annotated[Json, Tag("=tool")],
            by_kind('format is "json" or a JSON schema'),
        ]
        | None
    ) = None
    stream: bool | None = None  # default: true
    think: bool | Literal["low", "medium", "high"] | None = None


class OllamaChat(Fields):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


@also_takes("", ([], "images context"), (False, "raw"), ("", "suffix template"))
class Generate(Fields):
    prompt: str | None = None
    system: str | None = None


@router.post(CHAT)
async def chat(body: Annotated[OllamaChat, json_body(OllamaChat)], request: Request, server: Server) -> Response:
    """A conversation that the assistant continues."""
    return await _answer(body, [*map(_message, body.messages or ())], request, server, "message")


@router.post(GENERATE)
async def generate(body: Annotated[Generate, json_body(Generate)], request: Request, server: Server) -> Response:
    """A conversation of one message that the assistant continues."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}] if body.prompt else []
    return await _answer(body, messages, request, server, "response")


async def _answer(body: Fields, messages: list[Json], request: Request, server: ServerState, field: str) -> Response:
    name = served(server, body.model)
    if not messages:  # a client has the model loaded
        return Response(_line(name, field, {}, done=True, done_reason="load"), media_type="application/json")
    length = body.options and body.options.num_predict
    schema = {"type": "json_schema", "json_schema": {"schema": body.format}}
    own = {
        "max_tokens": None if length in (-2, 0) else length,  # as -1: what fits
        "model": name,
        "messages": messages,
        "stream": body.stream is not False,
        "response_format": {"type": "json_object"} if body.format == "json" else schema if body.format else None,
        "chat_template_kwargs": None if body.think is None else {"enable_thinking": bool(body.think)},
        "include_reasoning": body.think is not False,
        "reasoning_effort": body.think if isinstance(body.think, str) else None,
    }
    return await answer_as(OllamaFormatter, body, own, request, server, field=field)


def _message(message: OllamaMessage) -> Json:
    called = [call.function for call in message.tool_calls or ()]
    calls = [{"function": {"name": one.name, "arguments": json.dumps(one.arguments or {})}} for one in called]
    own = {"tool_calls": calls or None, "reasoning_content": message.thinking}
    return {"role": message.role, "content": message.content or "", "name": message.tool_name, **own}


def _line(model: str, field: str, message: Json, **end: Any) -> bytes:
    """A part of an answer. `field` "response" renames its text, and its other fields stand beside it."""
    message = {field: message.pop("content", ""), **message} if field == "response" else {field: {**OPENED, **message}}
    now = datetime.now(UTC).isoformat()
    return encode({"model": model, "created_at": now, **message, "done": False, **end}) + b"\n"


def error_body(error: RequestError, request_id: str) -> bytes:
    return encode({"error": error.message, "param": error.param, "code": error.code})


class OllamaFormatter(ChatFormatter):
    """Each delta of the answer is a line, and a whole answer is one line. Calls come with the last."""

    prefix, done, stream_type = "", b"", Fields.stream_type.encode()
    own_fields: Mapping[str, str] = {
        "response_format": "format",
        **{own: f"options.{name}" for name, own in OPTIONS.items()},
    }

    def __init__(self, *chat: Any, field: str) -> None:
        super().__init__(*chat)
        self._field, self._calls = field, dict[int, list[str]]()  # of each call its name, and its arguments as text
        self.keep_alive = _line(self.model, field, {})

    def whole(self) -> Iterator[bytes]:
        yield self.event(self.delta(0, self._unwritten.pop(0)))

    def event(self, choice: Json) -> bytes:
        delta, reason, end = choice["delta"], choice["finish_reason"], {}
        for piece in delta.get("tool_calls") or ():
            called, call = piece["function"], self._calls.setdefault(piece["index"], ["", ""])
            call[0] += called.get("name") or ""
            call[1] += called.get("arguments") or ""
        found = {"content": delta.get("content"), "thinking": delta.get("reasoning_content")}
        if reason is not None:
            called = [{"name": name, "arguments": object_of(text)} for name, text in self._calls.values()]
            found["tool_calls"] = [{"function": function} for function in called]
            end = {"done": True, "done_reason": "stop" if reason == "tool_calls" else reason, **self._figures()}
        message = {name: value for name, value in found.items() if value}
        return _line(self.model, self._field, message, **end) if message or end else b""

    def failed(self, error: RequestError) -> bytes:
        return error_body(error, self.request_id) + b"\n"

    def _figures(self) -> Json:
        """Counts, and durations in nanoseconds."""
        times, usage = self.outputs[0].times, self.usage
        first, last = (times.tokens[0], times.tokens[-1]) if times.tokens else (times.arrival, times.arrival)
        read, said = first - (times.admitted or first), last - first
        durations = {"total": last - times.arrival, "load": 0, "prompt_eval": read, "eval": said}
        counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        return {**{f"{name}_duration": int(seconds * 1e9) for name, seconds in durations.items()}, **counts}


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.state.server.error_bodies["/api"] = error_body
