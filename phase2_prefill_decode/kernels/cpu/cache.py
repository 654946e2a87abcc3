# mypy: allow-untyped-defs
"""What numba compiled is kept for the next start, by however many processes at once.

numba's own files of a function are an index of its kinds and the code of each, and nothing is locked: of two processes
that compile at once, one could lose the code of the other, or take it for its own. Here a kind has one file, named by
all that the code depends on, and it is there as a whole or not at all. At worst two processes compile the same.

A kernel calls what stands in other files, and numba looks at the file of the kernel alone. So what is kept is kept
apart for every state of all of them.
"""

import hashlib
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching


def place(sources: Path) -> Path:
    """The folder for what is compiled of the CPU kernels in a folder: as NUMBA_CACHE_DIR says, beside them, or at home,
    and of another name after any change of theirs."""
    beside, home = sources / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "numba"
    state = b"".join(file.read_bytes() for file in sorted(sources.glob("*.py")))
    folder = numba.config.CACHE_DIR or (beside if os.access(sources, os.W_OK) else home)
    return Path(folder) / f"kernels-{hashlib.sha256(state).hexdigest()[:12]}"


PLACE = place(Path(__file__).parent)


def has_kept() -> bool:
    """Whether anything was compiled before."""
    return any(PLACE.rglob("*.nbc"))


class Files:
    """The compiled kinds of one function, in place of numba's own index and files."""

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        self.folder, self.function = Path(cache_path), filename_base
        self.state = numba.__version__, source_stamp

    def load(self, key: Any) -> Any:
        """What was saved for a kind: its types, the processor, and what the function encloses. None: nothing was."""
        try:
            return pickle.loads(self._file(key).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, key: Any, data: Any) -> None:
        file = self._file(key)
        part = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
        part.write_bytes(caching.dumps(data))
        part.replace(file)

    def _file(self, key: Any) -> Path:
        kind = hashlib.sha256(repr((self.state, key)).encode()).hexdigest()[:16]
        return self.folder / f"{self.function}.{kind}.nbc"


def keeping(compile_it: Callable[..., Any]) -> Any:
    """compile_it(cache=True), with the machine code kept for the next start wherever there is a place to keep it."""
    given = numba.config.CACHE_DIR, getattr(caching, "IndexDataCacheFile", None)
    # numba takes both when it is asked to compile
    numba.config.CACHE_DIR, caching.IndexDataCacheFile = str(PLACE), Files
    try:
        return compile_it(cache=True)
    except RuntimeError:  # neither where this is installed nor at home can anything be written
        return compile_it(cache=False)
    finally:
        numba.config.CACHE_DIR, caching.IndexDataCacheFile = given
