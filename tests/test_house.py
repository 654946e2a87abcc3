"""The rules of CONTRIBUTING.md: direction of imports, engine and lab, modules without torch, tests that can fail."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from runpy import run_path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PHASES = sorted(folder.name for folder in ROOT.glob("phase[0-6]_*"))
PACKAGES = [*PHASES, "chapters"]
TOP_LEVEL = {
    *PACKAGES,
    "README.md",
    "pyproject.toml",
    "tests",
    "Makefile",
    "LICENSE",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Dockerfile",
    "SECURITY.md",
    "RELEASING.md",
    "AGENTS.md",
    "CITATION.cff",
}

SIX = "phase6_integration"
LAYERS = ["engine", "process", "api", "extras", "app"]  # of phase 6, each over those before it
MOST_FILES = 16  # of a folder of a phase
# Modules of an extra that run in the engine's process, or in those that it starts.
ENGINE_SIDE = tuple(
    f"structured.{name}"
    for name in ("isolated_grammars", "isolated_constraint", "grammar_process", "grammar_worker", "client_grammars")
)

# Modules of phases 0 to 5 that work with tensors. All others there schedule and manage memory, with integers only.
TENSORS = {"cpu", "draft_loading", "engine", "kernels", "layer", "memory", "pool"}


HOUSE = run_path(str(ROOT / ".ci/house.py"))
MODULES: dict[str, Path] = {n: file for n, file in HOUSE["modules"]().items() if n.split(".")[0] in PACKAGES}


def needs(name: str) -> set[str]:
    """The modules of the project that a module imports, also inside functions, or names in a string."""
    return set(HOUSE["named"](name)) & MODULES.keys()


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, also inside functions, by dotted names."""
    found = set[str]()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in inner}
    return frozenset(found)


def floor(name: str) -> int:
    """The number of a module's phase; the course tool is above all phases."""
    return PACKAGES.index(name.split(".")[0])


def test_imports_go_downward_and_not_in_circles() -> None:
    graph = {name: imports(name) & MODULES.keys() for name in MODULES}
    upward = [(name, other) for name, others in graph.items() for other in others if floor(other) > floor(name)]
    assert upward == []
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # CycleError names the cycle
    assert sorted(order) == sorted(MODULES)


# Engine and lab


def of_the_lab(name: str) -> bool:
    return name.split(".")[1:2] == ["lab"]


def engine() -> list[str]:
    """The modules of the phases outside their labs. `__main__` of a phase only names the demo that it starts."""
    return [name for name in MODULES if name.split(".")[0] in PHASES and not of_the_lab(name)]


def of_the_cli(name: str) -> bool:
    return name.startswith(f"{SIX}.cli")


def of_a_command(name: str) -> bool:
    """A module of the CLI, or of the load generator that `nanoserve bench` is: both may use parts of labs."""
    return of_the_cli(name) or name.startswith(f"{SIX}.load")


def public(package: str) -> dict[str, str]:
    """The public names of a phase, each with its module."""
    lines = [line.split() for line in (ROOT / package / "__init__.pyi").read_text().splitlines()]
    return {name: module for _, module, _, name, _, _ in lines}


def test_no_engine_module_imports_a_lab_or_draws() -> None:
    """Neither rich nor matplotlib: only labs and the commands of the CLI draw."""
    assert {name.split(".")[0] for name in MODULES if of_the_lab(name)} == set(PHASES)
    wrong = [
        f"{name} imports {other}"
        for name in engine()
        if not of_a_command(name)
        for other in imports(name)
        if of_the_lab(other) or other.split(".")[0] in ("rich", "matplotlib")
    ]
    assert wrong == []
    assert [name for package in PHASES for name, home in public(package).items() if of_the_lab(home)] == []


def test_the_engine_holds_only_what_serving_needs() -> None:
    """Every module outside the labs is imported, directly or not, by the commands or by the engine of a phase."""
    starts = ("phase6_integration.cli.__main__", *(f"{p}.{end}" for p in PHASES for end in ("engine", "__main__")))
    assert sorted(set(engine()) - reachable(name for name in starts if name in MODULES)) == []


def reachable(start: Iterable[str], labs: bool = False) -> set[str]:
    """These modules of the phases, and all that they need, directly or not."""
    todo, reached = [*start], set[str]()
    while todo:
        name = todo.pop()
        if name not in reached and name.startswith(tuple(PHASES)) and (labs or not of_the_lab(name)):
            reached.add(name)
            todo += needs(name)
    return reached


# Core and extras

ENDS = ("connect", "backends")  # modules of a phase that connect its extras
CONNECT = {f"{package}.{end}" for package in PHASES for end in ENDS} | {f"{SIX}.engine.connect_engine", f"{SIX}.app"}


def of_the_extras(name: str) -> bool:
    return name.split(".")[1:2] == ["extras"]


def test_the_core_knows_no_extra() -> None:
    """Only the modules of a phase that connect them do; also where a module is named in a string."""
    crossing = [
        f"{name} knows {other.replace('.extras.', ': ')}"
        for name in HOUSE["core"](".*core.*")
        if name not in CONNECT
        for other in needs(name)
        if of_the_extras(other) and other.partition(".extras.")[2]
    ]
    assert crossing == []


