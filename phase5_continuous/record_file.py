"""Record files: one JSON object a line, compressed if the name ends with ".gz"."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from phase0_request.core import EngineCore
from phase5_continuous.recorder import Line, Recorder, Vocabulary

MAX_LINE = 1 << 27  # bytes; a snapshot of a million cached pages, with their tokens, takes a part of it


def encoded(line: Line) -> str:
    """A line as JSON, without its line break."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


@contextmanager
def open_record(file: Path) -> Iterator[TextIOWrapper]:
    """Open a file for the lines of a record, compressed if its name ends with ".gz"."""
    with open(file, "wb") as raw:
        to = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if file.suffix == ".gz" else raw
        with TextIOWrapper(to, "utf-8") as lines:
            yield lines


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
            lines.write(encoded(vocabulary.add(line) if vocabulary is not None else line) + "\n")

        recorder = Recorder(core, write, text=text is not None, model=model)
        try:
            yield
        finally:
            recorder.close()


def read(file: Path) -> Iterator[Line]:
    """The lines of a record. ValueError if a file is none, or is damaged."""
    opened: Any = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, text in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), 1):
                if len(text) > MAX_LINE:
                    raise ValueError(f"{file} is not a record: line {number} has more than {MAX_LINE} characters")
                line = json.loads(text)
                if not isinstance(line, dict) or (number == 1 and "record" not in line):
                    raise ValueError(f"{file} is not a record: line {number} does not belong to one")
                yield line
    except (EOFError, zlib.error, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or not a record, after {number} lines: {error}") from None
    if not number:
        raise ValueError(f"{file} is not a record: it is empty")
