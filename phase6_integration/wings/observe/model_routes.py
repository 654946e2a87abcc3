"""Routes about the model: /v1/models, /tokenize and /detokenize."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request, Response

from phase6_integration.api.conversation import conversation
from phase6_integration.api.field_bounds import NAMED
from phase6_integration.api.schemas import DetokenizeRequest, TokenizeChat, TokenizeRequest
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.wings.describe import openapi
from phase6_integration.wings.describe.response_schemas import (
    DetokenizeResponse,
    ModelList,
    ServedModel,
    TokenizeResponse,
)

STARTED = int(time.time())
router = APIRouter(tags=["model"])


@router.post(
    "/tokenize",
    responses=openapi.answer(TokenizeResponse) | openapi.errors(openapi.BODY),
    openapi_extra=openapi.request_body(TokenizeRequest),
)
async def tokenize(
    parsed: Annotated[TokenizeRequest, json_body(TokenizeRequest)], http: Request, server: Server
) -> Response:
    """The tokens of a text or of a conversation."""
    request, pool, tenant = parsed.root, server.tokenizers, http.state.tenant
    server.model_name(request.model)

    def content(tokens: Sequence[int]) -> bytes:
        strings = [server.names[token].text for token in tokens] if request.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": server.engine.max_model_len, "tokens": tokens}
        return msgspec.json.encode({**found, "token_strs": strings})

    if isinstance(request, TokenizeChat):
        tokens = await pool.chat(conversation(request), tenant)
    else:
        (tokens,) = await pool.encode([request.prompt], tenant, request.add_special_tokens is not False)
    return _json(await pool.run(lambda: content(tokens), len(tokens)))


@router.post(
    "/detokenize",
    responses=openapi.answer(DetokenizeResponse) | openapi.errors(openapi.BODY),
    openapi_extra=openapi.request_body(DetokenizeRequest),
)
async def detokenize(request: Annotated[DetokenizeRequest, json_body(DetokenizeRequest)], server: Server) -> Response:
    """The text of tokens."""
    server.model_name(request.model)
    return _json(msgspec.json.encode({"prompt": await server.tokenizers.decode(request.tokens)}))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


@router.get("/v1/models", response_model=ModelList)
async def list_models(server: Server) -> dict[str, Any]:
    """The names that requests may give."""
    return {"object": "list", "data": [_model(server, name) for name in server.settings.served_model_names]}


@router.get("/v1/models/{name:path}", response_model=ServedModel, responses=openapi.errors([404]))
async def one_model(
    name: Annotated[str, Path(json_schema_extra={"enum": NAMED + "names"})], server: Server
) -> dict[str, Any]:
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