def test_the_core_speaks_no_more_of_extras_and_its_files_and_rooms_get_no_worse() -> None:
    """By the measures of `make house`, which has the aims. A limit that was reached is lowered."""
    limited = [measure for measure in HOUSE["measures"]() if measure.limit is not None]
    assert [measure for measure in limited if measure.now > measure.limit] == []
    assert limited


# The layers of phase 6


def layer(name: str) -> int | None:
    """The number of a module's layer in phase 6; None outside of the layers."""
    top = name.removeprefix(f"{SIX}.").partition(".")[0]
    top = "app" if top in ("serve", "serve_flags") else top
    return LAYERS.index(top) if name.startswith(SIX) and top in LAYERS else None


def test_a_layer_of_phase_6_knows_only_those_below_it() -> None:
    """engine < process < api < extras < app; also where a module is named in a string, to be loaded later."""
    layers = {name: number for name in MODULES if (number := layer(name)) is not None}
    assert {*layers.values()} == {*range(len(LAYERS))}
    assert [
        f"{name} knows {other}"
        for name, number in layers.items()
        for other in needs(name)
        if not of_the_extras(other) or name.startswith(f"{SIX}.extras")  # else `test_the_core_knows_no_extra` counts it
        if layers.get(other, 0 if not other.startswith((f"{SIX}.cli", f"{SIX}.lab", f"{SIX}.load")) else 9) > number
    ] == []


def test_no_extra_of_the_server_knows_another() -> None:
    """But all know `fields`, which has the schemas of requests."""

    def extra(name: str) -> str:
        return name.removeprefix(f"{SIX}.extras").lstrip(".").partition(".")[0]

    extras = [name for name in MODULES if name.startswith(f"{SIX}.extras.")]
    assert {"edge", "observe", "other_apis", "structured", "tools"} <= {extra(name) for name in extras}
    others = [(name, other) for name in extras for other in needs(name) if other.startswith(f"{SIX}.extras.")]
    assert [f"{name} knows {other}" for name, other in others if extra(other) not in (extra(name), "fields")] == []


def test_only_the_command_line_imports_the_command_line() -> None:
    """Neither labs nor the engine, the server or the cluster."""
    others = [name for name in MODULES if name.split(".")[0] in PHASES and not of_the_cli(name)]
    assert [f"{name} imports {other}" for name in others for other in imports(name) if of_the_cli(other)] == []


def test_the_cli_imports_labs_only_inside_functions() -> None:
    at_once = [
        f"{name}:{node.lineno}"
        for name in filter(of_the_cli, MODULES)
        for node in ast.parse(MODULES[name].read_text()).body
        if isinstance(node, ast.ImportFrom) and of_the_lab(str(node.module))
    ]
    assert at_once == []


def test_folders_are_small_and_names_of_phase_6_are_said_once() -> None:
    inside = [file.relative_to(ROOT) for file in tracked() if file.suffix == ".py" and not file.stem.startswith("__")]
    files = [file for file in inside if file.parts[0].startswith("phase")]
    folders = Counter(str(file.parent) for file in files)
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}
    assert [name for name, count in Counter(f.name for f in files if f.parts[0] == SIX).items() if count > 1] == []


def test_every_module_of_the_api_is_taught() -> None:
    """As a listing of a chapter, or with an exercise in it."""
    files = {path for file in (ROOT / SIX / "api").glob("[!_]*.py") if (path := str(file.relative_to(ROOT)))}
    assert f"{SIX}/api/chat.py" in files
    chapters = "".join(file.read_text() for file in (ROOT / "chapters").glob("0?_*.md"))
    exercises = "".join(file.read_text() for file in (ROOT / "chapters").glob("0?_exercises.toml"))
    taught = {path for path in files if f"<!-- weave: {path}#" in chapters or f'file = "{path}"' in exercises}
    assert sorted(files - taught) == []


def test_every_module_of_the_core_and_every_extra_is_on_the_map() -> None:
    files = {MODULES[name] for name in HOUSE["core"](r"phase\d, core|phases, core's kernels|server, core")}
    core = {str(file.relative_to(ROOT)) for file in files if not file.stem.startswith("__")}
    parts = [file.relative_to(ROOT).parts[:3] for file in ROOT.glob("phase?_*/extras/**/*.py")]
    extras = {"/".join(part) for part in parts if not part[-1].startswith("__")}
    assert len(core) > 100
    assert len(extras) > 20
    linked = set(re.findall(r"\]\(\.\./(phase[^)#]+)\)", (ROOT / "chapters/map.md").read_text()))
    assert sorted((core | extras) - linked) == []


