"""The state machine of the scheduler over caches that free pages before windows, with the content of their pages."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from phase0_request import Batch
from phase1_kv_pool import PagedCache
from phase1_kv_pool.extras.layer_groups import LayerGroups
from phase1_kv_pool.extras.windows import WindowedCache
from phase4_radix.extras.windows import WindowedPrefixCache
from tests.phase5_continuous.support import Device, Launched
from tests.phase5_continuous.test_machine import Anything, run_machine

DRAFT = 5  # tokens
Place = tuple[int, int]  # a physical page, and a token in it


@dataclass
class DeviceWithWindows(Device):
    """Also keeps page tables as a device does, from `changes`, and the content of physical pages. A step must find in
    them what it reads: of full groups every token, of windowed groups those in the window of its first token."""

    entries: dict[Place, int] = field(default_factory=dict)  # by row and number: physical pages
    content: dict[Place, tuple[int, int]] = field(default_factory=dict)  # group, and what `memory` has for that token
    places: dict[int, list[dict[int, Place]]] = field(default_factory=dict)  # of each launched slice, by group

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        cache, groups = self.cache, self.groups
        for row, first, pages in cache.changes():
            self.entries |= {(row, first + place): page for place, page in enumerate(pages)}
        cache.copied()
        for piece in self.steps[-1]:
            stop, row, size = len(piece.slots), cache.row(piece.request), cache.page_size
            starts = [0] * groups.full + [max(piece.start + 1 - groups.window, 0)] * groups.windowed
            self.places[id(piece)] = [
                {
                    position: (self.entries[row, position // size * groups.count + group], position % size)
                    for position in range(start, stop)
                }
                for group, start in enumerate(starts)
            ]

    @property
    def groups(self) -> LayerGroups:
        assert isinstance(self.cache, WindowedCache)
        return self.cache.groups

    def _run(self, piece: Launched) -> list[int | None]:
        result = super()._run(piece)
        for group, places in enumerate(self.places.pop(id(piece))):
            for position, place in places.items():
                assert place[0] < self.cache.usage.total, f"{piece.request.id} reads or writes the null page"
                state = group, self.memory[piece.slots[position]]
                if position >= piece.start:
                    self.content[place] = state
                found = self.content.get(place)
                assert found == state, f"{piece.request.id} reads {found} for token {position} in group {group}"
        return result


class WithWindows(Anything):
    device_type = DeviceWithWindows
    windows: tuple[int | None, ...] = (None, 5, 5)

    def make_cache(self, pages: int, page_size: int, chunk: int) -> PagedCache:
        groups = LayerGroups.of(self.windows, chunk * (1 + self.ahead) + DRAFT)
        assert issubclass(self.cache_type, WindowedCache)
        assert groups is not None
        return self.cache_type(groups, pages * groups.count, page_size)

    @rule(count=st.integers(2, 3), ending=st.integers(0, 3))
    def siblings(self, count: int, ending: int) -> None:
        """Requests with one prefix, the others once the first has computed it: their windows begin with its pages."""
        for _ in range(count):
            self.arrive((5,) * 8 + (6,) * 5, ending, 15)
            for _ in range(3):
                self.engine.step()

    @invariant()
    def holds(self) -> None:
        super().holds()
        cache = getattr(self, "cache", None)
        if isinstance(cache, WindowedCache):
            Anything.seen["windows move"] += any(cache.first.values())
            Anything.seen["windows shared"] += cache.debt > 0
        if isinstance(cache, WindowedPrefixCache):
            Anything.seen["cached without windows"] += cache.tree.num_pages > len(cache.pages.windowed)
            Anything.seen["kept"] += any(page in cache.reused for page, _ in cache.unheld.items())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cache") and isinstance(self.cache, WindowedPrefixCache):
            counts = self.cache.counts
            Anything.seen += Counter(hit=counts.hit_tokens, evicted=counts.evictions, twice=counts.duplicates)


class OnlyWindows(WithWindows):
    windows = (4, 7)


SETTINGS = [
    (cache_type, how, machine)
    for cache_type in (WindowedCache, WindowedPrefixCache)
    for machine in (WithWindows, OnlyWindows)
    for how in ("one by one", "ahead", "with drafts")
]


@pytest.mark.parametrize(("cache_type", "how", "machine"), SETTINGS)
def test_any_order_of_events(cache_type: type[PagedCache], how: str, machine: type[Anything]) -> None:
    assert run_machine(cache_type, how, examples=12, rarely=0, machine=machine) >= 600
    rare = ["windows move"]
    if cache_type is WindowedPrefixCache:
        rare += ["windows shared", "cached without windows", "kept", "hit", "evicted", "twice"]
    assert {what: Anything.seen[what] for what in rare if not Anything.seen[what]} == {}
