"""LayerGroups: the layers of a model in groups that have page tables of their own, so that those with a window free the
pages before it.

All groups have the same number of layers, so a page of memory has the same size for each of them, and all of them share
one pool: layer i of every group has the pool's tensor i, and a page is of one group at a time. Memory goes to the kind
of layers that needs it. Two pools with a fixed ratio would be right for one length of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phase1_kv_pool.layout import KVLayout

UNLIMITED = 1 << 40  # tokens
MOST_GROUPS = 16  # each has a page table for every request


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers: first those that see all tokens, then those with windows."""

    full: int  # groups of layers that see all tokens
    windowed: int  # groups of layers with windows
    size: int  # layers of a group; the last one of a kind may have fewer
    window: int  # the largest window of a layer: tokens, with the query's own
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group
    in_flight: int = UNLIMITED  # the most tokens that a request computes before a commit frees pages

    @classmethod
    def of(cls, windows: Sequence[int | None], in_flight: int = UNLIMITED) -> "LayerGroups | None":
        """The groups of layers with these windows; None if no layer has one."""
        full = [layer for layer, window in enumerate(windows) if window is None]
        windowed = [layer for layer, window in enumerate(windows) if window is not None]
        if not windowed:
            return None
        size = max(min(len(kind) for kind in (full, windowed) if kind), -(-len(windows) // MOST_GROUPS))
        first = -(-len(full) // size)  # of the windowed groups
        places = {layer: divmod(number, size) for number, layer in enumerate(full)}
        places |= {layer: divmod(first * size + number, size) for number, layer in enumerate(windowed)}
        window = max(window for window in windows if window is not None)
        in_order = tuple(places[layer] for layer in range(len(windows)))
        return cls(first, -(-len(windowed) // size), size, window, in_order, in_flight)

    @property
    def count(self) -> int:
        return self.full + self.windowed

    def pages_before(self, page_size: int) -> int:
        """The number of pages that a query reads before its own page: they hold the window's other tokens."""
        return -(-(self.window - 1) // page_size)

    def span(self, page_size: int) -> int:
        """The most pages that a request holds in a windowed group: the pages that a query reads, and the pages of
        the tokens in flight, which begin anywhere in a page."""
        return self.pages_before(page_size) + -(-(self.in_flight - 1) // page_size) + 1

    def pages_for(self, tokens: int, page_size: int) -> int:
        """The most pages of memory that a request of `tokens` tokens holds at once."""
        pages = -(-tokens // page_size)
        return self.full * pages + self.windowed * min(pages, self.span(page_size))

    def tokens_in(self, num_pages: int, page_size: int) -> int:
        """The most tokens of a request that fits in a pool of this many pages."""
        pages, span = num_pages // self.count, self.span(page_size)
        if pages >= span:
            pages = (num_pages - self.windowed * span) // self.full if self.full else UNLIMITED
        return min(pages * page_size, UNLIMITED)


@dataclass(frozen=True, slots=True)
class GroupedLayout(KVLayout):
    """The shape of a KV cache with groups of layers. `layers` counts the layers of one group."""

    groups: LayerGroups | None = None

    @classmethod
    def of(cls, layout: KVLayout, groups: LayerGroups) -> "GroupedLayout":
        return cls(groups.size, layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype, groups)

    def pages_for(self, tokens: int) -> int:
        """The most pages that a request of `tokens` tokens holds at once, of all groups."""
        assert self.groups is not None
        return self.groups.pages_for(tokens, self.page_size)


def within(windows: Sequence[int | None], context: int) -> list[int | None]:
    """The windows that are shorter than the longest sequence; the others hide nothing."""
    return [window if window is not None and window < context else None for window in windows]
