"""Names of cached pages that are the same in every process, so that a router knows what each engine has cached.

A page number means something in one engine only. A block (vLLM's word for a page with its content) is named by a hash
of its tokens and of all tokens before them. Python's own `hash` would differ from process to process.
"""

from collections.abc import Sequence
from hashlib import blake2b

from phase1_kv_pool.cache import CacheObserver
from phase4_radix.page_keys import page_keys

ROOT_HASH = 0  # before the first block
HASH_BYTES = 8


# region exercise 4.10
def block_hashes(tokens: Sequence[int], page_size: int, salt: str = "", parent: int | None = None) -> list[int]:
    """Hash the whole pages of `tokens` to 64 bits each, from the hash of the block before and the page's own tokens.
    The first block of a prefix also takes the salt, so no block under another salt has the same hash. With the hash of
    a `parent`, the tokens continue that block."""
    hashes: list[int] = []
    previous = ROOT_HASH if parent is None else parent
    for key in page_keys(tokens, page_size, salt if parent is None else ""):
        digest = blake2b(previous.to_bytes(HASH_BYTES, "little") + key, digest_size=HASH_BYTES).digest()
        previous = int.from_bytes(digest, "little")
        hashes.append(previous)
    return hashes


# endregion


class BlockHashes(CacheObserver):
    """The hashes of all pages in a prefix cache, which it observes (`PagedCache.observers`)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.by_page: dict[int, int] = {}

    def stored(self, parent: int | None, pages: Sequence[int], tokens: Sequence[int], salt: str) -> list[int]:
        """Hash pages that are new in the cache, after the page `parent`. Returns their hashes."""
        before = None if parent is None else self.by_page[parent]
        hashes = block_hashes(tokens, self.page_size, salt, before)
        self.by_page.update(zip(pages, hashes, strict=True))
        return hashes

    def removed(self, pages: Sequence[int]) -> list[int]:
        """Forget pages that have left the cache. Returns their hashes."""
        return [self.by_page.pop(page) for page in pages]
