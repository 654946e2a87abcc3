"""The tree and the cache that most tests start from."""

import pytest

from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import RadixTree
from tests.phase4_radix.steps import SIZE
from tests.phase4_radix.trees import A, B, C, D, flat


@pytest.fixture
def tree() -> RadixTree:
    """Two prefixes of three pages that diverge after two. The second is locked."""
    tree = RadixTree(2)
    tree.insert(flat(A, B, C), [10, 11, 12])
    tree.lock(tree.insert(flat(A, B, D), [20, 21, 22])[0])
    return tree


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_pages=12, page_size=SIZE)
