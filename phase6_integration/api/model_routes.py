"""Routes about the model: /v1/models, /tokenize and /detokenize."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, RootModel, Tag

from phase0_request.params import MAX_TOKENS
from phase6_integration.api.conversation import conversation
from phase6_integration.api.errors import UNKNOWN_TOKEN, unservable
from phase6_integration.api.field_types import Name, RequestModel, Token
from phase6_integration.api.schemas import ConversationFields
from phase6_integration.api.state import Server, ServerState, json_body

STARTED = int(time.time())
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
    request, pool, tenant = parsed.root, server.tokenizers, http.state.tenant
    server.model_name(request.model)

    def content(tokens: Sequence[int]) -> bytes:
        strings = [server.names[token].text for token in tokens] if request.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": server.engine.max_model_len, "tokens": tokens}
        return msgspec.json.encode({**answer, "token_strs": strings})

    if isinstance(request, TokenizeChat):
        tokens = await pool.chat(conversation(request), tenant, request.add_special_tokens is True)
    else:
        (tokens,) = await pool.encode([request.prompt], tenant, request.add_special_tokens is not False)
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


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)  # of clients with a base URL without /v1
async def list_models(server: Server) -> dict[str, Any]:
    """The names that requests may give."""
    return {"object": "list", "data": [_model(server, name) for name in server.settings.served_model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, server: Server) -> dict[str, Any]:
    """One model by name."""
    return _model(server, name)


def _model(server: ServerState, name: str) -> dict[str, Any]:
    """All names are of one model; `root` is its first."""
    return {
        "id": server.model_name(name),
        "object": "model",
        "created": STARTED,
        "owned_by": "nano-serving",
        "root": server.settings.model_name,
        "parent": None,
        "max_model_len": server.engine.max_model_len,
    }
