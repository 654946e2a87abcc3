"""The rules of the house, held by machine: who may import whom, what needs no torch, what stands where."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PHASES = [
    "phase0_request",
    "phase1_kv_pool",
    "phase2_prefill_decode",
    "phase3_chunked_prefill",
    "phase4_radix",
    "phase5_continuous",
    "phase6_integration",
]
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
}

# Tensors are held here; what else these phases have decides with integers, and never loads torch. A name stands for
# what is below it, too. Phase 2 computes: there it is the other way round.
TENSORS = {
    "phase0_request": (),
    "phase1_kv_pool": ("memory", "pool", "kernels", "lab.bench", "lab.catalog", "lab.timing"),
    "phase3_chunked_prefill": ("engine", "kernels", "lab"),
    "phase4_radix": ("engine", "lab.study"),
    "phase5_continuous": ("engine", "lab.study"),
    "phase6_integration": ("assemble", "engine", "cli.doctor", "lab"),
}
INTEGERS_OF_PHASE_2 = ("config", "families", "fields", "lab.cost", "lab.roofline")


@cache
def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str) -> Iterator[tuple[str, int]]:
    """What a module imports, wherever in it the import stands: dotted names and line numbers."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules() else str(node.module)), node.lineno


def floor(name: str) -> int:
    """How high a module stands: its phase's number; the course tool stands above all phases."""
    return PACKAGES.index(name.split(".")[0])


def test_imports_run_downward_only() -> None:
    project = [(name, other, line) for name in modules() for other, line in imports(name) if other in modules()]
    assert len(project) > 20
    upward = [f"{name}:{line} imports {other}" for name, other, line in project if floor(other) > floor(name)]
    assert upward == []


