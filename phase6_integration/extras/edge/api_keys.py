"""ApiKeys: the keys that clients may use, from a file or from flags and the environment."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from phase0_request.checks import ConfigError
from phase6_integration.api.settings import check_keys


def read_keys(file: str | Path) -> tuple[str, ...]:
    """The keys in a file, one on each line. Empty lines and those that begin with # are left out. A file without keys
    is an error: it would open the server to all."""
    try:
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the API keys in {file}: {reason}") from None
    keys = check_keys([line for line in lines if line and not line.startswith("#")])
    if not keys:
        raise ConfigError(f"{file} holds no API key: write one on each line")
    return keys


class ApiKeys:
    """Digests of the valid keys; none: no key is required."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = tuple(_digest(key.encode()) for key in keys)

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The valid key in the one header that has one: `Authorization: Bearer`, or `x-api-key` of Anthropic's clients.
        It is compared with all digests, in time that does not depend on them."""
        given = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
        name, value = given[0] if len(given) == 1 else (b"", b"")
        scheme, _, key = (b"bearer", b"", value) if name == b"x-api-key" else value.partition(b" ")
        key = key.strip()
        matches = [hmac.compare_digest(_digest(key), digest) for digest in self.digests]
        return key if scheme.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
