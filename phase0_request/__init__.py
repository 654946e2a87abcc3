"""Phase 0, the life of a request: what it is, how it waits, how it is batched, and how its text comes back."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
