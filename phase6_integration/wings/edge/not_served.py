"""Refuse what OpenAI's and vLLM's APIs have beside text generation, before a body is read."""

from phase6_integration.api.errors import RequestError

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


def check_served(path: str) -> None:
    for start, what in WHAT.items():
        if path == start or path.startswith(f"{start}/"):
            message = f"not supported: {what}. This server generates text, at /v1/chat/completions and /v1/completions"
            raise RequestError(404, f"{message}; /openapi.json lists all routes", code="unsupported_endpoint")
