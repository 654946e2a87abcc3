"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from phase0_request.request import FinishReason
from phase6_integration.outputs import Chunk
from phase6_integration.server import openapi
from phase6_integration.server.bad_words import bad_words
from phase6_integration.server.dependencies import Server, ServerState, json_body
from phase6_integration.server.errors import conflict
from phase6_integration.server.formatter import Formatter
from phase6_integration.server.logprobs import for_chat
from phase6_integration.server.parsing import (
    check_lengths,
    check_options,
    engine_requests,
    output_lengths,
    prompt_alternatives,
    requested_length,
    truncate,
)
from phase6_integration.server.responses import ChatChunk, ChatResponse
from phase6_integration.server.schemas import ChatRequest
from phase6_integration.server.streaming import GenerationResponse

router = APIRouter(tags=["model"])


@router.post(
    "/v1/chat/completions",
    responses=openapi.answer(ChatResponse, ChatChunk) | openapi.errors(openapi.ENGINE),
    openapi_extra=openapi.request_body(ChatRequest),
)
async def create_chat_completion(
    body: Annotated[ChatRequest, json_body(ChatRequest)], request: Request, server: Server
) -> Response:
    """A conversation, continued by the assistant."""
    return await continue_chat(body, request, server, ChatFormatter)


async def continue_chat(
    body: ChatRequest, request: Request, server: ServerState, make: "Callable[..., ChatFormatter]"
) -> GenerationResponse:
    """The answer to a conversation, for every API that has them. `make` is called as ChatFormatter is."""
    check_options(server, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise conflict("top_logprobs", "top_logprobs need logprobs; set logprobs to true")
    length, context, pool = requested_length(body), server.engine.max_model_len, server.tokenizers
    if body.truncate_prompt_tokens is None:
        check_lengths(["".join(one.text for one in body.messages)], pool.tokenizer.longest, context, "messages")
    tenant, special = request.state.tenant, body.add_special_tokens is True
    prompt = await pool.chat(body.messages, tenant, body.add_generation_prompt is not False, special)
    prompt = truncate(prompt, body, length or 1, context)
    default = server.settings.sampling_defaults.get("max_tokens")
    lengths = output_lengths([prompt], length, default, context, "messages")
    formatter = make(server, body, request.state.request_id, [prompt])
    formatter.logprobs = bool(body.logprobs)
    if body.return_token_ids:
        formatter.first_event["prompt_token_ids"] = prompt
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    scores = prompt_alternatives(body, [prompt], None, server.settings.max_scores)
    words = await bad_words(pool, body.bad_words or (), tenant)
    requests = engine_requests(server, tenant, body, formatter.id, [prompt], lengths, logprobs, scores, words)
    return GenerationResponse(server, requests, formatter, body)


class ChatFormatter(Formatter):
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def fields(self) -> dict[str, Any]:
        return self.about_prompt(0)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        message = {"role": "assistant", "content": new.text}
        ids = new.token_ids if self.returns_ids else None
        return {"index": index, "message": message, **self._rest(index, new), "token_ids": ids}

    def delta(self, index: int, new: Chunk) -> dict[str, Any]:
        delta = {"content": new.text} if new.text else {}
        ids = {"token_ids": new.token_ids} if self.returns_ids else {}
        return {"index": index, "delta": delta, **self._rest(index, new), **ids}

    def _rest(self, index: int, new: Chunk) -> dict[str, Any]:
        entries = for_chat(self.names, new.tokens, new.logprobs or ()) if self.logprobs else None
        stop = self.outputs[index].stop_reason if new.finish_reason is FinishReason.STOP else None
        return {
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": new.finish_reason,
            "stop_reason": stop,
        }
