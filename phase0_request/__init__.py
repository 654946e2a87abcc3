"""Phase 0, the life of a request: sampling parameters, states, the waiting queue, batches, and its text."""

import os

from phase0_request.support.lazy import lazy_names

# OpenMP reads this when torch is loaded. Threads that spin while they wait take the cores from those they wait for.
# Most waits within a step are shorter than to sleep and be woken: threads spin for some microseconds before they sleep.
if os.environ.setdefault("OMP_WAIT_POLICY", "passive") == "passive":
    os.environ.setdefault("GOMP_SPINCOUNT", "300")

__getattr__, __all__ = lazy_names(__name__, __file__)
