"""What is asked about the server itself: /health, /version, /metrics, /stats."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from phase6_integration.async_engine import AsyncEngine, Health
from phase6_integration.server import documents
from phase6_integration.server.errors import RequestError
from phase6_integration.server.metrics import Metrics
from phase6_integration.server.settings import ServerSettings

RETRY_AFTER = {Health.LOADING: 2, Health.DRAINING: 10}  # seconds; of the other states nobody knows
VERSION = version("nano-serving")


def health_routes(engine: AsyncEngine, settings: ServerSettings) -> APIRouter:
    """The four routes. Their metrics begin to count here."""
    metrics = Metrics(settings.model_name, engine.max_model_len, lambda: engine.gauges)
    engine.observers.append(metrics)
    routes = APIRouter(tags=["server"])

    @routes.get("/health", responses=documents.errors((503,)))
    async def health() -> Response:
        """Whether requests are served now."""
        if engine.health is Health.READY:
            return JSONResponse({"status": engine.health.value})
        later = {"retry-after": str(RETRY_AFTER.get(engine.health, 30))}
        why = engine.reason.partition(":")[0]  # what follows would be an exception's own words: those are for the log
        message = f"the engine is {engine.health.value}: {why}"
        return RequestError(503, message, code=engine.health.value, headers=later).response

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": VERSION}

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    async def prometheus() -> Response:
        """What Prometheus reads, under the names that dashboards made for vLLM know."""
        content, content_type = metrics.exposition()
        return Response(content, media_type=content_type)

    @routes.get("/stats")
    async def stats() -> dict[str, Any]:
        """The same for people: now, over the last minute, and the latest percentiles."""
        state = {"model": settings.model_name, "health": engine.health.value, "reason": engine.reason.partition(":")[0]}
        return state | metrics.stats()

    return routes
