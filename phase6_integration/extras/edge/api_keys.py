"""ApiKeys: the keys that clients may use."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class ApiKeys:
    """Digests of the valid keys; none: no key is required."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = tuple(_digest(key.encode()) for key in keys)

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The valid key in the one header that has one: `Authorization: Bearer`, or `x-api-key` of Anthropic's
        clients. The comparison takes the same time whichever key matches."""
        given = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
        name, value = given[0] if len(given) == 1 else (b"", b"")
        scheme, _, key = (b"bearer", b"", value) if name == b"x-api-key" else value.partition(b" ")
        key = key.strip()
        matches = [hmac.compare_digest(_digest(key), digest) for digest in self.digests]
        return key if scheme.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
