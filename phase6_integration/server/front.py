"""Front: what every route of one server shares."""

from collections.abc import Sequence

from fastapi import Request

from phase6_integration.answers import Ask
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.server.bounds import Bounds
from phase6_integration.server.errors import RequestError, conflict
from phase6_integration.server.exchange import Exchange
from phase6_integration.server.logprobs import Names
from phase6_integration.server.protocol import Sampled, StreamOptions
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.shape import Call, Shape
from phase6_integration.server.texts import Texts


class Front:
    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.bounds = Bounds.of(engine, settings)
        self.texts = Texts(engine, settings)
        self.names = Names(engine.tokenizer)

    def model_name(self, asked: str | None) -> str:
        """The name the answer carries: the one that was asked for, if it is served here."""
        names = self.settings.served_model_names
        if asked is None:
            return names[0]
        if asked not in names:
            message = f"there is no such model here; served are {', '.join(names)}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return asked

    def call(
        self, prefix: str, body: Sampled, request: Request, prompts: Sequence[tuple[int, ...]], delivers: bool = True
    ) -> Call:
        """What all that is sent for this request has in common."""
        options = body.stream_options
        if options is not None and not body.stream:
            raise conflict("stream_options", "stream_options are for streams; set stream to true")
        options = options or StreamOptions()
        policy = self.engine.options.scheduling_policy
        if body.priority and policy != "priority":
            raise conflict(
                "priority", f"this server schedules by {policy}; priorities need --scheduling-policy priority"
            )
        return Call(
            f"{prefix}-{body.request_id or request.state.request_id}",
            self.model_name(body.model),
            prompts,
            body.n or 1,
            options.include_usage,
            options.continuous_usage_stats,
            delivers,
        )

    def exchange(self, body: Sampled, asks: Sequence[Ask], shape: Shape) -> Exchange:
        return Exchange(self.engine, self.settings, asks, shape, bool(body.stream), body.user)
