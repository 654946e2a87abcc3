"""The process that runs tests: it forks for each run, so that a run starts with the libraries imported already.

`chapters.testing` starts it and writes one job as a line of JSON to its input. It answers with two lines: the id of the
fork, and its exit status. Afterwards it imports what that run has imported besides the course's own modules, which a
workspace may replace: the next fork has them from the beginning.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from chapters import overlay
from chapters.plugin import Recorder

# The time limit is ours: pytest's own faulthandler would cancel it at the first failure.
OPTIONS = "-q --color=no --tb=short --maxfail=0 --continue-on-collection-errors -p no:cacheprovider -p no:faulthandler"
OWN = re.compile(r"(phase\d+_\w+|tests|chapters|conftest)(\.|$)")  # modules of the course


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        with warnings.catch_warnings():  # some libraries have started threads; none of them holds a lock that we need
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _run(job)
        print(child, flush=True)
        status = os.waitpid(child, 0)[1]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started and not ended
        imported = Path(job["report"], "imported.json")
        given = json.loads(imported.read_text()) if imported.exists() else {}
        print(status, flush=True)  # the folder is gone from here on
        _import_like(**given)


def _run(job: dict[str, Any]) -> NoReturn:
    """Run pytest in this fork, in a process group of its own."""
    status = 1
    try:
        os.setpgid(0, 0)
        report = Path(job["report"])
        output = os.open(report / "output.txt", os.O_CREAT | os.O_WRONLY)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        stack = os.open(report / "stack.txt", os.O_CREAT | os.O_WRONLY)
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(job["timeout"], exit=True, file=stack)
        before, environment = set(sys.modules), dict(os.environ)
        if job["overlay"]:
            overlay.install(Path(job["root"]), Path(job["overlay"]))
            os.environ.update(NANO_COURSE_ROOT=job["root"], NANO_COURSE_OVERLAY=job["overlay"])
        recorder = Recorder(report / "events.jsonl", job["stop_at"], job["overlay"])
        status = pytest.main(
            [*OPTIONS.split(), f"--rootdir={job['root']}", f"--basetemp={report / 'tmp'}", *job["arguments"]],
            [recorder],
        )
        changed = {name: value for name, value in os.environ.items() if environment.get(name) != value}
        names = [name for name in sys.modules if name not in before and not OWN.match(name)]
        (report / "imported.json").write_text(json.dumps({"modules": names, "environment": changed}))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _import_like(modules: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Import what a run has imported, in an environment like its own: some libraries read it when imported."""
    os.environ.update({name: value for name, value in environment.items() if name.startswith(("OMP_", "TRITON_"))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            with suppress(Exception):
                import_module(name)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the command has gone
        main()