def without_torch() -> list[str]:
    """The modules that schedule and manage memory, the simulator, the server's process and the commands."""
    phases = set(PHASES[:6]) - {"phase2_prefill_decode"}
    integers = [name for name in engine() if name.split(".")[0] in phases and not TENSORS & set(name.split(".")[1:])]
    serving = (f"{SIX}.{part}" for part in ("api", "extras", "app", "serve", "cli.main"))
    named = ("phase5_continuous.lab.simulator", *serving)
    return [*integers, *(name for name in MODULES if name.startswith(named) and not name.endswith(ENGINE_SIDE))]


def test_scheduling_and_serving_load_no_torch() -> None:
    """With all that they import, of phase 2 too. The process of HTTP, `app`, loads no scheduler either:
    that is in the engine's process, and the page's readers of its record are not."""
    names = [name for name in without_torch() if not name.endswith("__main__")]
    assert {"phase1_kv_pool.allocator", "phase4_radix.radix_tree", "phase5_continuous.scheduler"} <= set(names)
    program = f"import sys, importlib, {SIX}.app\nassert 'phase5_continuous.scheduler' not in sys.modules\n"
    program += "for name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    heavy = {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
    program += "    assert not heavy, f'importing {name} loads {heavy}'"
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_scheduling_and_serving_name_no_torch_even_inside_functions() -> None:
    assert [name for name in without_torch() if any(other.split(".")[0] == "torch" for other in imports(name))] == []


@cache
def tracked() -> tuple[Path, ...]:
    """The files that git tracks."""
    if not (ROOT / ".git").exists():  # an archive of the sources: all of it is tracked
        return tuple(p for p in ROOT.rglob("*") if p.is_file() and not {".venv", "__pycache__"} & {*p.parts})
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())


def test_nothing_else_is_at_the_top_level() -> None:
    names = {file.relative_to(ROOT).parts[0] for file in tracked()}
    assert {name for name in names if not name.startswith(".")} - TOP_LEVEL == set()
    assert [name for name in PACKAGES if name not in names] == []


def test_importing_a_phase_loads_only_what_its_public_names_need() -> None:
    """`import phase6_integration` imports nothing else; a name imports its module, as the stub says."""
    program = f"""
import sys
from importlib import import_module
phases, before = { ({package: public(package) for package in PHASES}) }, set(sys.modules)
for package in phases:
    import_module(package)
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
assert loaded == set(phases), loaded
inside = [name for name in sys.modules if name.startswith("phase") and "." in name]
assert not [name for name in inside if not name.startswith("phase0_request.support")], inside
for phase, home in ((sys.modules[package], home) for package, home in phases.items()):
    for name, module in home.items():
        assert getattr(phase, name) is vars(sys.modules[module])[name]
    assert sorted(phase.__all__) == sorted(home)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# Tests and checks


def test_no_test_is_skipped_because_of_a_missing_package() -> None:
    """A missing GPU is a reason to skip. A missing package is a failure."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)]
    assert [str(p) for p in files if "importorskip" in p.read_text()] == []


def test_ci_ignores_no_failure() -> None:
    for file in (".ci/run", "Makefile"):
        text = (ROOT / file).read_text()
        assert not re.search(r"\|\|\s*(true|echo|:)|--exitfirst|continue-on-error|^\t@?-", text, re.MULTILINE), file
    assert "set -euo pipefail" in (ROOT / ".ci/run").read_text()


# Dependencies and private data


def requirements() -> dict[str, Requirement]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [*tables["project"]["optional-dependencies"].values(), *tables["dependency-groups"].values()]
    lines = [*tables["project"]["dependencies"], *(line for extra in extras for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins() -> list[Requirement]:
    """The pins for this machine: some are for one platform or for some Python versions only."""
    text = "".join((ROOT / ".ci" / name).read_text() for name in ("constraints.txt", "book.txt", "cluster.txt"))
    lines = text.replace("\\\n", "").splitlines()
    every = [Requirement(line.partition("--hash=")[0]) for line in lines if not line.startswith("#")]
    return [pin for pin in every if pin.marker is None or pin.marker.evaluate()]


def test_the_version_ranges_include_the_pins_and_the_gpu_machine() -> None:
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins()}
    asked = requirements()
    assert set(asked) - set(pinned) - {"nano-serving"} == set()
    gpu_machine = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "tokenizers": "0.23.2"}
    for versions in (pinned, gpu_machine):
        for name, version in versions.items():
            if name in asked:
                assert asked[name].specifier.contains(version), f"{asked[name]} excludes {version}"


def test_the_project_names_no_machine() -> None:
    """No file contains a path or address of the machine on which it was written, nor does a notebook's output."""
    private = re.compile(
        r"/(?:work|root|home|Users|tmp|opt)/[a-z]|site-packages|pypi\.org/simple|(?<!==)\b10\.\d+\.\d+\.\d+\b"
    )
    binary = (".safetensors", ".png", ".webp")
    packaged = [p for p in tracked() if p.relative_to(ROOT).parts[0] != "tests" and p.name != "LICENSE"]
    kept = [p for p in packaged if p.suffix not in binary]
    assert len(kept) > 40
    told = [f"{p.relative_to(ROOT)}: {m[0]}" for p in kept for m in [private.search(p.read_text("utf-8"))] if m]
    assert told == []
