"""The stages of `gpu_day` in their order: three calls, each useful alone, what is worth most first in each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from phase6_integration.lab.gpu.rows import Day


@dataclass(frozen=True, slots=True)
class Stage:
    """`function` is "module:function" of this folder: a stage imports only what it measures with. `share` is its part
    of the seconds of a call; those that it leaves go to the stages behind it. `again` is set for a stage that runs in
    every call: it packs what the others have left."""

    function: str
    share: float
    needs: str | None = None  # a package
    again: bool = False

    def run(self, day: Day) -> None:
        module, _, name = self.function.partition(":")
        function = getattr(import_module(f"{__package__}.{module}"), name)
        cast(Callable[[Day], None], function)(day)


STAGES: Mapping[str, Stage] = {
    "versions": Stage("checks:versions", 20),
    "smoke": Stage("checks:smoke", 60),
    "tests": Stage("suites:tests", 160),
    "suites": Stage("suites:suites", 200),
    "racecheck": Stage("checks:racecheck", 60),
    "kernels": Stage("kernels:kernels", 110),
    "products": Stage("kernels:products", 40),
    "sampling": Stage("kernels:sampling", 30),
    "steps": Stage("steps:steps_8b", 150),
    "tune": Stage("steps:tune", 80),
    "profiles": Stage("steps:profiles", 90),
    "serve": Stage("serving:serve_8b", 160),
    "quantized": Stage("serving:serve_quantized", 100),
    "mixed": Stage("steps:mixed", 80),
    "small": Stage("serving:serve_small", 70),
    "beside": Stage("serving:beside", 90, needs="transformers"),
    "pack": Stage("packing:pack", 40, again=True),
}
CALLS: Mapping[int, tuple[str, ...]] = {
    1: ("versions", "smoke", "tests", "suites", "racecheck", "pack"),
    2: ("kernels", "products", "sampling", "steps", "tune", "profiles", "pack"),
    3: ("serve", "quantized", "mixed", "small", "beside", "pack"),
}
