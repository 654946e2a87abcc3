"""Errors in OpenAI's format, and the exception handlers that produce it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from phase6_integration.health import Health

TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# Fields of other servers. They are refused like unknown fields, with another message.
UNSUPPORTED = frozenset(
    """
    add_special_tokens allowed_token_ids audio bad_words beam_search best_of chat_template chat_template_kwargs
    continue_final_message documents echo_prompt function_call functions guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex include_obfuscation include_reasoning include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors metadata mm_processor_kwargs modalities name
    parallel_tool_calls prediction prompt_cache_key prompt_embeds prompt_logprobs reasoning_content
    reasoning_effort refusal return_token_ids return_tokens_as_token_ids safety_identifier service_tier
    skip_special_tokens spaces_between_special_tokens store structured_outputs suffix tool_call_id tool_calls
    tool_choice tools truncate_prompt_tokens use_beam_search verbosity vllm_xargs web_search_options
    """.split()  # noqa: SIM905
)
RETRY_AFTER = {Health.LOADING: 2, Health.DRAINING: 10}  # seconds; 30 in every other state
VOCABULARY = "token_outside_vocabulary"
_WORD = re.compile(r"[a-z_]{1,32}")  # the name of a role, or of a kind of content


class RequestError(Exception):
    """An error response. `param` is the field at fault."""

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

    @property
    def response(self) -> Response:
        return Response(self.content, self.status, self.headers, media_type="application/json")


def bad_value(param: str | None, message: str, code: str = "invalid_value") -> RequestError:
    """A value that the schema of the request does not allow."""
    return RequestError(400, message, param=param, code=code)


def conflict(param: str | None, message: str, code: str = "conflicting_values") -> RequestError:
    """Valid fields that cannot be combined, or not with this model."""
    return RequestError(400, message, param=param, code=code)


def unavailable(health: Health, reason: str | None = None) -> RequestError:
    message = f"the engine is {health.value}" + ("; try again later" if reason is None else f": {reason}")
    return RequestError(503, message, code=health.value, headers={"retry-after": str(RETRY_AFTER.get(health, 30))})


def overloaded() -> RequestError:
    message = "the memory for requests and answers is all in use; try again later"
    return RequestError(503, message, code="overloaded", headers={"retry-after": "5"})


def invalid(details: Sequence[ErrorDetails]) -> RequestError:
    """The first of pydantic's errors, and the number of the others."""
    first = details[0]
    kind, path = first["type"], list(first["loc"])
    own = [path.pop()] if kind == "extra_forbidden" else []  # the name of a field may look like a tag
    path = [part for part in path if not (isinstance(part, str) and part[:1] in ("=", "["))] + own
    param = ".".join(str(part) for part in path)[:128]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if kind == "json_invalid":
        return bad_value(None, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", "bad_json")
    if kind == "extra_forbidden":
        known = path[-1] in UNSUPPORTED
        message = f"{param!r} is not supported by this server" if known else f"{param!r} is not a field of this request"
        return bad_value(param, message + more, "unsupported_field" if known else "unknown_field")
    if kind == "missing":
        return bad_value(param, f"{param!r} is required{more}", "missing_field")
    if kind in ("too_long", "too_short"):
        return bad_value(param, f"{param}: {_count(kind, first['ctx'])}{more}")
    what = first["msg"].removeprefix("Value error, ")
    if kind == VOCABULARY:
        return bad_value(param, f"{param}: {what}{more}", VOCABULARY)
    return bad_value(param or None, f"{param or 'the body'}: {what}{_given(first['input'], kind)}{more}")


def _count(kind: str, context: Mapping[str, Any]) -> str:
    """The allowed number of items, and the given one if it was counted."""
    bound = (
        f"at most {context['max_length']} are allowed"
        if kind == "too_long"
        else f"at least {context['min_length']} needed"
    )
    return f"{bound}, got {'more' if context['actual_length'] is None else context['actual_length']}"


def _given(value: Any, kind: str) -> str:
    """The value that was given, where it is safe to repeat: a number, a length or a short word; otherwise its type."""
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


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response


async def _http(request: Request, error: Exception) -> Response:
    """Errors of the router: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    words = {
        404: ("there is nothing at this path", "not_found"),
        405: ("this path does not take this method", "method_not_allowed"),
    }
    message, code = words.get(error.status_code, (str(error.detail), None))
    return RequestError(error.status_code, message, code=code, headers=error.headers).response


async def _parameters(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors()).response


def install(app: FastAPI) -> None:
    """Install the exception handlers."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _parameters)
