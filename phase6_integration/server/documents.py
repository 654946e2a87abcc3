"""What /openapi.json says: every field, every status and every header, as they are."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phase6_integration.server.protocol import Model
from phase6_integration.server.responses import ErrorResponse

REF = "#/components/schemas/{model}"

WHY = {
    400: "A field is wrong, unknown or not supported, or the prompt is too long; `param` names it.",
    401: "A key is needed and none that is valid was sent.",
    404: "There is no such model or path.",
    408: "The body did not arrive, or the request was not answered, in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait.",
    431: "The headers are too many or too large.",
    500: "The server failed; its log says why under the request id.",
    503: "The engine is loading, draining or dead.",
}
_OWN_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "seconds"}, 503: {"Retry-After": "seconds"}}

GUARDED = (401, 431, 500)  # what the guard may answer for any route
ASKED = (400, 404, 408, 413, 415, *GUARDED)  # and for one that reads a body
ANSWERED = (*ASKED, 429, 503)  # and for one that asks the engine


def _header(name: str, what: str = "") -> dict[str, Any]:
    return {
        name: {"description": what or "The client's own, or a new one.", "schema": {"type": "string"}, "required": True}
    }


def errors(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        headers = _header("x-request-id")
        for name, what in _OWN_HEADERS.get(status, {}).items():
            headers |= _header(name, what)
        found[status] = {"description": WHY[status], "model": ErrorResponse, "headers": headers}
    return found


def answer(model: type[BaseModel], stream: str | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's good response; `stream` names the chunks of one that can also be streamed."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
    if stream is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events, each a {stream}; then [DONE]."}
        }
    return {200: {"description": "The answer.", "headers": _header("x-request-id"), "content": content}}


def body(model: type[Model]) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body is read by the route, in one pass, so FastAPI does not know of it."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, models: Iterable[type[BaseModel]]) -> None:
    """Have the app say the schemas of these models too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
