"""Phase 1, where keys and values live: the page allocator, page tables by request, the pool of tensors."""

from phase1_kv_pool.allocator import OutOfPagesError, PageAllocator, PageError
from phase1_kv_pool.cache import KVCache, PagedCache, Usage
from phase1_kv_pool.layout import KVLayout

__all__ = ["KVCache", "KVLayout", "OutOfPagesError", "PageAllocator", "PageError", "PagedCache", "Usage"]
