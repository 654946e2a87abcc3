"""Phase 4, remembering: the radix tree of what has been computed, and the cache that shares it."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
