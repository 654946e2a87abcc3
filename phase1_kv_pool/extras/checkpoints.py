"""Checkpoints: copies of the states of requests at the ends of cached pages, in slots of their own.

A state cannot be cut at a page, as keys and values can. So a cached prefix can be used up to the last page
that has a checkpoint at its end. A request has its state copied

    where other prompts branch off  once the tree has shown that they do, or another request waits for that prefix
    where its answer is by now      for the next turn of a chat; the copy moves along with the answer
    where its prompt ends           for the same prompt, and for a chat that goes on without the answer
    where a chunk of its prompt ends

A request that goes on has passed the end of its chunk, and then of its prompt. Such checkpoints give their slots away
first: chunks are many, and few prompts part there. After them comes the least recently used one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase0_request.support.checks import check_int
from phase1_kv_pool.cache import CacheObserver
from phase1_kv_pool.layout import KVLayout

PART = 10  # checkpoints get a tenth of the memory of pages


@dataclass(frozen=True, slots=True)
class CheckpointedLayout(KVLayout):
    """The shape of a KV cache that keeps checkpoints of states beside its pages."""

    state_bytes: int = 1  # of a request

    @classmethod
    def of(cls, layout: KVLayout, state_bytes: int) -> "CheckpointedLayout":
        return cls(layout.layers, layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype, state_bytes)

    @property
    def bytes_per_page(self) -> int:
        """Of a page with its share of the checkpoints."""
        return self.page_size * self.bytes_per_token * (PART + 1) // PART

    def pages_in(self, memory: int) -> int:
        """Beside one checkpoint at least."""
        most = max(memory - self.state_bytes, 0) // (self.page_size * self.bytes_per_token)
        return min(KVLayout.pages_in(self, memory), most)

    def slots_for(self, pages: int) -> int:
        return max(pages * self.page_size * self.bytes_per_token // PART // self.state_bytes, 1)


class Copy(NamedTuple):
    """A state to copy: after the first `tokens` tokens of a request, to this slot."""

    tokens: int
    slot: int


class Checkpoints(CacheObserver):
    """The slots of a prefix cache, which it observes. A slot is free, belongs to a page in the tree, or is taken by a
    request for the end of a page that is not published yet."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.num_slots = check_int("num_slots", num_slots, 1)
        self.page_size = page_size
        self.free = list(range(num_slots))
        self.kept: dict[int, int] = {}  # by page, the least recently used first
        self.passed: dict[int, int] = {}  # by page: those that their request has passed, and none has used
        self.taken: dict[str, dict[int, int]] = {}  # by request id and number of pages
        self.wanted: dict[str, set[int]] = {}  # by request id: numbers of pages after which others branch off
        self.latest: dict[str, tuple[int, int]] = {}  # by request id: its last one, as number of pages and page

    def __contains__(self, page: int) -> bool:
        return page in self.kept or page in self.passed

    # region exercise 10.5
    def usable(self, pages: Sequence[int]) -> int:
        """The number of these pages of a prefix up to its last checkpoint."""
        count = len(pages)
        while count and pages[count - 1] not in self:
            count -= 1
        return count

    # endregion

    def use(self, page: int) -> int:
        """The slot of a page, which now is the most recently used one."""
        slot = self.passed.pop(page) if page in self.passed else self.kept.pop(page)
        self.kept[page] = slot
        return slot

    def want(self, request: Request, tokens: int) -> None:
        """Other requests begin like the first `tokens` tokens of this one, and then differ."""
        self.wanted.setdefault(request.id, set()).add(tokens // self.page_size)

    def take(self, part: Slice) -> list[Copy]:
        """Slots for the states within a slice that is about to be computed, in order."""
        request, start, *_ = part
        size, end, taken = self.page_size, _end(request, self.page_size), self.taken.setdefault(request.id, {})
        for count in [count for count in taken if count * size > start]:  # of a step that is not committed
            self.free.append(taken.pop(count))
        if start // size == part.stop // size:
            return []
        last = part.stop // size if part.stop > len(request.prompt_tokens) else min(part.stop // size, end)
        wanted = self.wanted.get(request.id, set())
        for count in sorted({last, *wanted}):
            if start < count * size <= part.stop:
                slot = self._slot(request, is_passed=count < end and count not in wanted)
                if slot is not None:
                    taken[count] = slot
        return [Copy(count * size, slot) for count, slot in taken.items() if count * size > start]

    def _slot(self, request: Request, is_passed: bool) -> int | None:
        _, own = self.latest.get(request.id, (0, -1))
        if self.free:
            return self.free.pop()
        if self.passed:
            return self.passed.pop(next(iter(self.passed)))
        if own in self.kept:
            return self.kept.pop(own)
        return None if is_passed or not self.kept else self.kept.pop(next(iter(self.kept)))

    # region exercise 10.5
    def published(self, request: Request, table: Sequence[int]) -> None:
        """The full pages of a request are in the tree: its checkpoints at their ends belong to these pages."""
        taken = self.taken.get(request.id, {})
        for count in [count for count in taken if count * self.page_size <= request.computed]:
            slot, page = taken.pop(count), table[count - 1]
            if page in self:  # another request has computed the same
                self.free.append(slot)
                self.use(page)
            else:
                self._keep(request, count, page, slot)

    # endregion

    def _keep(self, request: Request, count: int, page: int, slot: int) -> None:
        """A request has one checkpoint that moves on, beside those that others want."""
        self.kept[page] = slot
        if count in self.wanted.get(request.id, ()):
            return
        before, old = self.latest.get(request.id, (0, -1))
        if before > _end(request, self.page_size):  # the checkpoint of an answer moves along
            self.removed([old])
        elif old in self.kept:
            self.passed[old] = self.kept.pop(old)
        self.latest[request.id] = count, page

    def removed(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self:
                self.use(page)
                self.free.append(self.kept.pop(page))

    def released(self, request: Request) -> None:
        self.free += self.taken.pop(request.id, {}).values()
        self.wanted.pop(request.id, None)
        self.latest.pop(request.id, None)


def _end(request: Request, page_size: int) -> int:
    """The number of pages of a prompt that the same prompt could use: it computes its last token itself."""
    return (len(request.prompt_tokens) - 1) // page_size
