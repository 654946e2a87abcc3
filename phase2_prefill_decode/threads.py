"""The number of CPU threads for a model.

Threads of an OpenMP library spin while they wait for each other, several times a layer. That is fastest on dedicated
cores. On shared cores, one thread is descheduled in the middle of its part and the others spin meanwhile: a step takes
many times as long. So a small model, which gains little from a second thread, runs on one.
"""

import os

from phase2_prefill_decode.config import ModelConfig

SMALL = 32 << 20  # bytes of weights


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    return 1 if config.bytes <= SMALL else cores()


def use_threads_for(config: ModelConfig) -> None:
    """Set torch's number of threads, unless OMP_NUM_THREADS is set."""
    import torch  # here: `threads_for` alone needs no torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads_for(config))
