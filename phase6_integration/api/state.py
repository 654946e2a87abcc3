"""ServerState: the state that the routes of one server share, with the additions of extras, and request bodies."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from phase6_integration.api.additions import Feature
from phase6_integration.api.errors import UNKNOWN, RequestError, bad_value, invalid, param_of
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Output

MANY = 1000  # errors of one body, beyond which not even the first is formatted: that takes as long as all of them
M = TypeVar("M", bound=BaseModel)
# Reserves memory for an answer while a `with` runs; RequestError if there is too little. The second argument is the
# field that sets the length.
Lease = Callable[[EngineRequest, str], AbstractContextManager[object]]
log = logging.getLogger("nanoserve")


@dataclass(slots=True)
class ServerState:
    """The state that the routes of one server share: `app.state.server`."""

    engine: AsyncEngine
    settings: ServerSettings
    tokenizers: TokenizerPool
    features: list[Feature] = field(default_factory=list)
    bodies: dict[type[BaseModel], type[BaseModel]] = field(default_factory=dict)  # by the schema that each replaces
    advice: Callable[[str], str] = lambda name: ""  # about a field that is unknown: the end of a sentence
    lease: Lease = lambda request, length_field: nullcontext()
    # How an API writes its errors (error and request id to body), by path prefix. OpenAI's format otherwise.
    error_bodies: dict[str, Callable[[RequestError, str], bytes]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # unknown fields that the log has

    @classmethod
    def of(cls, engine: AsyncEngine, settings: ServerSettings) -> "ServerState":
        return cls(engine, settings, TokenizerPool(engine, settings))

    @property
    def fingerprint(self) -> str:
        """Names the version, the model and how it computes: if one differs, a seed may give another answer."""
        ready = self.engine.ready_info
        backend = () if ready is None else (ready.device, ready.dtype, ready.linear, ready.kv_cache_dtype)
        return _fingerprint(repr(self.engine.config), *backend)

    def warn_of(self, unknown: Iterable[str]) -> None:
        """Log a warning for ignored fields, once for each."""
        for name in {*unknown} - self.warned:
            if len(self.warned) < MANY:
                self.warned.add(name)
                log.warning("a field of a request is unknown, and ignored", extra={"fields": {"field": name}})

    def model_name(self, requested: str | None) -> str:
        """The model name for the response: the requested one, if it is served here."""
        names = self.settings.served_model_names
        if requested is None:
            return names[0]
        if requested not in names:
            message = f"there is no such model here; served are {', '.join(names)}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return requested


@cache
def _fingerprint(*parts: str) -> str:
    return "fp_" + blake2b(repr((version("nano-serving"), *parts)).encode(), digest_size=5).hexdigest()


@dataclass(slots=True)
class Account:
    """A route's report about a request to the access log, through `request.state.account`."""

    prompt_tokens: int = 0  # as in usage: each prompt counts once
    outputs: Sequence[Output] = ()
    n: int = 1  # outputs per prompt
    user: str | None = None  # the field `user` of the request
    request_id: str | None = None  # its field `request_id`, part of the id of the answer
    finish_reasons: list[str] = field(default_factory=list)  # one for each finished output
    error: str | None = None  # only for the log
    code: str | None = None  # of an error in the response, and the field at fault
    param: str | None = None


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


Server = Annotated[ServerState, Depends(server_state)]


# region json_body
def json_body(model: type[M]) -> Any:
    """A dependency that reads the body as this model. JSON is parsed and validated in one pass, so that nothing huge is
    built in between. Of a field that is given twice the last one counts."""

    async def read(request: Request, server: Server) -> M:
        content = await request.body()
        if not content:
            raise bad_value(None, "the body is empty; a JSON object is needed", "bad_json")
        full: type[M] = server.bodies.get(model, model)  # type: ignore[assignment]
        try:
            body = full.model_validate_json(content)
        except ValidationError as error:
            if error.error_count() > MANY:
                raise bad_value(None, f"the body is wrong in {error.error_count()} places") from None
            details = error.errors(include_url=False)
            if not server.settings.allow_unknown_fields:
                raise invalid(details, full.model_fields, server.advice) from None
            wrong = [detail for detail in details if detail["type"] != UNKNOWN]
            if wrong:
                raise invalid(wrong) from None
            server.warn_of(param_of(detail) for detail in details)
            body = full.model_validate_json(content, extra="ignore")
        request.state.account.request_id = getattr(body, "request_id", None)
        return body

    return Depends(read)


# endregion
