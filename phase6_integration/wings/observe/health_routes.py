"""Routes about the server: /health and its two halves, /ping, /load, /version, /metrics and /stats."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from phase6_integration.api.errors import unavailable
from phase6_integration.api.state import Server, ServerState
from phase6_integration.process.health import Health
from phase6_integration.wings.describe import openapi

VERSION = version("nano-serving")
router = APIRouter(tags=["server"])


@router.get("/health/live", responses=openapi.errors((503,)))
async def live(server: Server) -> dict[str, str]:
    """Whether this process is of use: a 503 asks for its restart. While the engine loads, the answer is 200."""
    if server.engine.failed.is_set():
        raise unavailable(server.engine.health, _reason(server))
    return {"status": "live"}


@router.get("/health", responses=openapi.errors((503,)))
@router.get("/health/ready", responses=openapi.errors((503,)))
@router.get("/ping", responses=openapi.errors((503,)))
@router.post("/ping", responses=openapi.errors((503, *openapi.READ)))
async def ready(server: Server) -> dict[str, str]:
    """Whether requests are served now."""
    if server.engine.health is not Health.READY:
        raise unavailable(server.engine.health, _reason(server))
    return {"status": server.engine.health.value}


@router.get("/load")
@router.get("/v1/load")
async def load(server: Server) -> dict[str, int]:
    """The number of requests that are not finished, whatever their n."""
    return {"server_load": server.engine.unfinished}


@router.get("/version")
async def get_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": VERSION}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(server: Server) -> Response:
    """Metrics for Prometheus, under the names that dashboards for vLLM read."""
    content, content_type = server.metrics.exposition()
    return Response(content, media_type=content_type)


@router.get("/stats")
async def stats(server: Server) -> dict[str, Any]:
    """The same as JSON: current values, rates over the last minute, and recent percentiles."""
    state = {
        "model": server.settings.model_name,
        "health": server.engine.health.value,
        "reason": _reason(server),
        "engine_restarts": server.engine.restarts,
    }
    return state | server.metrics.stats()


def _reason(server: ServerState) -> str:
    """The engine's reason without an exception's own words, which are only for the log."""
    return server.engine.reason.partition(":")[0]
