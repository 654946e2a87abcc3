"""create_app: the FastAPI application of one server."""

from importlib.metadata import version

from fastapi import FastAPI

from phase6_integration.api import chat, completions, errors, schemas
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import ServerState
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.wings.describe import openapi
from phase6_integration.wings.describe import response_schemas as responses
from phase6_integration.wings.edge.api_keys import ApiKeys
from phase6_integration.wings.edge.middleware import middleware
from phase6_integration.wings.observe import health_routes as health
from phase6_integration.wings.observe import model_routes as model
from phase6_integration.wings.page import playground
from phase6_integration.wings.responses import responses_api, responses_request
from phase6_integration.wings.responses import responses_schemas as responses_answer

DESCRIBED = (
    *(schemas.CompletionRequest, responses.CompletionResponse, responses.CompletionChunk),
    *(schemas.ChatRequest, responses.ChatResponse, responses.ChatChunk),
    *(responses_request.ResponsesRequest, responses_answer.ResponsesResponse, responses_answer.ResponsesEvent),
    *(schemas.TokenizeRequest, responses.TokenizeResponse, schemas.DetokenizeRequest, responses.DetokenizeResponse),
)


def create_app(engine: AsyncEngine, settings: ServerSettings, keys: ApiKeys | None = None) -> FastAPI:
    """An OpenAI-style server for an engine, which may still be loading. The caller starts and closes the engine."""
    app = FastAPI(
        title="nano-serving",
        version=version("nano-serving"),
        description="An OpenAI-style server of one model.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        middleware=middleware(settings, keys),
    )
    app.state.server = ServerState.of(engine, settings)
    for module in (completions, chat, responses_api, model, health, playground):
        app.include_router(module.router)
    openapi.install(app, DESCRIBED, app.state.server.limits, keys=bool(settings.api_keys))
    errors.install(app)
    return app
