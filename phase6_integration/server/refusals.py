"""Errors that are sent from below the routes, in the one shape that all errors have."""

import json
from collections.abc import Sequence

from starlette.types import Send

TYPES = {401: "authentication_error", 500: "server_error", 503: "service_unavailable_error"}


def body(status: int, message: str, code: str) -> bytes:
    """The error as JSON. `message` is ours: it never repeats what a client sent."""
    error = {"message": message, "type": TYPES.get(status, "invalid_request_error"), "param": None, "code": code}
    return json.dumps({"error": error}).encode()


async def refuse(send: Send, status: int, message: str, code: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answer with an error, in full."""
    content = body(status, message, code)
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": content})
