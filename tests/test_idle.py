"""Every test can fail: what asserts nothing passes whatever the code does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = ("assert_close", "expect", "accessible")  # torch's, Playwright's, and that of axe in tests/browser


def can_fail(function: ast.AST, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether it checks something: an assert of more than a constant, `pytest.raises`, `warns`, one of CHECKS, or a
    call of a helper in the same file that can fail."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (*CHECKS, *helpers):
            return True
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call):
            called = ast.unparse(node.context_expr.func)
            if called in ("pytest.raises", "pytest.warns"):
                return True
    return False


def idle_tests(source: str) -> list[str]:
    """Tests and state machines that pass whatever the code does, or a note that there are none."""
    tree = ast.parse(source)
    every = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [function for function in every if function.name.startswith("test")]
    others = [function for function in every if function not in tests]
    helpers: frozenset[str] = frozenset()
    while (found := frozenset(other.name for other in others if can_fail(other, helpers))) != helpers:
        helpers = found  # a helper may call another
    machines = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("StateMachine" in ast.unparse(base) for base in node.bases)
    ]
    if not tests and "StateMachine" not in source:
        return ["no test"]
    return [one.name for one in (*tests, *machines) if not can_fail(one, helpers)]


CLIENTS = sorted((ROOT / "tests").glob("*/with_*.py"))
TEST_FILES = [*(p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p != Path(__file__)), *CLIENTS]


def test_every_test_can_fail() -> None:
    idle = {str(file.relative_to(ROOT)): idle_tests(file.read_text()) for file in (*TEST_FILES, Path(__file__))}
    assert {file: names for file, names in idle.items() if names} == {}


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
def test_idle_tests_are_found(body: str, idle: bool) -> None:
    assert (idle_tests(f"def test_it():\n    {body}\n") == ["test_it"]) == idle
    machine = f"class Machine(RuleBasedStateMachine):\n  def step(self):\n    {body}\n"
    assert (idle_tests(machine) == ["Machine"]) == idle
    assert idle_tests(f"def helper():\n    {body}\n") == ["no test"]
