"""The number of CPU threads for a model.

The threads of an operation wait for the slowest of them. A small model gains little from a second thread, so it has
one; a large model has one for each core.
"""

import os

from phase2_prefill_decode.loading.config import ModelConfig

SMALL = 32 << 20  # bytes of weights


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    """The CPU threads that suit a model: one for a small model, otherwise one for each core."""
    return 1 if config.bytes <= SMALL else cores()


def use_threads_for(config: ModelConfig) -> None:
    """Set torch's number of threads to what suits a model, unless OMP_NUM_THREADS is set."""
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads_for(config))
