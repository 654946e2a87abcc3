"""The playground at /: one HTML page that chats with this server and shows its state.

The page loads nothing from elsewhere. Its Content-Security-Policy allows its own script and style, by their hashes, and
connections to this server: model output could do no harm even if it were rendered as HTML.
"""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Response

FILE = Path(__file__).with_name("playground.html")
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; "  # the icon, which is empty
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def attach(app: FastAPI) -> None:
    html = FILE.read_text("utf-8")
    headers = {
        "content-security-policy": POLICY.format(script=_hash(html, "script"), style=_hash(html, "style")),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return Response(html, headers=headers, media_type="text/html")


def _hash(html: str, tag: str) -> str:
    """The CSP hash of the one element with this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
