"""Record files: one JSON object per line, compressed if the name ends with ".gz"."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from phase0_request.core import EngineCore
from phase5_continuous.extras.record.lines import Line, Vocabulary
from phase5_continuous.extras.record.recorder import Recorder

MAX_LINE = 1 << 27  # bytes; a snapshot of a million cached pages, with their tokens, takes a part of it
FLUSH = 1.0  # seconds between two flushes: each costs a compressed file some bytes


def encoded(line: Line) -> str:
    """A line as JSON, without its line break."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Lines:
    """Writes lines into a file. While lines arrive, each is there within about a second, whatever ends the process."""

    to: BinaryIO | gzip.GzipFile
    flushed: float = -inf

    def write(self, line: str) -> None:
        self.to.write(f"{line}\n".encode())
        if monotonic() - self.flushed >= FLUSH:
            self.flush()

    def flush(self) -> None:
        self.to.flush()
        self.flushed = monotonic()


@contextmanager
def open_record(file: Path) -> Iterator[Lines]:
    """Open a file for the lines of a record, compressed if its name ends with ".gz"."""
    with open(file, "wb") as raw:
        if file.suffix != ".gz":
            yield Lines(raw)
            return
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
            yield Lines(packed)


@contextmanager
def recording(
    core: EngineCore[Any, Any], file: Path | None, text: Callable[[int], str] | None = None, model: str = ""
) -> Iterator[None]:
    """Record an engine into a file, if one is given: with the text of its tokens if `text` makes it of their ids."""
    if file is None:
        yield
        return
    vocabulary = Vocabulary(text) if text is not None else None
    with open_record(file) as lines:

        def write(line: Line) -> None:
            lines.write(encoded(vocabulary.add(line) if vocabulary is not None else line))

        recorder = Recorder(core, write, text=text is not None, model=model)
        try:
            yield
        finally:
            recorder.close()


def read(file: Path, warn: Callable[[str], object] = lambda _: None) -> Iterator[Line]:
    """The lines of a record. If it is cut off, its whole lines, and `warn` gets a sentence about it. ValueError if a
    file is not a record, or is damaged."""
    opened: Any = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opened(file, "rb") as lines:
            while text := lines.readline(MAX_LINE + 1):
                if len(text) > MAX_LINE:
                    raise ValueError(f"{file} is not a record: line {number + 1} has more than {MAX_LINE} bytes")
                line = _parsed(text)
                if not isinstance(line, dict) or not (number or "record" in line):
                    raise ValueError(f"{file} is not a record: line {number + 1} does not belong to one")
                number += 1
                yield line
    except EOFError:
        if number:
            warn(f"{file} is cut off, as if what wrote it was killed: it is read up to line {number}")
    except (zlib.error, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or not a record, in line {number + 1}: {error}") from None
    if not number:
        raise ValueError(f"{file} is not a record: it is empty, or cut off in its first line")


def _parsed(text: bytes) -> Any:
    """EOFError, as gzip raises it, if a line is cut off: it has no line break, and is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        if text.endswith(b"\n"):
            raise
        raise EOFError from None
