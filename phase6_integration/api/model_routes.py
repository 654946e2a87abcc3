"""GET /v1/models: the names of the model."""

import time
from typing import Any

from fastapi import APIRouter

from phase6_integration.api.state import Server, ServerState

STARTED = int(time.time())
router = APIRouter(tags=["model"])


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)  # of clients with a base URL without /v1
async def list_models(server: Server) -> dict[str, Any]:
    """The names that requests may give."""
    return {"object": "list", "data": [_model(server, name) for name in server.settings.served_model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, server: Server) -> dict[str, Any]:
    """One model by name."""
    return _model(server, name)


def _model(server: ServerState, name: str) -> dict[str, Any]:
    """All names stand for one model; `root` is its first."""
    return {
        "id": server.model_name(name),
        "object": "model",
        "created": STARTED,
        "owned_by": "nano-serving",
        "root": server.settings.model_name,
        "parent": None,
        "max_model_len": server.engine.max_model_len,
    }
