"""Errors in OpenAI's format."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from phase6_integration.process.health import Health

TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

RETRY_AFTER = {Health.LOADING: 2, Health.DRAINING: 10}  # seconds; 30 in every other state
UNKNOWN_TOKEN = "token_outside_vocabulary"
UNSUPPORTED = "unsupported_field"
UNKNOWN = "extra_forbidden"  # pydantic's
MANY_NAMES = 16  # of fields in one message
CLOSE = 0.8  # similarity of a name that may have been meant: a slip of a letter or two
_WORD = re.compile(r"[a-z_]{1,32}")  # the name of a role, or of a kind of content


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: Error


# Of every route, for /openapi.json.
RESPONSES: dict[int | str, dict[str, Any]] = {
    statuses: {"model": ErrorResponse, "description": f"An error of {side}."}
    for statuses, side in (("4XX", "the request"), ("5XX", "the server"))
}


class RequestError(Exception):
    """An error response, for middleware and routes to raise. `param` is the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def content(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad_value(param: str | None, message: str, code: str = "invalid_value") -> RequestError:
    """A value that the schema of the request does not allow."""
    return RequestError(400, message, param=param, code=code)


def unservable(param: str | None, message: str, code: str = "conflicting_values") -> RequestError:
    """Valid fields that cannot be combined, or not with this model or server."""
    return RequestError(400, message, param=param, code=code)


def unavailable(health: Health, reason: str | None = None) -> RequestError:
    message = f"the engine is {health.value}" + ("; try again later" if reason is None else f": {reason}")
    return RequestError(503, message, code=health.value, headers={"retry-after": str(RETRY_AFTER.get(health, 30))})


def overloaded() -> RequestError:
    message = "the memory for requests and answers is all in use; try again later"
    return RequestError(503, message, code="overloaded", headers={"retry-after": "5"})


def fault(request_id: str) -> RequestError:
    message = f"the server failed on this request; its log says why under the id {request_id}"
    return RequestError(500, message, code="internal_error")


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Have the errors of a chat request that another API made name the fields as that API does."""
    try:
        yield
    except ValidationError as found:
        error = invalid(found.errors(include_url=False))
    except RequestError as found:
        error = found
    else:
        return
    given = error.param or ""
    if own := names.get(given.split(".")[0]):
        error.param, error.message = own, error.message.replace(given, own, 1)
    raise error from None


def invalid(
    details: Sequence[ErrorDetails], known: Collection[str] = (), advice: Callable[[str], str] = lambda _: ""
) -> RequestError:
    """All fields that are unknown or not supported; or else pydantic's other errors, up to MANY_NAMES. `known` are the
    fields of the request, and `advice` is given about unknown ones."""
    refused = [detail for detail in details if detail["type"] in (UNKNOWN, UNSUPPORTED)]
    if refused:
        return _refused(refused, known, advice)
    first, rest = details[0], details[MANY_NAMES:]
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ")
        what = "is nested too deeply" if why.startswith("recursion limit") else "is not valid JSON"
        return bad_value(None, f"the body {what}: {why}", "bad_json")
    messages = [*map(_what_is_wrong, details[:MANY_NAMES]), *([f"and {len(rest)} more"] if rest else ())]
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    return bad_value(param_of(first) or None, ". ".join(messages), code)


def _what_is_wrong(detail: ErrorDetails) -> str:
    param = param_of(detail)
    if detail["type"] == "missing":
        return f"{param!r} is required"
    what = detail["msg"].removeprefix("Value error, ").partition(" after validation")[0]
    return f"{param or 'the body'}: {what}{_given(detail)}"


def param_of(detail: ErrorDetails) -> str:
    """The path of the field at fault."""
    path = list(detail["loc"])
    own = [path.pop()] if detail["type"] == UNKNOWN else []  # the name of a field may look like a tag
    path = [part for part in path if not (isinstance(part, str) and part[:1] in ("=", "["))] + own
    return ".".join(str(part) for part in path)[:128]


def _refused(details: Sequence[ErrorDetails], known: Collection[str], advice: Callable[[str], str]) -> RequestError:
    """An error that names every refused field, up to `MANY_NAMES`."""
    parts = []
    for detail in details[:MANY_NAMES]:
        param = param_of(detail)
        if detail["type"] == UNSUPPORTED:
            parts.append(f"{param!r} is not supported by this server, {detail['msg']}")
            continue
        nearest = get_close_matches(param, known, 1, CLOSE)
        meant = advice(param) or (f"; did you mean {nearest[0]!r}?" if nearest else "")
        parts.append(f"{param!r} is not a field of this request{meant}")
    if len(details) > MANY_NAMES:
        parts.append(f"and {len(details) - MANY_NAMES} more")
    code = UNSUPPORTED if details[0]["type"] == UNSUPPORTED else "unknown_field"
    return bad_value(param_of(details[0]), ". ".join(parts), code)


def _given(detail: ErrorDetails) -> str:
    """The given value, if it is safe to repeat: a number, a length or a short word; otherwise its type."""
    value, kind = detail["input"], detail["type"]
    if kind in ("too_long", "too_short"):
        length = detail["ctx"]["actual_length"]
        return f", got {'more' if length is None else length}"
    if kind.startswith("string_too_"):
        return f", got {len(value)}"
    if isinstance(value, bool | None):
        return f", got {json.dumps(value)}"
    if kind == "literal_error" and isinstance(value, str) and _WORD.fullmatch(value):
        return f", got {value!r}"
    if isinstance(value, int | float):
        shown = json.dumps(value)
        return f", got {shown}" if len(shown) <= 32 else ", got a far larger number"
    kinds: tuple[tuple[type, str], ...] = ((str, "a string"), (list, "a list"), (dict, "an object"))
    return next((f", got {name}" for kind, name in kinds if isinstance(value, kind)), "")


async def respond(request: Request, error: Exception) -> Response:
    """The response for a RequestError. The access log gets the error too."""
    assert isinstance(error, RequestError)
    account = request.state.account
    account.code, account.param = error.code, error.param
    path, bodies = f"{request.scope['path']}/", request.app.state.server.error_bodies
    body = next((body for api, body in bodies.items() if path.startswith(f"{api}/")), None)
    content = error.content if body is None else body(error, request.state.request_id)
    return Response(content, error.status, error.headers, media_type="application/json")


async def _http(request: Request, error: Exception) -> Response:
    """Errors of the router: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    message, code, headers = str(error.detail), None, error.headers
    if error.status_code == 404:
        paths = request.app.openapi()["paths"]
        meant = "/v1" + re.sub(r"^(/v1)+(?=/)", "", request.url.path.rstrip("/"))
        near = f"did you mean {meant}?" if meant in paths else f"there are {', '.join(paths)}"
        message, code = f"there is nothing at this path; {near}", "not_found"
    if error.status_code == 405:
        message, code = "this path does not take this method", "method_not_allowed"
        if operations := request.app.openapi()["paths"].get(request.url.path):
            headers = {"allow": ", ".join(map(str.upper, operations))}  # the router names those of the first route
    return await respond(request, RequestError(error.status_code, message, code=code, headers=headers))


def install(app: FastAPI) -> None:
    """Install the handlers that turn exceptions of routes into responses."""
    app.add_exception_handler(RequestError, respond)
    app.add_exception_handler(HTTPException, _http)
