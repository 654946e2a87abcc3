"""The page at /: chat with the model, and watch the engine. Plain files, read once at the start.

The page loads nothing from elsewhere. Its Content-Security-Policy allows only this server's scripts, styles and
connections, and nothing inline. Model output could do no harm even if it were rendered as HTML.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from phase6_integration.extras.page import live_record
from phase6_integration.extras.page.sources import sources

FOLDER = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
    ".jsonl": "application/jsonl",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # asked for again each time, and answered by a 304 if it is the same
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def attach(app: FastAPI, allowed_origins: Sequence[str], has_keys: bool) -> None:
    live_record.attach(app, allowed_origins, has_keys)
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in TYPES:
            path = file.relative_to(FOLDER).as_posix()
            route = "/" if path == "index.html" else f"/static/{path}"
            app.add_route(route, _sends(file.read_bytes(), TYPES[file.suffix]), include_in_schema=False)
    app.add_route("/static/viewer/sources.json", _send_sources, include_in_schema=False)


@cache
def _sources() -> bytes:
    return json.dumps(sources()).encode()


async def _send_sources(request: Request) -> Any:
    return await _sends(await asyncio.to_thread(_sources), "application/json")(request)


def _sends(content: bytes, media_type: str) -> Callable[..., Any]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def send(request: Request) -> Response:
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return send
