"""The stages of `gpu_day` in their order: three calls, each useful alone, what is worth most first in each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from phase6_integration.lab.gpu.rows import Day


@dataclass(frozen=True, slots=True)
class Stage:
    """`function` is "module:function" of this folder: a stage imports only what it measures with. `again` is set for a
    stage that runs in every call: it keeps what the others have left."""

    function: str
    cap: float  # the most seconds
    needs: str | None = None  # a package
    again: bool = False

    def run(self, day: Day) -> None:
        module, _, name = self.function.partition(":")
        function = getattr(import_module(f"{__package__}.{module}"), name)
        cast(Callable[[Day], None], function)(day)


STAGES: Mapping[str, Stage] = {
    "versions": Stage("checks:versions", 40),
    "smoke": Stage("checks:smoke", 120),
    "tests": Stage("suites:tests", 240),
    "suites": Stage("suites:suites", 240),
    "racecheck": Stage("checks:racecheck", 90),
    "kernels": Stage("kernels:kernels", 160),
    "sampling": Stage("kernels:sampling", 40),
    "steps": Stage("steps:steps_8b", 180),
    "profiles": Stage("steps:profiles", 80),
    "tune": Stage("steps:tune", 100),
    "serve": Stage("serving:serve_8b", 180),
    "tuned": Stage("serving:serve_tuned", 120),
    "mixed": Stage("steps:mixed", 90),
    "small": Stage("serving:serve_small", 90),
    "beside": Stage("serving:beside", 120, needs="transformers"),
    "vllm": Stage("serving:vllm", 400, needs="vllm"),
    "cache": Stage("cache:pack", 40, again=True),
}
CALLS: Mapping[int, tuple[str, ...]] = {
    1: ("versions", "smoke", "tests", "suites", "racecheck", "cache"),
    2: ("kernels", "sampling", "steps", "profiles", "tune", "cache"),
    3: ("serve", "tuned", "mixed", "small", "beside", "vllm", "cache"),
}
