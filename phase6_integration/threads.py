"""How many threads of the processor an engine computes on, beside a front and its clients on the same cores.

Threads of an OpenMP library wait for each other by spinning, some times a layer. That is fastest on cores of their own.
On cores that others use too, one is put to sleep in the middle of its part and the rest spin for as long: a step of
milliseconds takes many times that. So a small model, which gains next to nothing from a second thread, has one; a large
one has all cores, and its threads sleep while they wait.
"""

import os

from phase2_prefill_decode.config import ModelConfig

SMALL = 32 << 20  # bytes of weights


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    return 1 if config.bytes <= SMALL else cores()


def environment(threads: int) -> dict[str, str]:
    """Variables for the process of an engine with so many threads. What somebody has set is left alone."""
    wait = {"OMP_WAIT_POLICY": "passive"} if threads >= cores() > 1 else {}
    return {name: value for name, value in wait.items() if name not in os.environ}
