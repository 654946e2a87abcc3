"""Phase 0, the life of a request: sampling parameters, states, the waiting queue, batches, and its text."""

import os

from phase0_request.lazy import lazy_names

# OpenMP reads this when torch is loaded. Threads that spin while they wait take the cores from those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__getattr__, __all__ = lazy_names(__name__, __file__)
