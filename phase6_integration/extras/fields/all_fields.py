"""Makes the server accept requests with all fields."""

from fastapi import FastAPI

from phase6_integration.api import schemas
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields import request_fields
from phase6_integration.extras.fields.logprobs import TokenNames
from phase6_integration.extras.fields.request_fields import ELSEWHERE
from phase6_integration.extras.fields.token_details import TokenDetails
from phase6_integration.extras.fields.told_fields import ToldFields


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    server.engine.details = TokenDetails
    server.bodies[schemas.CompletionRequest] = request_fields.CompletionRequest
    server.bodies[schemas.ChatRequest] = request_fields.ChatRequest
    server.advice = lambda name: f"; here it is {ELSEWHERE[name]}" if name in ELSEWHERE else ""
    app.state.names = TokenNames(server.engine.tokenizer)
    server.features.append(ToldFields(server, app.state.names))