def test_there_is_no_circle_of_imports() -> None:
    graph = {name: {other for other, _ in imports(name) if other in modules()} for name in modules()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle
    assert sorted(order) == sorted(modules())


# The engine, and the lab beside it.


def of_the_lab(name: str) -> bool:
    return name.split(".")[1:2] == ["lab"]


def engine() -> list[str]:
    """What stands in the phases outside their labs. `__main__` of a phase starts its demo, and only names it."""
    return [name for name in modules() if name.split(".")[0] in PHASES and not of_the_lab(name)]


def of_the_cli(name: str) -> bool:
    return name.startswith("phase6_integration.cli")


def named_as_text(name: str) -> Iterator[str]:
    """Modules that a module names as text, to load them when they are needed: "module" or "module:function"."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module in modules():
                yield module


def public(package: str) -> dict[str, str]:
    """The public names of a phase, each with its module."""
    lines = [line.split() for line in (ROOT / package / "__init__.pyi").read_text().splitlines()]
    return {name: module for _, module, _, name, _, _ in lines}


def test_no_engine_module_imports_a_lab_or_draws() -> None:
    """Neither rich nor matplotlib: what is shown to people is drawn by labs, and by the commands of the cli."""
    assert {name.split(".")[0] for name in modules() if of_the_lab(name)} == set(PHASES)
    wrong = [
        f"{name}:{line} imports {other}"
        for name in engine()
        if not of_the_cli(name)
        for other, line in imports(name)
        if of_the_lab(other) or other.split(".")[0] in ("rich", "matplotlib")
    ]
    assert wrong == []


def test_the_cli_loads_a_lab_only_inside_the_command_that_needs_it() -> None:
    at_once = [
        f"{name}:{node.lineno}"
        for name in filter(of_the_cli, modules())
        for node in ast.parse(modules()[name].read_text()).body
        if isinstance(node, ast.ImportFrom) and of_the_lab(str(node.module))
    ]
    assert at_once == []


def test_no_public_name_is_of_a_lab() -> None:
    assert [
        f"{package}.{name}" for package in PHASES for name, home in public(package).items() if of_the_lab(home)
    ] == []


def test_the_engine_holds_only_what_serving_needs() -> None:
    """Every module outside the labs is reached from the commands, or from the engine of a phase."""
    start = ["phase6_integration.cli.__main__", *(f"{package}.engine" for package in PHASES)]
    start += [f"{package}.__main__" for package in PHASES]
    todo, reached = [name for name in start if name in modules()], set[str]()
    while todo:
        name = todo.pop()
        if name not in reached and not of_the_lab(name):
            reached.add(name)
            todo += [other for other in (*(o for o, _ in imports(name)), *named_as_text(name)) if other in modules()]
            todo += [name.rpartition(".")[0]] if "." in name else []
    assert sorted(set(engine()) - reached) == []


def host_only() -> list[str]:
    """What decides with integers."""
    chosen = [f"phase2_prefill_decode.{name}" for name in INTEGERS_OF_PHASE_2]
    for name in modules():
        package, _, module = name.partition(".")
        if package in TENSORS and not any(f"{module}.".startswith(f"{top}.") for top in TENSORS[package]):
            chosen.append(name)
    return chosen


def test_host_only_modules_load_no_torch() -> None:
    names = host_only()
    for package, tops in TENSORS.items():
        assert {f"{package}.{top}" for top in tops} <= modules().keys()
    program = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    heavy = {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
    program += "    assert not heavy, f'importing {name} loads {heavy}'"
    names = [name for name in names if not name.endswith("__main__")]
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_host_only_modules_name_no_torch_even_inside_functions() -> None:
    named = [
        f"{name}:{line}" for name in host_only() for other, line in imports(name) if other.split(".")[0] == "torch"
    ]
    assert named == []


@cache
def tracked() -> tuple[Path, ...]:
    """The files that git tracks: a log or a note that lies in the checkout is nobody's rule."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())


def test_nothing_else_is_at_the_top_level() -> None:
    names = {file.relative_to(ROOT).parts[0] for file in tracked()}
    assert {name for name in names if not name.startswith(".")} - TOP_LEVEL == set()
    assert [name for name in PACKAGES if name not in names] == []


@pytest.mark.parametrize("package", PHASES)
def test_importing_a_phase_loads_only_what_its_public_names_need(package: str) -> None:
    """`import phase6_integration` is free; a name loads its module, which the stub beside it states."""
    home = public(package)
    program = f"""
import sys
before = set(sys.modules)
import {package} as phase
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
assert loaded <= {{"phase0_request", phase.__name__}}, loaded
home = {home}
for name, module in home.items():
    assert getattr(phase, name) is vars(sys.modules[module])[name]
assert sorted(phase.__all__) == sorted(home)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# Tests that test.


def named_as_tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node


def can_fail(function: ast.AST, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether something in it compares: an assert of more than a constant, a context that expects an exception, torch's
    comparison of tensors, or one of the file's own helpers that can fail."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("assert_close", *helpers):
            return True
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call):
            called = ast.unparse(node.context_expr.func)
            if called in ("pytest.raises", "pytest.warns"):
                return True
    return False


def idle_tests(source: str) -> list[str]:
    """Tests, and state machines, that would pass whatever the code under them did."""
    tree = ast.parse(source)
    tests = {f.name for f in named_as_tests(tree)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name not in tests]
    helpers: frozenset[str] = frozenset()
    while (found := frozenset(function.name for function in functions if can_fail(function, helpers))) != helpers:
        helpers = found  # a helper may call another
    idle = [f.name for f in named_as_tests(tree) if not can_fail(f, helpers)]
    machines = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("StateMachine" in ast.unparse(base) for base in node.bases)
    ]
    return idle + [machine.name for machine in machines if not can_fail(machine, helpers)]


TEST_FILES = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p != Path(__file__)]


@pytest.mark.parametrize("file", [*TEST_FILES, Path(__file__)], ids=lambda p: str(p.relative_to(ROOT / "tests")))
def test_every_test_can_fail(file: Path) -> None:
    source = file.read_text()
    assert list(named_as_tests(ast.parse(source))) or "StateMachine" in source, f"{file.name} holds no test"
    assert idle_tests(source) == []


@pytest.mark.parametrize(
    ("body", "idle"),
    [
        ("print('ok')", True),
        ("assert True", True),
        ("assert 'this is fine'", True),
        ("check_everything()", True),
        ("x = 1\n    return", True),
        ("assert f() == 1", False),
        ("torch.testing.assert_close(f(), 1)", False),
        ("for x in y:\n        assert x", False),
        ("with pytest.raises(ValueError):\n        f()", False),
    ],
)
def test_an_idle_test_is_told_from_one_that_can_fail(body: str, idle: bool) -> None:
    assert (idle_tests(f"def test_it():\n    {body}\n") == ["test_it"]) == idle
    machine = f"class Machine(RuleBasedStateMachine):\n  def step(self):\n    {body}\n"
    assert (idle_tests(machine) == ["Machine"]) == idle


def test_no_test_is_skipped_for_want_of_an_install() -> None:
    """A skip may name a GPU that is not there. A package that is not there is a failure."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)]
    assert [str(p) for p in files if "importorskip" in p.read_text()] == []


def test_ci_swallows_no_failure() -> None:
    for file in (".ci/run", "Makefile"):
        text = (ROOT / file).read_text()
        assert not re.search(r"\|\|\s*(true|echo|:)|--exitfirst|continue-on-error|^\t@?-", text, re.MULTILINE), file
    assert "set -euo pipefail" in (ROOT / ".ci/run").read_text()


# What is said about the outside.


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins() -> list[Requirement]:
    """The pins for this machine: some hold for one platform or for some Pythons only."""
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    every = [Requirement(line) for line in lines if not line.startswith("#")]
    return [pin for pin in every if pin.marker is None or pin.marker.evaluate()]


def test_the_ranges_admit_the_pins_and_what_the_gpu_machine_has() -> None:
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins()}
    asked = requirements()
    assert set(asked) - set(pinned) - {"nano-serving", "sphinx", "myst-nb"} == set()
    gpu_machine = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "tokenizers": "0.23.2"}
    for versions in (pinned, gpu_machine):
        for name, version in versions.items():
            if name in asked:
                assert asked[name].specifier.contains(version), f"{asked[name]} excludes {version}"


def test_the_project_names_no_machine() -> None:
    """No file tells where or on what it was written: not in code, not in the output of a notebook."""
    private = re.compile(
        r"/(?:work|root|home|Users|tmp|opt)/[a-z]|site-packages|pypi\.org/simple|(?<!==)\b10\.\d+\.\d+\.\d+\b"
    )
    binary = (".safetensors", ".png")
    packaged = [p for p in tracked() if p.relative_to(ROOT).parts[0] != "tests" and p.name != "LICENSE"]
    kept = [p for p in packaged if p.suffix not in binary]
    assert len(kept) > 40
    told = [f"{p.relative_to(ROOT)}: {m[0]}" for p in kept for m in [private.search(p.read_text("utf-8"))] if m]
    assert told == []
