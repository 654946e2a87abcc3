"""CheckpointedPrefixCache: a prefix cache for models that keep states. It finds a prefix up to its last checkpoint.

The tree is the core's. A checkpoint belongs to the page that it is at the end of, and leaves the tree with it.
"""

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.extras.checkpoints import Checkpoints
from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import Match


class CheckpointedPrefixCache(PrefixCache):
    """A PrefixCache with slots for checkpoints."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self.checkpoints = Checkpoints(num_slots, page_size)
        self.observers.append(self.checkpoints)

    def attach(self, request: Request) -> int:
        known = len(super().match(request).pages) * self.page_size
        cached = super().attach(request)
        if known > cached:  # others have come this way, and gone on in another way
            self.checkpoints.want(request, known)
        return cached

    def match(self, request: Request) -> Match:
        """The longest cached prefix that ends with a checkpoint."""
        match = super().match(request)
        length = self.checkpoints.usable(match.pages)
        if length == len(match.pages):
            return match
        return self.tree.match(request.tokens(0, length * self.page_size), request.cache_salt)

    def awaited(self, request: Request, tokens: int) -> None:
        self.checkpoints.want(request, tokens)

    def slots(self, part: Slice) -> list[int]:
        """Published pages are read-only: if a state has to be computed again over their tokens, nothing is stored."""
        published = self.handles[part.request.id].published * self.page_size
        skipped = min(max(published - part.start, 0), part.length)
        rest = part._replace(start=part.start + skipped, length=part.length - skipped)
        return [-1] * skipped + (super().slots(rest) if rest.length else [])

    def publish(self, request: Request) -> None:
        super().publish(request)
        self.checkpoints.published(request, self.table(request))
