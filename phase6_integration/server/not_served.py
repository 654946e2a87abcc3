"""NotServed: refuses what OpenAI's and vLLM's APIs have beside text generation, before a body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from phase6_integration.server.errors import RequestError

WHAT = {
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling models",
    "/classify": "classification",
    "/score": "scores of texts",
    "/v1/score": "scores of texts",
    "/rerank": "ranking",
    "/v1/rerank": "ranking",
    "/v2/rerank": "ranking",
    "/v1/moderations": "moderation",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/vector_stores": "vector stores",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
}  # by the start of the path


class NotServed:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        what = _what(scope["path"]) if scope["type"] == "http" else None
        if what is None:
            return await self.app(scope, receive, send)
        message = f"not supported: {what}. This server generates text, at /v1/chat/completions and /v1/completions; "
        refusal = RequestError(404, f"{message}/openapi.json lists all routes", code="unsupported_endpoint")
        return await refusal.response(scope, receive, send)


def _what(path: str) -> str | None:
    return next((what for start, what in WHAT.items() if path == start or path.startswith(f"{start}/")), None)
