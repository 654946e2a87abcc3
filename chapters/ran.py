"""Runs a module and says whose code it ran: `python -m chapters.ran '{"file.py": [[3, 7, "0.1"]]}' MODULE ARG...`, with
the lines of each exercise, counted from 0."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Spans = Mapping[str, Sequence[tuple[int, int, str]]]


def run(spans: Spans, module: str, arguments: Sequence[str]) -> tuple[set[str], int]:
    """The exercises of which a line ran, and the exit code of the module."""
    ran = set[str]()
    open_ = {str(ROOT / file): list(its) for file, its in spans.items()}

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        its = open_.get(frame.f_code.co_filename)
        for first, last, id in its or ():
            if first < frame.f_lineno <= last:
                ran.add(id)
        if its:
            its[:] = [span for span in its if span[2] not in ran]
        return watch if its else None

    sys.argv = [module, *arguments]
    sys.settrace(watch)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.settrace(None)
    return ran, code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    given: Spans = json.loads(sys.argv[1])
    found, code = run(given, sys.argv[2], sys.argv[3:])
    every = sorted({id for its in given.values() for _, _, id in its}, key=lambda id: [*map(int, id.split("."))])
    for said, ids in (("Yours and run", found), ("Yours, but not run by this", set(every) - found)):
        if ids:
            print(f"{said}: {', '.join(id for id in every if id in ids)}.")
    sys.exit(code)
