"""Auth: who has no key is refused everywhere but on a short list of public routes."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from phase6_integration.server.errors import RequestError

PUBLIC = frozenset({"/", "/health", "/version"})
CHALLENGE = {"www-authenticate": "Bearer"}


class Auth:
    """Bearer keys. What is compared are digests, all of them every time: how long that takes tells nothing of a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in PUBLIC or self._knows(scope["headers"]):
            return await self.app(scope, receive, send)
        message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
        refusal = RequestError(401, message, code="invalid_api_key", headers=CHALLENGE)
        return await refusal.response(scope, receive, send)

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
