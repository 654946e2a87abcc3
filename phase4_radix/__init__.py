"""Phase 4, the prefix cache: a radix tree of cached prefixes, and the KV cache that shares their pages."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
