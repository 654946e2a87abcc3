"""create_app: the core's application with all wings. Of the server's files only this and `serve` name wings."""

from fastapi import FastAPI
from pydantic import BaseModel

from phase6_integration.api import model_routes
from phase6_integration.api.application import application
from phase6_integration.api.schemas import ChatRequest, CompletionRequest
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.wings.edge import memory_budget, middleware
from phase6_integration.wings.embeddings import embeddings
from phase6_integration.wings.messages import messages_api
from phase6_integration.wings.messages.messages_request import CountTokensRequest, MessagesRequest
from phase6_integration.wings.observe import access_log, health_routes, metrics, openapi, spans
from phase6_integration.wings.ollama import ollama_api, ollama_models
from phase6_integration.wings.page import playground
from phase6_integration.wings.responses import responses_api
from phase6_integration.wings.responses.responses_request import ResponsesRequest
from phase6_integration.wings.structured import output_grammar
from phase6_integration.wings.tools import tools

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
    "/tokenize": model_routes.TokenizeRequest,
    "/detokenize": model_routes.DetokenizeRequest,
}


# region create_app
def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An OpenAI-style server for an engine, which may still be loading. The caller starts and closes the engine."""
    outside, inside = [access_log.layer(settings), *spans.layer(settings)], [middleware.layer(settings)]
    app = application(engine, settings, outside, inside)
    apis = responses_api, messages_api, embeddings, ollama_api
    for wing in (output_grammar, tools, *apis, metrics, health_routes, memory_budget, playground):
        wing.attach(app)
    openapi.attach(app, BODIES, public=middleware.PUBLIC if settings.api_keys else None)
    return app


# endregion
