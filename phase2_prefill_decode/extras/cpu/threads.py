"""The number of CPU threads for a model. A small one gains little from a second thread."""

import os

from phase2_prefill_decode.loading.config import ModelConfig

SMALL = 32 << 20  # bytes of weights


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    return 1 if config.bytes <= SMALL else cores()
