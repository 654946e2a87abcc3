"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, without state. A request becomes a chat
request; the answer is written as content blocks and their events.
"""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response

from phase0_request.request import FinishReason
from phase6_integration.api.conversation import conversation
from phase6_integration.api.errors import RequestError, own_names
from phase6_integration.api.formatter import encode
from phase6_integration.api.state import Server, json_body
from phase6_integration.extras.other_apis.messages_request import CountTokensRequest, MessagesRequest, chat_fields
from phase6_integration.extras.other_apis.translation import (
    Events,
    Json,
    Part,
    TranslatedFormatter,
    answer_as,
    chat_request,
    object_of,
)

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
DELTAS = {  # of each kind of part, the type of its deltas and the field with their text
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ()}  # clients go on without
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
router = APIRouter(tags=["model"])


@router.post(PATH)
async def create_message(
    body: Annotated[MessagesRequest, json_body(MessagesRequest)], request: Request, server: Server
) -> Response:
    """A conversation that the assistant continues. If its last message is the assistant's, that message is
    continued."""
    user = (body.metadata and body.metadata.user_id) or body.user
    return await answer_as(MessagesFormatter, body, {**chat_fields(body), "user": user}, request, server)


@router.post(COUNT)
async def count_tokens(
    body: Annotated[CountTokensRequest, json_body(CountTokensRequest)], request: Request, server: Server
) -> dict[str, int]:
    """The number of tokens of a prompt."""
    server.model_name(body.model)
    with own_names(MessagesFormatter.own_fields):
        chat = chat_request(body, MessagesFormatter.own_fields, chat_fields(body))
        arguments = conversation(chat)
        return {"input_tokens": len(await server.tokenizers.chat(arguments, request.state.client, fits=True))}


def error_body(error: RequestError, request_id: str) -> bytes:
    """The error in this API's form, with `param` and `code` as everywhere on this server."""
    kind = TYPES.get(error.status, "invalid_request_error")
    own = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    details = {"details": NO_THREADS} if error.param == "thread" else {}
    return encode({"type": "error", "error": {**own, **details}, "request_id": request_id})


class MessagesFormatter(TranslatedFormatter):
    """A part of the answer is a content block. It starts, grows by deltas and stops."""

    prefix = "msg_"
    own_fields: Mapping[str, str] = {
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "user": "metadata.user_id",
    }

    def answer(self, choice: Json) -> Json:
        return {**self._message(self.usage), "content": list(map(_block, self.parts)), **self._stop()}

    # A stream.

    def begun(self) -> Events:
        message = {**self._message(self._usage(0)), "content": (), "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": message}

    def opened(self, part: Part) -> Events:
        yield "content_block_start", {"index": part.index, "content_block": _block(part)}

    def grown(self, part: Part, text: str) -> Events:
        kind, name = DELTAS[part.kind]
        yield "content_block_delta", {"index": part.index, "delta": {"type": kind, name: text}}

    def closed(self, part: Part, last: bool) -> Events:
        yield "content_block_stop", {"index": part.index}

    def ended(self) -> Events:
        yield "message_delta", {"delta": self._stop(), "usage": _usage(self.usage)}
        yield "message_stop", {}

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self.request_id) + b"\n\n"

    # Both.

    def _stop(self) -> Json:
        stop = self.last["stop_reason"]
        sequence = stop if isinstance(stop, str) else None
        if self.last["finish_reason"] == FinishReason.LENGTH:
            kind = "max_tokens"
        elif any(part.call for part in self.parts):
            kind = "tool_use"
        else:
            kind = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": kind, "stop_sequence": sequence}

    def _message(self, usage: Json) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "usage": _usage(usage)}


def _block(part: Part) -> Json:
    """The block of a part. The input of a call is an object, empty if the call was cut off."""
    if part.call:
        about = {"id": part.call["id"], "name": part.call["function"]["name"]}
        return {"type": "tool_use", **about, "input": object_of(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _usage(chat: Json) -> Json:
    """In this API, input tokens are the ones that were not cached."""
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": chat["completion_tokens"],
    }


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.state.server.error_bodies[PATH] = error_body
