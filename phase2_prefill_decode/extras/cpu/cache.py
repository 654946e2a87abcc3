# mypy: allow-untyped-defs
"""The on-disk cache of compiled kernels, safe for any number of processes at once.

numba's own cache has an index file and a code file for each function, without a lock: of two processes that compile at
once, one could lose the other's code or load it as its own. Here each compiled signature is one file, named by a hash
of all that the code depends on, and written atomically. At worst two processes compile the same.

numba looks for changes in a kernel's own file only, but a kernel calls functions of other files. So the cache directory
is named by a hash of all files of this package.
"""

import hashlib
import logging
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

log = logging.getLogger(__name__)


def place(sources: Path) -> Path:
    """The cache directory of the kernels in `sources`: in NUMBA_CACHE_DIR, beside them, or in the home directory. Any
    change of a source gives another directory."""
    beside, home = sources / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "numba"
    state = b"".join(file.read_bytes() for file in sorted(sources.glob("*.py")))
    folder = os.environ.get("NUMBA_CACHE_DIR") or (beside if os.access(sources, os.W_OK) else home)
    return Path(folder) / f"kernels-{hashlib.sha256(state).hexdigest()[:12]}"


PLACE = place(Path(__file__).parent)


def is_writable() -> bool:
    """Whether kernels are kept at all."""
    with suppress(OSError):
        PLACE.mkdir(parents=True, exist_ok=True)
    return os.access(PLACE, os.W_OK)


@cache
def not_kept(why: str) -> None:
    """Say once that kernels have to be compiled again by each process."""
    log.warning("kernels for this CPU cannot be kept in %s, so each process compiles them: %s", PLACE, why)


class Files:
    """The compiled signatures of one function; replaces numba's IndexDataCacheFile."""

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        self.folder = Path(cache_path).parent  # numba would add a folder for each checkout
        self.function = filename_base
        self.state = numba.__version__, source_stamp

    def load(self, key: Any) -> Any:
        """Load the code of a key (types, processor, closure); or None."""
        try:
            return pickle.loads(self._file(key).read_bytes())
        except (FileNotFoundError, EOFError, pickle.UnpicklingError):  # or only the beginning of one was written
            return None

    def save(self, key: Any, data: Any) -> None:
        file = self._file(key)
        part = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
        try:
            part.write_bytes(caching.dumps(data))
            part.replace(file)
        except OSError as error:  # the disk is full, say: what was compiled runs all the same
            with suppress(OSError):
                part.unlink(missing_ok=True)
            not_kept(str(error.strerror))

    def _file(self, key: Any) -> Path:
        kind = hashlib.sha256(repr((self.state, key)).encode()).hexdigest()[:16]
        return self.folder / f"{self.function}.{kind}.nbc"


def keeping(compile_it: Callable[..., Any]) -> Any:
    """Call compile_it(cache=True) with this cache; without the cache if no directory is writable."""
    given = numba.config.CACHE_DIR, getattr(caching, "IndexDataCacheFile", None)
    # numba reads both when it compiles
    numba.config.CACHE_DIR, caching.IndexDataCacheFile = str(PLACE), Files
    try:
        return compile_it(cache=True)
    except RuntimeError:  # no directory is writable
        return compile_it(cache=False)
    finally:
        numba.config.CACHE_DIR, caching.IndexDataCacheFile = given
