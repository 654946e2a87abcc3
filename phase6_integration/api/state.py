"""ServerState: what the routes of one server share, with the hooks that extras fill, and the body of a request."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from phase6_integration.api.errors import UNKNOWN, UNSUPPORTED, RequestError, bad_value, invalid, param_of, unservable
from phase6_integration.api.logprobs import TokenNames
from phase6_integration.api.schemas import ChatRequest, StructuredFields
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Output

MANY = 1000  # errors of one body, beyond which not even the first is formatted: that takes as long as all of them
M = TypeVar("M", bound=BaseModel)
# Holds memory for the answer to a request until the end of a `with`. A RequestError if there is too little. The other
# argument is the field of the request that sets the length.
Lease = Callable[[EngineRequest, str], AbstractContextManager[object]]
log = logging.getLogger("nanoserve")


# Hooks. Each of these is what a server without extras does; an extra replaces it.


class Grammar(NamedTuple):
    text: str
    notes: tuple[str, ...] = ()  # of its JSON schemas, what is not enforced


class GrammarHook:
    """The grammars that answers must follow. Here a request with one is refused."""

    def field(self, body: StructuredFields) -> str | None:
        """The path of the field that gives a constraint, if one does."""
        given = body.model_dump(include=set(StructuredFields.model_fields), exclude_none=True)
        return next((name for name, value in given.items() if value != {"type": "text"}), None)

    def of(self, body: StructuredFields) -> Grammar | None:
        """The grammar that a request asks for."""
        if (name := self.field(body)) is not None:
            raise _missing(name, "structured output")
        return None

    def check(self, grammar: str, param: str) -> str:
        """The same grammar. A RequestError about `param` if the engine cannot take it."""
        raise _missing(param, "structured output")

    def of_schema(self, schema: Mapping[str, Any], body: StructuredFields, lenient: bool) -> Grammar:
        """The grammar of a JSON schema, for the arguments of a tool."""
        raise _missing("tools", "structured output")


class AnswerReader(Protocol):
    """Splits one answer, while it is generated, into its content and other fields of the message."""

    calls: int  # of tools, so far

    def push(self, text: str, last: bool) -> str:
        """Add text. Returns the new content; what else is new stays here until `take`."""
        ...

    def take(self) -> dict[str, Any]:
        """The new fields beside the content."""
        ...

    @property
    def has_news(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How the answers to one chat are constrained and read."""

    grammar: Grammar | None
    grammar_fields: tuple[str, ...] | None = None  # that it is made from; None: it is the grammar of the content
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that reading the answers needs
    finish_reason: str = "stop"  # of an answer that stopped after calls
    reader: Callable[[], AnswerReader] | None = None  # makes the reader of one answer; None: it is plain content


def plain_answers(
    server: "ServerState", body: ChatRequest, prompt: Sequence[int], content: Grammar | None
) -> AnswerPlan:
    """Answers are text that follows the grammar of the content, if there is one."""
    if body.tools and body.tool_choice != "none":
        raise _missing("tools", "calls of tools")
    return AnswerPlan(grammar=content)


def _missing(param: str, what: str) -> RequestError:
    return unservable(param, f"{param}: this server is without {what}", UNSUPPORTED)


# The state of a server, and of one request.


@dataclass(slots=True)
class ServerState:
    """What the routes of one server share: `app.state.server`."""

    engine: AsyncEngine
    settings: ServerSettings
    tokenizers: TokenizerPool
    names: TokenNames
    grammars: GrammarHook = field(default_factory=GrammarHook)
    plan: "Callable[[ServerState, ChatRequest, Sequence[int], Grammar | None], AnswerPlan]" = plain_answers
    lease: Lease = lambda request, length_field: nullcontext()
    # How an API writes an error of the request with this id, by the path that its routes begin with; else as OpenAI's.
    error_bodies: dict[str, Callable[[RequestError, str], bytes]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # unknown fields that the log has

    @classmethod
    def of(cls, engine: AsyncEngine, settings: ServerSettings) -> "ServerState":
        return cls(engine, settings, TokenizerPool(engine, settings), TokenNames(engine.tokenizer))

    @property
    def fingerprint(self) -> str:
        """Names the version, the model and how it computes: where these differ, a seed may give another answer."""
        ready = self.engine.ready_info
        backend = () if ready is None else (ready.device, ready.dtype, ready.linear, ready.kv_cache_dtype)
        return _fingerprint(repr(self.engine.config), *backend)

    def warn_of(self, unknown: Iterable[str]) -> None:
        """Warn in the log of fields that are ignored, of each once."""
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
    """What a route reports about a request for the access log, through `request.state.account`."""

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
        try:
            body = model.model_validate_json(content)
        except ValidationError as error:
            if error.error_count() > MANY:
                raise bad_value(None, f"the body is wrong in {error.error_count()} places") from None
            details = error.errors(include_url=False)
            if not server.settings.allow_unknown_fields:
                raise invalid(details, model.model_fields) from None
            wrong = [detail for detail in details if detail["type"] != UNKNOWN]
            if wrong:
                raise invalid(wrong) from None
            server.warn_of(param_of(detail) for detail in details)
            body = model.model_validate_json(content, extra="ignore")
        request.state.account.request_id = getattr(body, "request_id", None)
        return body

    return Depends(read)


# endregion
