"""How many threads of the processor a model computes on.

Threads of an OpenMP library wait for each other by spinning, some times a layer. That is fastest on cores of their own.
On cores that others use too, one is put to sleep in the middle of its part and the rest spin for as long: a step of
milliseconds takes many times that. So a small model, which gains next to nothing from a second thread, has one.
"""

import os

from phase2_prefill_decode.config import ModelConfig

SMALL = 32 << 20  # bytes of weights


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    return 1 if config.bytes <= SMALL else cores()


def use_threads_for(config: ModelConfig) -> None:
    """Have torch compute on so many, unless OMP_NUM_THREADS says how many."""
    import torch  # here, for who only asks for the number has no use for it

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads_for(config))
