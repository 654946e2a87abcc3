"""POST /tokenize and /detokenize: the tokens of a text or of a conversation, and the text of tokens."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Discriminator, Field, RootModel, Tag

from phase0_request.params import MAX_TOKENS
from phase6_integration.api.conversation import conversation
from phase6_integration.api.errors import UNKNOWN_TOKEN, unservable
from phase6_integration.api.field_types import Name, RequestModel, Token
from phase6_integration.api.state import Server, json_body
from phase6_integration.extras.fields.request_fields import ConversationFields

router = APIRouter(tags=["model"])


class TokenizeText(RequestModel):
    model: Name | None = None
    prompt: str
    add_special_tokens: bool | None = None  # default: true
    return_token_strs: bool | None = None


class TokenizeChat(ConversationFields):
    model: Name | None = None
    add_special_tokens: bool | None = None  # on top of those of the template; default: false
    return_token_strs: bool | None = None


def _kind(value: Any) -> str:
    return "=chat" if isinstance(value, dict) and "messages" in value else "=text"


Either = Annotated[TokenizeText, Tag("=text")] | Annotated[TokenizeChat, Tag("=chat")]


class TokenizeRequest(RootModel[Annotated[Either, Discriminator(_kind)]]):
    """A text, or a conversation."""


class DetokenizeRequest(RequestModel):
    model: Name | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True)]


@router.post("/tokenize")
async def tokenize(
    parsed: Annotated[TokenizeRequest, json_body(TokenizeRequest)], http: Request, server: Server
) -> Response:
    """The tokens of a text or of a conversation."""
    request, pool, client = parsed.root, server.tokenizers, http.state.client
    server.model_name(request.model)
    names = http.app.state.names

    def content(tokens: Sequence[int]) -> bytes:
        strings = [names[token].text for token in tokens] if request.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": server.engine.max_model_len, "tokens": tokens}
        return msgspec.json.encode({**answer, "token_strs": strings})

    if isinstance(request, TokenizeChat):
        tokens = await pool.chat(conversation(request), client, request.add_special_tokens is True)
    else:
        (tokens,) = await pool.encode([request.prompt], client, request.add_special_tokens is not False)
    return Response(await pool.run(lambda: content(tokens), len(tokens)), media_type="application/json")


@router.post("/detokenize")
async def detokenize(
    request: Annotated[DetokenizeRequest, json_body(DetokenizeRequest)], server: Server
) -> dict[str, str]:
    """The text of tokens."""
    server.model_name(request.model)
    if max(request.tokens, default=0) >= (vocab_size := server.engine.config.vocab_size):
        message = f"tokens: token ids of this model run from 0 to {vocab_size - 1}, got {max(request.tokens)}"
        raise unservable("tokens", message, UNKNOWN_TOKEN)
    return {"prompt": await server.tokenizers.decode(request.tokens)}


def attach(app: FastAPI) -> None:
    app.include_router(router)
