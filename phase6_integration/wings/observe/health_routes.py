"""Routes about the server: /health and its two halves, /ping, /load, /version, /metrics and /stats."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from phase6_integration.api.errors import unavailable
from phase6_integration.api.state import Server, ServerState
from phase6_integration.process.health import Health

VERSION = version("nano-serving")
router = APIRouter(tags=["server"])


@router.get("/health/live")
async def live(server: Server) -> dict[str, str]:
    """Whether this process is of use: a 503 asks for its restart. While the engine loads, the answer is 200."""
    if server.engine.failed.is_set():
        raise unavailable(server.engine.health, _reason(server))
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
@router.get("/ping")
@router.post("/ping")
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
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, under the names that dashboards for vLLM read."""
    content, content_type = request.app.state.metrics.exposition()
    return Response(content, media_type=content_type)


@router.get("/stats")
async def stats(server: Server, request: Request) -> dict[str, Any]:
    """The same as JSON: current values, rates over the last minute, and recent percentiles."""
    state = {
        "model": server.settings.model_name,
        "health": server.engine.health.value,
        "reason": _reason(server),
        "engine_restarts": server.engine.restarts,
    }
    figures: dict[str, Any] = request.app.state.metrics.stats()
    return state | figures


def _reason(server: ServerState) -> str:
    """The engine's reason without an exception's own words, which are only for the log."""
    return server.engine.reason.partition(":")[0]


def attach(app: FastAPI) -> None:
    app.include_router(router)
