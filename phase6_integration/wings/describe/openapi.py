"""/openapi.json: every field, status and header of the API."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phase6_integration.api.field_bounds import Limits
from phase6_integration.wings.describe.response_schemas import ErrorResponse
from phase6_integration.wings.edge.middleware import PUBLIC

Document = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

WHY = {
    400: "A field is wrong, unknown or unsupported, or the prompt is too long; `param` names it. Or this is not HTTP.",
    401: "A valid key is needed.",
    404: "There is no such model.",
    408: "The body did not arrive, or the request was not answered, in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or encoded.",
    421: "The Host is not one that this server answers to.",
    429: "Too many requests wait.",
    431: "The headers are too many or too large.",
    500: "The server failed; its log says why under the request id.",
    503: "The engine is loading, draining or dead, or the server has ended.",
}
HEADERS = {
    401: ("www-authenticate", "Bearer."),
    429: ("retry-after", "Seconds."),
    503: ("retry-after", "Seconds."),
}
ANY = (400, 421, 431, 500)  # errors of the middleware, on every route
READ = (408, 413, 415, 503)  # errors of reading a body
BODY = (400, 404, *READ)  # errors of a route with a body
ENGINE = (*BODY, 429)  # errors of a route that submits requests to the engine


def errors(statuses: Iterable[int]) -> Responses:
    """For a route's `responses`."""
    found: Responses = {}
    for status in statuses:
        found[status] = {"description": WHY[status], "content": {"application/json": {"schema": _ref(ErrorResponse)}}}
        if status in HEADERS:
            found[status]["headers"] = _header(*HEADERS[status])
    return found


def answer(model: type[BaseModel], chunk: type[BaseModel] | None = None, done: bool = True) -> Responses:
    """The response of a route with status 200, and its chunks if it can be streamed. `done`: [DONE] ends a stream."""
    content: Document = {"application/json": {"schema": _ref(model)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(chunk, done)}
    return {200: {"description": "The answer.", "content": content}}


def request_body(model: type[BaseModel]) -> Document:
    """For a route's `openapi_extra`: the body is read by a dependency, which FastAPI cannot describe."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(model)}}}}


def install(app: FastAPI, models: Iterable[type[BaseModel]], limits: Limits, keys: bool) -> None:
    """Have the app describe these models, with its limits, and the middleware of every route. `keys`: whether API keys
    are needed."""
    described = [(model, "validation") for model in (*models, ErrorResponse)]

    def openapi() -> Document:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=app.servers or None,
            )
            _, schemas = models_json_schema(described, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            components = document.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _describe_middleware(operation, keys and path not in PUBLIC)
            if keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            app.openapi_schema = limits.resolve(document)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_middleware(operation: Document, key: bool) -> None:
    """Add the errors of the middleware to a route. FastAPI's own 422 is never sent by this server."""
    responses = operation["responses"]
    responses.pop("422", None)
    for status, response in errors((401, *ANY) if key else ANY).items():
        responses.setdefault(str(status), response)
    for response in responses.values():
        response.setdefault("headers", {}).update(_header("x-request-id", "The client's own, or a new one."))
    if key:
        operation["security"] = [{"key": []}]


def _ref(model: type[BaseModel]) -> Document:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _header(name: str, description: str) -> Document:
    return {name: {"description": description, "required": True, "schema": {"type": "string"}}}


def _event(chunk: type[BaseModel], done: bool) -> Document:
    """One event of a stream: a chunk, an error, or the end."""
    if not done:
        data: Document = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(chunk)}
        properties: Document = {"event": {"type": "string"}, "data": data}
        return {"type": "object", "required": ["event", "data"], "properties": properties}
    json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(chunk), _ref(ErrorResponse)]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
