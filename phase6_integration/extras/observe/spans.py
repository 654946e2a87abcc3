"""OpenTelemetry spans: one for each request that reached the engine, with vLLM's names and attributes.

A span is made when its request is over, from times that are known anyway. A thread of the SDK sends spans in batches
and drops those that no collector accepts, so no request waits for it.
"""

import io
import os
import threading
import time
from typing import Any

from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import Account
from phase6_integration.extras.observe.span_settings import SpanSettings

FLUSH_TIMEOUT = 1.0  # seconds that the end of the process may wait for a collector
_providers: list[Any] = []


def layer(settings: ServerSettings) -> list[Middleware]:
    """None without a collector."""
    endpoint = settings.of(SpanSettings).otlp_traces_endpoint
    if endpoint is None:
        return []
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class StatusOnly(requests.Session):
        """Only the status of a collector's answer counts, because its text may never end."""

        def request(self, *given: Any, **named: Any) -> requests.Response:
            response = super().request(*given, **{**named, "stream": True, "allow_redirects": False})
            response.close()
            response.raw = io.BytesIO()
            if response.is_redirect:  # the exporter would take it for a success
                raise requests.exceptions.TooManyRedirects(f"the collector is at {response.headers['location']}")
            return response

    os.environ.setdefault("OTEL_SERVICE_NAME", "nanoserve")
    _providers.append(provider := TracerProvider())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, session=StatusOnly())))
    return [Middleware(Spans, tracer=provider.get_tracer("nanoserve"), model=settings.model_name)]


class Spans(HttpMiddleware):
    """Makes a request's span when it is over. Its parent is the one that the client names in `traceparent`."""

    def __init__(self, app: ASGIApp, tracer: Any, model: str) -> None:
        super().__init__(app)
        self.tracer, self.model = tracer, model

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.time_ns()
        try:
            await self.app(scope, receive, send)
        finally:
            if (account := scope["state"]["account"]).outputs:
                given = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
                fields = about(account, (time.time_ns() - start) / 1e9)
                fields |= {"gen_ai.request.id": scope["state"]["request_id"], "gen_ai.response.model": self.model}
                context = TraceContextTextMapPropagator().extract(given)
                span = self.tracer.start_span("llm_request", context, SpanKind.SERVER, fields, start_time=start)
                if account.code is not None:
                    span.set_status(Status(StatusCode.ERROR, account.code))
                span.end()


def about(account: Account, seconds: float) -> dict[str, Any]:
    """The attributes of a span, under vLLM's names: sums over the answers, and latencies of the request as a whole."""
    outputs = account.outputs
    found = {"request.n": account.n, "request.max_tokens": outputs[0].max_tokens, "usage.num_sequences": len(outputs)}
    found["usage.prompt_tokens"] = account.prompt_tokens
    found["usage.completion_tokens"] = sum(output.generated for output in outputs)
    latencies, arrival = {"e2e": seconds}, outputs[0].times.arrival
    tokens = [output.times.tokens for output in outputs if output.times.tokens]
    admitted = [output.times.admitted for output in outputs if output.times.admitted is not None]
    if tokens and admitted:
        begin, first, last = min(admitted), min(times[0] for times in tokens), max(times[-1] for times in tokens)
        latencies |= {"time_in_queue": begin - arrival, "time_to_first_token": first - arrival}
        latencies |= {"time_in_model_prefill": first - begin, "time_in_model_decode": last - first}
        latencies["time_in_model_inference"] = last - begin
    return {f"gen_ai.{key}": n for key, n in found.items()} | {
        f"gen_ai.latency.{key}": s for key, s in latencies.items()
    }


def flush() -> None:
    """Send the unsent spans before the process ends."""
    for provider in _providers:
        sender = threading.Thread(target=provider.force_flush, daemon=True)
        sender.start()
        sender.join(FLUSH_TIMEOUT)
