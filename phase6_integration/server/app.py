"""create_app: the routes of one server, put together."""

from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, FastAPI, Path, Request, Response
from pydantic import BaseModel

from phase6_integration.async_engine import AsyncEngine
from phase6_integration.server import documents, errors, models, responses
from phase6_integration.server.chat import chat
from phase6_integration.server.completions import complete
from phase6_integration.server.documents import ASKED, READ, answer, body
from phase6_integration.server.front import Front
from phase6_integration.server.guard import Guard
from phase6_integration.server.health import health_routes
from phase6_integration.server.playground import playground_routes
from phase6_integration.server.reading import read
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.tokens import detokenize, tokenize


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An OpenAI-style server over an engine, which may still be loading. Starting and ending that is the caller's."""
    app = FastAPI(
        title="nano-serving",
        version=version("nano-serving"),
        description="An OpenAI-style server of one model.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    front = Front(engine, settings)
    app.include_router(_asking(app, front))
    app.include_router(_naming(front))
    app.include_router(health_routes(engine, settings))
    app.include_router(playground_routes())
    app.add_middleware(Guard, settings=settings)
    errors.install(app)
    return app


def _asking(app: FastAPI, front: Front) -> APIRouter:
    """The routes with a body. They read it themselves: see `reading`."""
    routes = APIRouter(tags=["model"])
    completion, conversation = front.bounds.completion, front.bounds.chat
    text, tokens = front.bounds.tokenize, front.bounds.detokenize
    described: list[type[BaseModel]] = [
        *(completion, responses.CompletionResponse, responses.CompletionChunk),
        *(conversation, responses.ChatResponse, responses.ChatChunk),
        *(text, responses.TokenizeResponse, tokens, responses.DetokenizeResponse),
    ]
    documents.install(app, described, keys=bool(front.settings.api_keys))
    asked, was_read = documents.errors(ASKED), documents.errors(READ)

    completed = answer(responses.CompletionResponse, responses.CompletionChunk)

    @routes.post("/v1/completions", responses={**completed, **asked}, openapi_extra=body(completion))
    async def completions(request: Request) -> Response:
        """A prompt, or several, continued."""
        return await complete(front, await read(completion, request), request)

    chatted = answer(responses.ChatResponse, responses.ChatChunk)

    @routes.post("/v1/chat/completions", responses={**chatted, **asked}, openapi_extra=body(conversation))
    async def chat_completions(request: Request) -> Response:
        """A conversation, continued by the assistant."""
        return await chat(front, await read(conversation, request), request)

    tokenized = answer(responses.TokenizeResponse)

    @routes.post("/tokenize", responses={**tokenized, **was_read}, openapi_extra=body(text))
    async def tokenize_text(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        return await tokenize(front, (await read(text, request)).root)

    detokenized = answer(responses.DetokenizeResponse)

    @routes.post("/detokenize", responses={**detokenized, **was_read}, openapi_extra=body(tokens))
    async def detokenize_tokens(request: Request) -> Response:
        """The text of tokens."""
        return await detokenize(front, await read(tokens, request))

    return routes


def _naming(front: Front) -> APIRouter:
    routes = APIRouter(tags=["model"])

    @routes.get("/v1/models", response_model=responses.ModelList)
    async def list_models() -> object:
        """The names that requests may give."""
        return models.models(front)

    @routes.get("/v1/models/{name:path}", response_model=responses.ServedModel, responses=documents.errors([404]))
    async def one_model(name: Annotated[str, Path(json_schema_extra=front.bounds.named)]) -> object:
        """What is known of one of them."""
        return models.model(front, name)

    return routes
