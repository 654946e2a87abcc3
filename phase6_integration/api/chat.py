"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response

from phase6_integration.api.additions import Asked, Json
from phase6_integration.api.conversation import conversation, text_of
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.parsing import check_body, check_characters, output_length, requested_length, truncate
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
    """The answer to a conversation, for every API that has conversations. `make` is called like ChatFormatter."""
    prepare = check_body(server, body, 1)
    pool, client, length = server.tokenizers, request.state.client, requested_length(server, body)
    if whole := body.truncate_prompt_tokens is None:
        check_characters(server, ["".join(text_of(message.content) for message in body.messages)], "messages")
    prompt = await pool.chat(conversation(body), client, body.add_special_tokens is True, fits=whole)
    prompt = truncate(server, prompt, body, length or 1)
    default = server.settings.sampling_defaults.get("max_tokens")
    asked = Asked(body, client, [prompt], [output_length(server, prompt, length, default, "messages")])
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
