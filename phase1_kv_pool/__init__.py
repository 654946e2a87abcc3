"""Phase 1, where keys and values live: the page allocator, page tables by request, the pool of tensors."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
