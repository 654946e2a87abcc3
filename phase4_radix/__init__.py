"""Phase 4, remembering: the radix tree of what has been computed, and the cache that shares it."""

from phase4_radix.prefix_cache import Counts, PrefixCache
from phase4_radix.radix_tree import Match, RadixTree

__all__ = ["Counts", "Match", "PrefixCache", "RadixTree"]
