"""Phase 0, the life of a request: sampling parameters, states, the waiting queue, batches, and its text."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
