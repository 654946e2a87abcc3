"""create_app: the core's application with all extras of the server. `connect` uses it if they are installed."""

from fastapi import FastAPI
from pydantic import BaseModel

from phase6_integration.api.application import application
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras import token_routes
from phase6_integration.extras.edge import memory_budget, middleware
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.extras.embeddings import embeddings
from phase6_integration.extras.fields import all_fields, sampling_fields
from phase6_integration.extras.fields.request_fields import ChatRequest, CompletionRequest
from phase6_integration.extras.observe import access_log, health_routes, metrics, openapi, spans
from phase6_integration.extras.other_apis import messages_api, ollama_api, ollama_models, responses_api
from phase6_integration.extras.other_apis.messages_request import CountTokensRequest, MessagesRequest
from phase6_integration.extras.other_apis.responses_request import ResponsesRequest
from phase6_integration.extras.page import playground
from phase6_integration.extras.structured import output_grammar
from phase6_integration.extras.tools import tools
from phase6_integration.process.async_engine import AsyncEngine

BODIES: dict[str, type[BaseModel]] = {  # of POST requests, for /openapi.json: routes parse them by themselves
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    embeddings.PATH: embeddings.EmbeddingsRequest,
    ollama_api.CHAT: ollama_api.OllamaChat,
    ollama_api.GENERATE: ollama_api.Generate,
    ollama_models.SHOW: ollama_models.ShowRequest,
    "/v1/responses": ResponsesRequest,
    messages_api.PATH: MessagesRequest,
    messages_api.COUNT: CountTokensRequest,
    "/tokenize": token_routes.TokenizeRequest,
    "/detokenize": token_routes.DetokenizeRequest,
}


# region create_app
def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An OpenAI-style server for an engine, which may still be loading. The caller starts and closes the engine."""
    outside, inside = [access_log.layer(settings), *spans.layer(settings)], [middleware.layer(settings)]
    app = application(engine, settings, outside, inside)
    fields = all_fields, output_grammar, tools, sampling_fields  # in the order in which they look at a request
    apis = token_routes, responses_api, messages_api, embeddings, ollama_api
    for extra in (*fields, *apis, metrics, health_routes, memory_budget):
        extra.attach(app)
    edge = settings.of(EdgeSettings)
    playground.attach(app, edge.allowed_origins, has_keys=bool(edge.api_keys))
    openapi.attach(app, BODIES, public=middleware.PUBLIC if edge.api_keys else None)
    return app


# endregion
