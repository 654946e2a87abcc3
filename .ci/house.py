"""`make house`: the size of the project, and how far the core is from what it shall be. Prints lines and files of the
core, the extras and the other parts, and a table of measures with their aims. A test holds some to a limit, which only
gets lower.

Lazy imports count, and so do modules that a string names. Lines are those of the files, docstrings included.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SERVE = "phase6_integration.cli.serve_command"
COMMANDS = "phase6_integration.cli"  # the package, which names every command: it is not followed
SIX, TWO = "phase6_integration", "phase2_prefill_decode"
TOOLS = ("cli", "load", "cluster")  # of phase 6, around the server
LARGEST = 250  # lines of a file of the core
# What extras are about. A policy has a rank too, and a model embeddings of its own: those words are not here.
WORDS = re.compile(
    r"draft|specul|grammar|\bforced|\blate\b|_late\b|logprob|penalt|quantiz|\branks\b|tensor.parallel|recorder|tenant"
    r"|\bembed\b|\.embedding\b|\bembeddings?\b(?= *[:=])",
    re.IGNORECASE,
)
NAMING = ("connect", "connect_engine", "engine", "app", "params", "schemas")  # connect extras, or are data of the API


class Measure(NamedTuple):
    """A number, what it shall come to, and what `tests/test_house.py` holds it to until then."""

    name: str
    now: int
    aim: int
    limit: int | None = None


@cache
def modules() -> dict[str, Path]:
    """Every Python module of the project by its dotted name."""
    folders = (*ROOT.glob("phase?_*"), ROOT / "chapters", ROOT / "tests", ROOT / ".ci")
    found = {}
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def part_of(name: str) -> str:
    """The part of the project that a module belongs to."""
    top, *inner = name.split(".")
    if inner[:1] == ["tiny_chat"]:
        return "tiny_chat"
    if name.startswith("chapters.tiny_chat"):  # what makes the bundled model
        return "labs"
    if top in ("tests", "chapters"):
        return {"tests": "tests", "chapters": "course"}[top]
    if not top.startswith("phase"):
        return "tools"
    if inner[:1] == ["lab"]:
        return "labs"
    if top == SIX and inner[:1] and inner[0] in TOOLS:
        return inner[0]
    phase = "server" if top == SIX else top.partition("_")[0]
    if inner[:1] in (["extras"], ["support"]):
        return f"{phase}, {inner[0]}"
    return "phases, core's kernels" if "kernels" in inner else f"{phase}, core"


def core(part: str) -> list[str]:
    """The modules of the core in the parts that match."""
    return [name for name in modules() if re.fullmatch(part, part_of(name))]


@cache
def source(name: str) -> str:
    return modules()[name].read_text()


def lines(names: Iterable[str]) -> int:
    return sum(len(source(name).splitlines()) for name in names)


def files(names: Iterable[str]) -> int:
    """Without those that only make a folder a package or a phase a command."""
    return sum(not modules()[name].stem.startswith("__") for name in names)


@cache
def named(name: str) -> frozenset[str]:
    """The modules that a module imports or names in a string, and the packages that hold it."""
    others = {name.rpartition(".")[0]} if "." in name else set()
    for node in ast.walk(ast.parse(source(name))):
        match node:
            case ast.Import():
                others |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                others |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Constant(value=str(text)):
                others.add(text.partition(":")[0])
    return frozenset(others & modules().keys())


def reached(start: str) -> set[str]:
    """The modules that can be loaded from this one, labs and tests left out."""
    todo, seen = [start], {COMMANDS}
    while todo:
        name = todo.pop()
        if name not in seen and part_of(name) not in ("labs", "tests", "course"):
            seen.add(name)
            todo += named(name)
    return seen - {COMMANDS}


def words() -> dict[str, int]:
    """How often modules of the core speak of extras. Those whose task it is to name extras are left out."""
    found = {
        name: len(WORDS.findall(source(name))) for name in core(".*core.*") if name.rpartition(".")[2] not in NAMING
    }
    return {name: count for name, count in found.items() if count}


def rooms() -> set[tuple[str, str]]:
    """The pairs of folders and top files of phase 2 that import each other, extras left out."""

    def room(name: str) -> str:
        return name.split(".")[1]

    inside = [name for name in core("phase.*core.*") if name.startswith(f"{TWO}.")]
    ways = {(room(name), room(other)) for name in inside for other in named(name) if other in inside}
    return {(one, other) for one, other in ways if one < other and (other, one) in ways}


def large() -> dict[str, int]:
    """The files of the core of phases 0 to 5 that are too large, kernels left out."""
    sizes = {name: len(source(name).splitlines()) for name in core(r"phase\d, core")}
    return {name: size for name, size in sizes.items() if size > LARGEST}


def hops() -> tuple[set[str], set[str]]:
    """The functions and the files of the project that a step of 8 decodes enters between its plan and its commit. On a
    CPU some are of its kernels, an extra."""
    from phase0_request.params import SamplingParams
    from phase6_integration.engine.engine import NanoServingEngine

    functions, entered, between = set[str](), set[str](), False
    with NanoServingEngine.from_pretrained(kv_cache_pages=64, async_scheduling=False) as engine:
        scheduler = engine.parts.scheduler
        plan, commit = (getattr(type(scheduler), name).__code__ for name in ("plan", "commit"))

        def profile(frame: FrameType, event: str, _: object) -> None:
            nonlocal between
            code = frame.f_code
            if (code, event) in ((plan, "return"), (commit, "call")):
                between = code is plan
            place = code.co_filename.removeprefix(f"{ROOT}/")
            if between and event == "call" and place.startswith("phase") and not code.co_name.startswith("<"):
                functions.add(f"{place}:{code.co_qualname}")
                entered.add(place)

        for number in range(8):
            engine.add_request([number + 5, 6, 7, 8], SamplingParams(max_tokens=9))
        for _ in range(4):
            engine.step()
        sys.setprofile(profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return functions, entered


def measures() -> Iterator[Measure]:
    """What can be counted without running anything."""
    phases, kernels, server = core(r"phase\d, core"), core("phases, core's kernels"), core("server, core")
    yield Measure("lines of the core of phases 0 to 5, without kernels", lines(phases), 5000, 6300)
    yield Measure("  its files", files(phases), 45, 52)
    yield Measure(f"  its files of more than {LARGEST} lines", len(large()), 0, 0)
    yield Measure("lines of the core's kernels", lines(kernels), 1800, 1812)
    yield Measure("lines of the core of the server", lines(server), 3600, 5400)
    yield Measure("words of extras in the core", sum(words().values()), 0, 4)
    yield Measure("pairs of rooms of phase 2 that import each other", len(rooms()), 0, 0)
    yield Measure("lines that `nanoserve serve` reaches", lines(reached(SERVE)), 24000, 33500)
    yield Measure("lines of tests", lines(core("tests")), 33000)
    yield Measure("lines of labs", lines(core("labs")), 10500)


def main() -> int:
    parts: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        parts[part_of(name)].append(name)
    print(f"{'part':24}{'lines':>8}{'files':>8}")
    for part in sorted(parts):
        print(f"{part:24}{lines(parts[part]):8,}{files(parts[part]):8}")
    print(f"{'all Python':24}{lines(modules()):8,}{files(modules()):8}\n")
    print("words of extras, by module: " + ", ".join(f"{name} {count}" for name, count in words().items()))
    print(f"files of more than {LARGEST} lines: " + ", ".join(f"{name} {size}" for name, size in large().items()))
    print(
        "rooms of phase 2 that import each other: " + ", ".join(f"{one} and {other}" for one, other in sorted(rooms()))
    )
    functions, entered = hops()
    print("files that a step of 8 decodes enters: " + ", ".join(sorted(entered)) + "\n")
    steps = (
        Measure("functions that a step of 8 decodes enters, plan to commit", len(functions), 25),
        Measure("  in files", len(entered), 9),
    )
    print(f"{'measure':60}{'now':>8}{'aim':>8}{'limit':>8}")
    for name, now, aim, limit in (*measures(), *steps):
        print(f"{name:60}{now:8,}{aim:8,}{'' if limit is None else f'{limit:8,}'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
