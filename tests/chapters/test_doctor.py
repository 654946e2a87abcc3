"""doctor: the machine, its tier, and the proof."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chapters.course import Course
from chapters.doctor import tier
from chapters.testing import run_tests
from phase0_request.machine import Machine

LAPTOP = Machine("cpu", 2, 2**33, None, None, "3.11.7", "Linux x86_64", {"torch": "2.13.0", "transformers": "5.0"})


@pytest.mark.parametrize(
    ("gpu", "versions", "name", "skipped"),
    [
        (None, {}, "cpu", ["no NVIDIA GPU", "Triton is not installed"]),
        (None, {"triton": "3.6"}, "interpreter", ["no NVIDIA GPU"]),
        ("H200", {"triton": "3.6"}, "gpu", []),
        ("H200", {"triton": "3.6", "torch": "2.13.0+cpu"}, "interpreter", ["everything on the H200"]),
        ("H200", {}, "cpu", ["Triton is not installed"]),
    ],
)
def test_the_tier_follows_from_the_machine(
    gpu: str | None, versions: dict[str, str], name: str, skipped: list[str]
) -> None:
    found = tier(replace(LAPTOP, gpu=gpu, versions=LAPTOP.versions | versions))
    assert found.name == name
    assert len(found.skipped) == len(skipped)
    assert all(part in line for part, line in zip(skipped, found.skipped, strict=True))


def test_missing_packages_are_reported() -> None:
    lines = " ".join(tier(replace(LAPTOP, versions={})).skipped)
    assert "torch is not installed" in lines
    assert "transformers" in lines


def test_the_proof_runs_the_marked_tests_only(tool: Callable[..., Any], edit: Callable[[str, str, str], None]) -> None:
    said = tool("doctor")
    assert said.code == 0
    assert "The reference works here: 1 tests marked `proof` passed" in said.out
    edit("phase0_request/queue.py", "pop(0)", "pop()")
    said = tool("doctor")
    assert said.code == 1
    assert "failed: tests/phase0_request/test_queue.py::test_pop: assert 2 == 1" in said.out


def test_without_marked_tests_there_is_no_proof(
    course: Course, tool: Callable[..., Any], edit: Callable[[str, str, str], None]
) -> None:
    edit("tests/phase0_request/test_queue.py", "@pytest.mark.proof\n", "")
    said = tool("doctor")
    assert (said.code, "No proof: 0 tests" in said.out) == (1, True)


def test_without_a_checkout_the_machine_is_still_described(course: Course, tool: Callable[..., Any]) -> None:
    (course.root / "pyproject.toml").unlink()
    said = tool("doctor")
    assert said.code == 2
    assert "processor" in said.out
    assert "Clone the repository" in said.err
    assert "needs the checkout" in tool("check").err


def test_a_run_says_how_far_it_is(course: Course) -> None:
    told: list[tuple[int, int]] = []
    run_tests(course, ["tests"], timeout=60, options=["-m", "proof"], progress=lambda *count: told.append(count))
    assert told[-1] == (1, 1)
