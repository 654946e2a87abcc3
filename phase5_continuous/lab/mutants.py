"""`python -m phase5_continuous.lab mutants`: rules of the scheduler, changed one by one. What sees it: the explorer of
states, or the tests of phases 3 to 5 without those of the explorer?

A mutant is a line of the source and what it becomes. They were drawn by chance, before anybody looked which are seen.
"""

import json
import multiprocessing
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, section
from phase5_continuous.lab.exploring.planting import ROOT, planted
from phase5_continuous.lab.exploring.search import explore
from phase5_continuous.lab.exploring.worlds import BUGS, WORLDS

FILE = ROOT / "chapters/05_mutants.toml"
EXPLORED = [*BUGS.values(), *WORLDS.values()]  # the small worlds of the bugs first
MOST = 3000  # states of a world, for those that are larger
TESTS = "tests/phase5_continuous", "tests/phase3_chunked_prefill", "tests/phase4_radix"
OTHERS = "tests/phase5_continuous/lab/test_explore.py"
PATIENCE = 60  # seconds of the processor for one test: one that takes longer hangs


class Mutant(NamedTuple):
    """A line of the source, and what it becomes."""

    file: str
    line: str
    becomes: str
    same: str = ""  # why it behaves as the engine does, if it does


def mutants() -> list[Mutant]:
    given = tomllib.loads(FILE.read_text("utf-8"))
    return [Mutant(file, *each) for file, lines in given.items() for each in lines]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Have this process run the mutant."""
    text = (ROOT / mutant.file).read_text("utf-8")
    line = re.compile(rf"^( *){re.escape(mutant.line)}$", re.MULTILINE)
    changed, times = line.subn(lambda found: found[1] + mutant.becomes, text)
    assert times == 1, f"{mutant.file} has the line {mutant.line!r} {times} times"
    with planted(mutant.file, changed):
        yield


def explored(mutant: Mutant) -> str:
    """The promise that a mutant breaks in the first states of the named worlds; empty if it breaks none."""
    with mutated(mutant):
        for setting in EXPLORED:
            try:
                found = explore(setting, processes=1, most=MOST, again=setting in BUGS.values())
            except Exception as error:
                return f"no error in the engine ({type(error).__name__})"
            if found.broken is not None:
                return found.broken.promise
    return ""


class First:
    """Notes the first test that fails. One that hangs ends the process."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.note = note

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.note(report.nodeid)


def tested(mutant: Mutant) -> str:
    """The first test of the suite that a mutant fails, or "one that hangs"; empty if it passes all of them."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_test, args=(mutant, theirs.send))
    process.start()
    theirs.close()
    failed = ""
    with suppress(EOFError):
        failed = ours.recv()
    process.join()
    return failed or ("" if process.exitcode == 0 else "one that hangs")


def _test(mutant: Mutant, note: Callable[[str], object]) -> None:
    import pytest

    os.chdir(ROOT)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    with mutated(mutant):
        code = pytest.main([*options, *TESTS, f"--ignore={OTHERS}"], [First(note)])
    os._exit(code != 0)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab mutants", __doc__)
    p.add_argument("--most", type=at_least_one, metavar="N", help="of the mutants: the first ones")
    p.add_argument("--tested", type=Path, metavar="FILE", help="figures with what the suite sees: do not run it")
    options = p.parse_args(arguments)
    console, rows = Console(highlight=False), list[dict[str, Any]]()
    known = json.loads(options.tested.read_text("utf-8"))["figures"]["mutants"] if options.tested else []
    before = {(row["file"], row["becomes"]): row["tested"] for row in known}
    for mutant in mutants()[: options.most]:
        began = time.perf_counter()
        by_explorer = explored(mutant)
        by_suite = before.get((mutant.file, mutant.becomes)) if options.tested else tested(mutant)
        rows.append({**mutant._asdict(), "explored": by_explorer, "tested": by_suite})
        seen = f"{by_explorer or '-'} | {by_suite if by_suite is None else by_suite or '-'}"
        console.print(f"{mutant.becomes}: {seen} ({time.perf_counter() - began:.0f} s)", soft_wrap=True, markup=False)
    figures = counted(rows)
    section(console, "Mutants that are seen", {"": figures})
    finish(p, options, arguments, {**figures, "mutants": rows}, console=console)
    return 0


def counted(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    other = [row for row in rows if not row["same"]]
    tried = [row for row in other if row["tested"] is not None]
    return {
        "all": len(rows),
        "same": len(rows) - len(other),
        "explorer": sum(bool(row["explored"]) for row in other),
        "tried_on_the_suite": len(tried),
        "explorer_of_these": sum(bool(row["explored"]) for row in tried),
        "suite_of_these": sum(bool(row["tested"]) for row in tried),
        "neither_of_these": sum(not (row["explored"] or row["tested"]) for row in tried),
    }
