"""Three ways to allocate KV memory: contiguous blocks of the maximum length, blocks that double, and pages.

A memory is an array of token slots. The final length of a request is unknown: it asks for room for its tokens so far.
"""

from typing import Protocol

from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError
from phase1_kv_pool.cache import PagedCache

Span = tuple[int, int]  # first slot, how many


class KVMemory(Protocol):
    """The memory interface of the simulator. `admit` and `grow` return False, and allocate nothing,
    if the memory does not suffice."""

    slots: int

    @property
    def reserved(self) -> int:
        """The number of allocated slots, with or without a token."""
        ...

    def admit(self, request: Request, tokens: int) -> bool:
        """Allocate memory for a new request of `tokens` tokens."""
        ...

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate memory for one more token, `tokens` in all."""
        ...

    def release(self, request: Request) -> None: ...

    def spans(self, request: Request) -> list[Span]:
        """The slots of a request, in the order of its tokens."""
        ...


class ContiguousMax:
    """Allocates one contiguous block of the maximum length for each request."""

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
        _check_length(request, tokens, self.longest)
        if not self._free:
            return False
        self._starts[request.id] = self._free.pop()
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        _check_length(request, tokens, self.longest)
        return True

    def release(self, request: Request) -> None:
        self._free.append(self._starts.pop(request.id))

    def spans(self, request: Request) -> list[Span]:
        return [(self._starts[request.id], self.longest)]


class ContiguousPow2:
    """Allocates one contiguous block of a power of two for each request, and moves it to a larger one when it is full.

    This is a buddy allocator: a block begins at a multiple of its size, splits into two buddies, and two free buddies
    merge again. It is the best case for contiguous memory: free blocks merge as far as possible, and growing into a
    free buddy needs no copy. What remains is free space in pieces that are too small (external fragmentation).
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
        _check_length(request, tokens, self.longest)
        size = 1 << (tokens - 1).bit_length()
        start = self._take(size)
        if start is None:
            return False
        self._blocks[request.id] = (start, size)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        _check_length(request, tokens, self.longest)
        start, size = self._blocks[request.id]
        if tokens <= size:
            return True
        buddy = start ^ size
        if buddy in self._free[size]:
            self._free[size].remove(buddy)
            self.reserved += size
            self._blocks[request.id] = (min(start, buddy), 2 * size)
            return True
        new = self._take(2 * size)
        if new is None:
            return False
        self._give(start, size)
        self._blocks[request.id] = (new, 2 * size)
        return True

    def release(self, request: Request) -> None:
        self._give(*self._blocks.pop(request.id))

    def spans(self, request: Request) -> list[Span]:
        return [self._blocks[request.id]]

    def _take(self, size: int) -> int | None:
        """Allocate from the smallest free block that is long enough, split down to `size`; None if there is none."""
        block = size
        while block <= self.longest and not self._free[block]:
            block *= 2
        if block > self.longest:
            return None
        start = min(self._free[block])
        self._free[block].remove(start)
        while block > size:
            block //= 2
            self._free[block].add(start + block)
        self.reserved += size
        return start

    def _give(self, start: int, size: int) -> None:
        """Free a block, and merge it with its buddy while that is free as well."""
        self.reserved -= size
        while size < self.longest and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start = min(start, start ^ size)
            size *= 2
        self._free[size].add(start)


class PagedMemory:
    """Allocates pages with the PagedCache of the engine."""

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


def _check_length(request: Request, tokens: int, longest: int) -> None:
    if tokens > longest:
        raise ValueError(f"request {request.id} has {tokens} tokens; a request has {longest} at most")
