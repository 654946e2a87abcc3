"""The playground at /: one HTML page that chats with this server and shows its state.

The page loads nothing from elsewhere. Its Content-Security-Policy allows its own script and style, by their hashes, and
connections to this server: model output could do no harm even if it were rendered as HTML.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response

FILE = Path(__file__).with_name("playground.html")
router = APIRouter()


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


@router.get("/", include_in_schema=False)
async def playground() -> Response:
    content, headers = page()
    return Response(content, headers=headers, media_type="text/html")


def _hash(html: str, tag: str) -> str:
    """The CSP hash of the one element with this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def attach(app: FastAPI) -> None:
    app.include_router(router)
