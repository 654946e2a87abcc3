"""Three ways to give out one memory: the longest a request could get, blocks that double, pages.

A memory is a row of token slots. A request never says how long it will get; it asks for room for the tokens it has.
"""

from typing import Protocol

from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError
from phase1_kv_pool.cache import PagedCache

Span = tuple[int, int]  # first slot, how many


class Memory(Protocol):
    """What serving asks of a memory. Both questions are answered by all of the room, or by False and no change."""

    slots: int

    @property
    def reserved(self) -> int:
        """Slots that requests hold, with a token in them or without."""
        ...

    def admit(self, request: Request, tokens: int) -> bool:
        """Room for a new request of so many tokens."""
        ...

    def grow(self, request: Request, tokens: int) -> bool:
        """Room for one token more than before, `tokens` in all."""
        ...

    def release(self, request: Request) -> None: ...

    def spans(self, request: Request) -> list[Span]:
        """The slots a request holds, in the order of its tokens."""
        ...


class ContiguousMax:
    """Every request gets one block as long as a request can ever be."""

    def __init__(self, slots: int, longest: int) -> None:
        if slots < longest:
            raise ValueError(f"a memory of {slots} slots does not hold one request of {longest} tokens")
        self.slots = slots
        self.longest = longest
        self._free = list(range(0, slots - longest + 1, longest))[::-1]
        self._starts: dict[str, int] = {}

    @property
    def reserved(self) -> int:
        return len(self._starts) * self.longest

    def admit(self, request: Request, tokens: int) -> bool:
        _refuse_longer(request, tokens, self.longest)
        if not self._free:
            return False
        self._starts[request.id] = self._free.pop()
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        _refuse_longer(request, tokens, self.longest)
        return True

    def release(self, request: Request) -> None:
        self._free.append(self._starts.pop(request.id))

    def spans(self, request: Request) -> list[Span]:
        return [(self._starts[request.id], self.longest)]


class ContiguousPow2:
    """Every request gets one block, a power of two long. When it is full the request moves to one twice as long.

    The blocks are a buddy allocator's: a block begins at a multiple of its size, splits into two buddies, and two free
    buddies become one again. It is the best case for contiguous memory: free space mends itself as far as it can, and
    growing into a free buddy takes no second block. What it cannot mend is free space in pieces that are too small.
    """

    def __init__(self, slots: int, longest: int) -> None:
        if longest & (longest - 1) or slots < longest or slots % longest:
            raise ValueError(
                f"blocks that double need a longest request of a power of two, got {longest}, "
                f"and a memory that is a multiple of it, got {slots}"
            )
        self.slots = slots
        self.longest = longest
        self.reserved = 0
        self._free: dict[int, set[int]] = {1 << bit: set() for bit in range(longest.bit_length())}
        self._free[longest] = set(range(0, slots, longest))
        self._blocks: dict[str, Span] = {}

    def admit(self, request: Request, tokens: int) -> bool:
        _refuse_longer(request, tokens, self.longest)
        size = 1 << (tokens - 1).bit_length()
        start = self._take(size)
        if start is None:
            return False
        self._blocks[request.id] = (start, size)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        _refuse_longer(request, tokens, self.longest)
        start, size = self._blocks[request.id]
        if tokens <= size:
            return True
        buddy = start ^ size
        if buddy in self._free[size]:
            self._free[size].remove(buddy)
            self.reserved += size
            self._blocks[request.id] = (min(start, buddy), 2 * size)
            return True
        there = self._take(2 * size)
        if there is None:
            return False
        self._give(start, size)
        self._blocks[request.id] = (there, 2 * size)
        return True

    def release(self, request: Request) -> None:
        self._give(*self._blocks.pop(request.id))

    def spans(self, request: Request) -> list[Span]:
        return [self._blocks[request.id]]

    def _take(self, size: int) -> int | None:
        """The first of the smallest free blocks that are long enough, cut down to size; None if there is none."""
        found = size
        while found <= self.longest and not self._free[found]:
            found *= 2
        if found > self.longest:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        self.reserved += size
        return start

    def _give(self, start: int, size: int) -> None:
        """Free a block, and join it with its buddy as long as that is free too."""
        self.reserved -= size
        while size < self.longest and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start = min(start, start ^ size)
            size *= 2
        self._free[size].add(start)


class Pages:
    """Every request gets pages, wherever they are: the PagedCache of the engine."""

    def __init__(self, slots: int, page_size: int) -> None:
        if slots % page_size:
            raise ValueError(f"a memory of {slots} slots is no whole number of pages of {page_size}")
        self.cache = PagedCache(slots // page_size, page_size)
        self.slots = slots

    @property
    def reserved(self) -> int:
        return self.cache.usage.referenced * self.cache.page_size

    def admit(self, request: Request, tokens: int) -> bool:
        self.cache.attach(request)
        if self.grow(request, tokens):
            return True
        self.cache.release(request)
        return False

    def grow(self, request: Request, tokens: int) -> bool:
        try:
            self.cache.grow(request, tokens)
        except OutOfPagesError:
            return False
        return True

    def release(self, request: Request) -> None:
        self.cache.release(request)

    def spans(self, request: Request) -> list[Span]:
        size = self.cache.page_size
        return [(page * size, size) for page in self.cache.table(request)]


def _refuse_longer(request: Request, tokens: int, longest: int) -> None:
    if tokens > longest:
        raise ValueError(f"request {request.id} has {tokens} tokens; a request has {longest} at most")
