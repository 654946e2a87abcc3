"""create_app: the core's application with all wings. This file and `serve` are the only ones that name wings."""

from fastapi import FastAPI

from phase6_integration.api.application import application
from phase6_integration.api.schemas import ChatRequest, CompletionRequest
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.wings.describe import openapi
from phase6_integration.wings.describe.openapi import BODY, ENGINE, READ, Route
from phase6_integration.wings.describe.response_schemas import (
    ChatChunk,
    ChatResponse,
    CompletionChunk,
    CompletionResponse,
)
from phase6_integration.wings.describe.responses_schemas import ResponsesEvent, ResponsesResponse
from phase6_integration.wings.edge import middleware, quotas
from phase6_integration.wings.edge.api_keys import ApiKeys
from phase6_integration.wings.observe import access_log, health_routes, metrics, model_routes
from phase6_integration.wings.observe.model_routes import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from phase6_integration.wings.page import playground
from phase6_integration.wings.responses import responses_api
from phase6_integration.wings.responses.responses_request import ResponsesRequest
from phase6_integration.wings.structured import output_grammar
from phase6_integration.wings.tools import tools

# What /openapi.json says of routes beyond their code: schemas of bodies and answers, and errors.
ROUTES = {
    "POST /v1/completions": Route(CompletionRequest, CompletionResponse, CompletionChunk, errors=ENGINE),
    "POST /v1/chat/completions": Route(ChatRequest, ChatResponse, ChatChunk, errors=ENGINE),
    "POST /v1/responses": Route(ResponsesRequest, ResponsesResponse, ResponsesEvent, done=False, errors=ENGINE),
    "POST /tokenize": Route(TokenizeRequest, TokenizeResponse, errors=BODY),
    "POST /detokenize": Route(DetokenizeRequest, DetokenizeResponse, errors=BODY),
    "GET /v1/models/{name}": Route(errors=(404,)),
    **dict.fromkeys(("GET /health", "GET /health/live", "GET /health/ready", "GET /ping"), Route(errors=(503,))),
    "POST /ping": Route(errors=(503, *READ)),
}


# region create_app
def create_app(engine: AsyncEngine, settings: ServerSettings, keys: ApiKeys | None = None) -> FastAPI:
    """An OpenAI-style server for an engine, which may still be loading. The caller starts and closes the engine. `keys`
    replaces the API keys of the settings, and may change while the app runs."""
    app = application(
        engine,
        settings,
        outer=middleware.outer(settings),
        around=[access_log.LAYER, *middleware.around(settings)],
        inner=middleware.inner(settings, keys),
    )
    for wing in (output_grammar, tools, responses_api, model_routes, metrics, health_routes, quotas, playground):
        wing.attach(app)
    openapi.attach(app, ROUTES, public=middleware.PUBLIC if settings.api_keys else None)
    return app


# endregion
