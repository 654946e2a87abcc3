"""Routes that supervisors and load balancers poll: /health and its two halves, /ping, /load and /version."""

from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from phase6_integration.api.errors import unavailable
from phase6_integration.api.state import Server
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health

VERSION = version("nano-serving")
router = APIRouter(tags=["server"])


@router.get("/health/live")
async def live(server: Server) -> dict[str, str]:
    """Whether this process is still useful; a 503 asks for a restart. While the engine loads, the answer is 200."""
    if server.engine.failed.is_set():
        raise unavailable(server.engine.health, reason(server.engine))
    return {"status": "live"}


@router.get("/health")
@router.get("/health/", include_in_schema=False)  # a slip that probes make
@router.get("/health/ready")
@router.get("/ping")
@router.post("/ping")
async def ready(server: Server) -> dict[str, str]:
    """Whether requests are served now."""
    if server.engine.health is not Health.READY:
        raise unavailable(server.engine.health, reason(server.engine))
    return {"status": server.engine.health.value}


def reason(engine: AsyncEngine) -> str:
    """The engine's reason without the exception's own words, which only the log has."""
    return engine.reason.partition(":")[0]


@router.get("/load")
@router.get("/v1/load")
async def load(server: Server) -> dict[str, int]:
    """The number of unfinished requests, whatever their n."""
    return {"server_load": server.engine.unfinished}


@router.get("/version")
async def get_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": VERSION}


def attach(app: FastAPI) -> None:
    app.include_router(router)
