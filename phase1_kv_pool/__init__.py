"""Phase 1, where keys and values live: the page allocator, page tables, the pool of tensors. Not yet built."""
