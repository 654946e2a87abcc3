"""Phase 1, the paged KV cache: the page allocator, page tables of requests, and the pool of key and value tensors."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
