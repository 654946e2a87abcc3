"""GET /v1/models: the names that requests may give."""

import time
from typing import Any

from phase6_integration.server.front import Front

STARTED = int(time.time())


def model(front: Front, name: str) -> dict[str, Any]:
    """One model. Its several names are one model, by its first."""
    return {
        "id": front.model_name(name),
        "object": "model",
        "created": STARTED,
        "owned_by": "nano-serving",
        "root": front.settings.model_name,
        "parent": None,
        "max_model_len": front.engine.max_model_len,
    }


def models(front: Front) -> dict[str, Any]:
    return {"object": "list", "data": [model(front, name) for name in front.settings.served_model_names]}
