"""/openapi.json: every field, status and header of the API."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phase6_integration.wings.describe.response_schemas import ErrorResponse

Document = dict[str, Any]

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


@dataclass(frozen=True, slots=True)
class Route:
    """The schemas of a route's body, its answer and the chunks of a stream of it, and the errors of its own. Routes
    read and write JSON as bytes, of which FastAPI sees no type. `done`: [DONE] ends a stream."""

    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    done: bool = True
    errors: tuple[int, ...] = ()

    @property
    def models(self) -> list[type[BaseModel]]:
        return [model for model in (self.request, self.response, self.chunk) if model is not None]

    def describe(self, operation: Document) -> None:
        if self.request is not None:
            content: Document = {"application/json": {"schema": _ref(self.request)}}
            operation["requestBody"] = {"required": True, "content": content}
        if self.response is not None:
            content = {"application/json": {"schema": _ref(self.response)}}
            if self.chunk is not None:
                content["text/event-stream"] = {"schema": _event(self.chunk, self.done)}
            operation["responses"]["200"] = {"description": "The answer.", "content": content}
        operation["responses"] |= _errors(self.errors)


def _errors(statuses: Iterable[int]) -> dict[str, Document]:
    """The error responses of these statuses."""
    found: dict[str, Document] = {}
    for status in map(str, statuses):
        schema = {"application/json": {"schema": _ref(ErrorResponse)}}
        found[status] = {"description": WHY[int(status)], "content": schema}
        if int(status) in HEADERS:
            found[status]["headers"] = _header(*HEADERS[int(status)])
    return found


def attach(app: FastAPI, routes: Mapping[str, Route], public: Collection[str] | None) -> None:
    """Have the app describe its routes, of which these need words: by method and path. `public` are the paths that need
    no API key; None if none does."""
    models = [ErrorResponse, *(model for route in routes.values() for model in route.models)]

    def openapi() -> Document:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=app.servers or None,
            )
            described = [(model, "validation") for model in models]
            _, schemas = models_json_schema(described, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            components = document.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    routes.get(f"{method.upper()} {path}", Route()).describe(operation)
                    _describe_middleware(operation, public is not None and path not in public)
            if public is not None:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            app.openapi_schema = app.state.server.bounds.resolve(document)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_middleware(operation: Document, key: bool) -> None:
    """Add the errors of the middleware to a route. FastAPI's own 422 is never sent by this server."""
    responses = operation["responses"]
    responses.pop("422", None)
    for status, response in _errors((401, *ANY) if key else ANY).items():
        responses.setdefault(status, response)
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
