"""/api/tags, /api/show, /api/ps and /api/version: what this server serves, in Ollama's words."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import create_model

from phase6_integration.api.field_types import Name, RequestModel
from phase6_integration.api.model_routes import STARTED
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.extras.other_apis.translation import Json, also_takes
from phase6_integration.process.health import Health

SHOW = "/api/show"
SAME = "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", **{name: name for name in SAME}}
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
Failure = create_model("OllamaError", error=(str, ...), param=(str | None, ...), code=(str | None, ...))
router = APIRouter(tags=["model"], responses={statuses: {"model": Failure} for statuses in ("4XX", "5XX")})


@also_takes("verbose")
class ShowRequest(RequestModel):
    model: Name | None = None
    name: Name | None = None  # what `model` was called before


def served(server: ServerState, model: str) -> str:
    """The name of a model that this server has, without the tag that clients add."""
    return server.model_name(model.removesuffix(":latest"))


@router.get("/api/tags")
async def tags(server: Server) -> Json:
    """The names of the model."""
    about = {"size": server.engine.config.bytes, "modified_at": _started(), **_about(server)}
    return {"models": [{"name": name, "model": name, **about} for name in server.settings.served_model_names]}


@router.get("/api/ps")
async def running(server: Server) -> Json:
    """The names of the model, once it is loaded, and the memory that it takes with its keys and values."""
    ready = server.engine.ready_info
    if ready is None or server.engine.health is not Health.READY:
        return {"models": []}
    size = server.engine.config.bytes + ready.kv_cache_bytes
    memory = {"size": size, "size_vram": 0 if ready.device == "cpu" else size}
    about = {**memory, **_about(server), "expires_at": NEVER, "context_length": server.engine.max_model_len}
    return {"models": [{"name": name, "model": name, **about} for name in server.settings.served_model_names]}


@router.post(SHOW)
async def show(body: Annotated[ShowRequest, json_body(ShowRequest)], request: Request, server: Server) -> Json:
    """The shape of the model, its sampling defaults and what it can do."""
    if (name := body.model or body.name) is not None:
        served(server, name)
    config, defaults = server.engine.config, server.settings.sampling_defaults
    shape = {
        "context_length": server.engine.max_model_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    general = {"general.architecture": config.model_type, "general.parameter_count": config.parameters}
    return {
        "modified_at": _started(),
        "details": _about(server)["details"],
        "model_info": {**general, **{f"{config.model_type}.{name}": value for name, value in shape.items()}},
        "parameters": "\n".join(f"{name} {defaults[own]}" for name, own in OPTIONS.items() if own in defaults),
        "capabilities": ["completion", *request.app.state.capabilities()],
    }


@router.get("/api/version")
async def server_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": version("nano-serving")}


def _about(server: ServerState) -> Json:
    config = server.engine.config
    size = f"{config.parameters / 1e9:.2g}B"
    details = {"format": "", "family": config.model_type, "families": [config.model_type], "parameter_size": size}
    return {"digest": "", "details": details}


def _started() -> str:
    return datetime.fromtimestamp(STARTED, UTC).isoformat()
