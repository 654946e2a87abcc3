"""The playground: one page, at /, that chats with this server and shows what it does.

The page is one file without anything from elsewhere. Its headers let it run its own script and style, known by their
hashes, and talk to this server, and nothing more: what a model says could not do harm even if it were shown as HTML.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

FILE = Path(__file__).with_name("playground.html")


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    html = FILE.read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(html, "script"),
        "style-src": _hash(html, "style"),
        "img-src": "data:",  # the icon, which is empty
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return html.encode(), headers


def playground_routes() -> APIRouter:
    """GET /. No part of the API: it is not in /openapi.json."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def playground() -> Response:
        content, headers = page()
        return Response(content, headers=headers, media_type="text/html")

    return routes


def _hash(html: str, tag: str) -> str:
    """The one element of this kind, as a policy names what it allows."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
