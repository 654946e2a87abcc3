"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response

from phase6_integration.api.additions import Asked, Json
from phase6_integration.api.conversation import conversation, text_of
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.parsing import check_body, check_lengths, output_lengths, requested_length, truncate
from phase6_integration.api.schemas import ChatRequest
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.api.streaming import GenerationResponse, generate
from phase6_integration.process.outputs import Chunk

router = APIRouter(tags=["model"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)  # of clients with a base URL without /v1
async def create_chat_completion(
    body: Annotated[ChatRequest, json_body(ChatRequest)], request: Request, server: Server
) -> Response:
    """A conversation, continued by the assistant."""
    return await continue_chat(body, request, server, ChatFormatter)


async def continue_chat(
    body: ChatRequest, request: Request, server: ServerState, make: "Callable[..., ChatFormatter]"
) -> GenerationResponse:
    """The answer to a conversation, for every API that has them. `make` is called as ChatFormatter is."""
    prepare = check_body(server, body, 1)
    context, pool, clip = server.engine.max_model_len, server.tokenizers, server.settings.clip_max_tokens
    length = requested_length(body, context, clip)
    if whole := body.truncate_prompt_tokens is None:
        text = "".join(text_of(message.content) for message in body.messages)
        check_lengths([text], pool.tokenizer.longest, context, "messages")
    client = request.state.client
    prompt = await pool.chat(conversation(body), client, body.add_special_tokens is True, fits=whole)
    prompt = truncate(prompt, body, length or 1, context)
    default = server.settings.sampling_defaults.get("max_tokens")
    lengths = output_lengths([prompt], length, default, context, clip, "messages")
    asked = Asked(body, client, [prompt], lengths)
    return await generate(server, asked, prepare, make(server, asked, request.state.request_id))


class ChatFormatter(Formatter):
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        return {"index": index, "delta": {"role": "assistant", "content": ""}}

    def text(self, new: Chunk, whole: bool) -> Json:
        if whole:
            return {"message": {"role": "assistant", "content": new.text}}
        return {"delta": {"content": new.text} if new.text else {}}
