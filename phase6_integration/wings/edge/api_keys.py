"""ApiKeys: the keys that are valid now. They come from a file that can be read again, or from flags and environment."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from phase0_request.checks import ConfigError
from phase6_integration.api.settings import check_keys

logger = logging.getLogger("nanoserve")


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
    """Digests of the valid keys; none: no key is required. A rotation replaces them between two requests."""

    def __init__(self, keys: Sequence[str], file: str | None = None) -> None:
        self.file = file
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        self.digests = tuple(digest(key.encode()) for key in keys)

    def reload(self) -> None:
        """Read the file again. If it cannot be read or holds no key, the keys stay as they are."""
        if self.file is None:
            return
        try:
            self.replace(read_keys(self.file))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("the API keys were read again", extra={"fields": {"keys": len(self.digests)}})


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
