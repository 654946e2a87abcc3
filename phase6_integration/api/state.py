"""What routes depend on: the state of the server, and the request body, validated."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from phase6_integration.api.errors import UNKNOWN, RequestError, bad_value, invalid, param_of
from phase6_integration.api.field_bounds import Limits
from phase6_integration.api.logprobs import TokenNames
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health
from phase6_integration.wings.edge.client_limits import ClientLimits
from phase6_integration.wings.edge.memory_budget import Budget
from phase6_integration.wings.observe.metrics import Metrics
from phase6_integration.wings.structured.grammar_pool import GrammarPool

MANY = 1000  # errors of one body, beyond which not even the first is formatted: that takes as long as all of them
M = TypeVar("M", bound=BaseModel)
log = logging.getLogger("nanoserve")


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the routes of one server share: `app.state.server`."""

    engine: AsyncEngine
    settings: ServerSettings
    limits: Limits
    tokenizers: TokenizerPool
    grammars: GrammarPool
    names: TokenNames
    metrics: Metrics
    clients: ClientLimits
    answers: Budget
    warned: set[str] = field(default_factory=set)  # unknown fields that the log has

    @classmethod
    def of(cls, engine: AsyncEngine, settings: ServerSettings) -> "ServerState":
        metrics = Metrics(
            settings.model_name,
            engine.max_model_len,
            lambda: engine.gauges,
            up=lambda: engine.health in (Health.READY, Health.DRAINING),
            restarts=lambda: engine.restarts,
            cache=lambda: cache_config(engine),
        )
        clients = ClientLimits(settings)
        engine.observers += (metrics, clients)
        answers = Budget.for_answers(settings.max_buffered_bytes)
        tokenizers, names = TokenizerPool(engine, settings), TokenNames(engine.tokenizer)
        grammars = GrammarPool(engine)
        return cls(
            engine, settings, Limits.of(engine, settings), tokenizers, grammars, names, metrics, clients, answers
        )

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


def cache_config(engine: AsyncEngine) -> dict[str, str]:
    """The settings of the KV cache under vLLM's names; none until the engine is ready."""
    ready, options = engine.ready_info, engine.options
    if ready is None:
        return {}
    return {
        "block_size": str(ready.page_size),
        "num_gpu_blocks": str(ready.pages),
        "cache_dtype": ready.dtype,
        "enable_prefix_caching": str(options.enable_prefix_caching),
        "gpu_memory_utilization": str(options.gpu_memory_utilization),
    }


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


Server = Annotated[ServerState, Depends(server_state)]


def json_body(model: type[M]) -> Any:
    """A dependency that reads the body as this model, with the limits of the server. JSON is parsed and validated in
    one pass, so that nothing huge is built in between. Of a field that is given twice the last one counts."""

    async def read(request: Request, server: Server) -> M:
        content = await request.body()
        if not content:
            raise bad_value(None, "the body is empty; a JSON object is needed", "bad_json")
        try:
            body = model.model_validate_json(content, context=server.limits)
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
            body = model.model_validate_json(content, context=server.limits, extra="ignore")
        request.state.account.request_id = getattr(body, "request_id", None)
        return body

    return Depends(read)
