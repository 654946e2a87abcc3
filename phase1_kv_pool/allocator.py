"""PageAllocator: who owns which page. Integers only; an operation costs the same in a small pool and in a huge one."""

from collections.abc import Iterable, Sequence


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than were asked for. Nothing was taken. A scheduler plans with this; it is no fault."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} free")
        self.wanted = wanted
        self.free = free


class PageError(RuntimeError):
    """A page was used as it must not be: freed twice, foreign, shared while free. A fault of the engine."""


class PageAllocator:
    """Pages 0 to num_pages - 1, each free or owned by a count of users.

    The free pages are a stack. A request's pages come back together and in order, so the next one to ask for many takes
    them together and in order. Nothing more is done for runs of neighbours: requests that grow side by side, a page at
    a time, interleave, and a reader may not count on runs.

        count == 0   the page is on the free stack, exactly once
        count >= 1   so many users hold it; it is not on the stack
    """

    def __init__(self, num_pages: int) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise ValueError(f"num_pages must be an integer from 1, got {num_pages!r}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the top of the stack is the end of the list: page 0
        self._counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def count(self, page: int) -> int:
        """How many users hold a page; 0 if it is free."""
        self._refuse_foreign(page)
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """Take n free pages, each with one user: all of them, or none and an OutOfPagesError."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        # region exercise 1.2
        if n > len(self._free):
            raise OutOfPagesError(n, len(self._free))
        if n == 0:
            return []
        pages = self._free[-n:]
        del self._free[-n:]
        pages.reverse()
        counts = self._counts
        for page in pages:
            counts[page] = 1
        return pages
        # endregion

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each of these pages. All must be in use."""
        for page in pages:
            self._refuse_foreign(page)
            if self._counts[page] == 0:
                raise PageError(f"page {page} is free; only a page in use can be shared")
        for page in pages:
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """One user less for each of these pages; those left without any are free. Returns how many became free.

        All of them or none: a page that cannot be released is a PageError, and the others keep their users.
        """
        # region exercise 1.3
        counts = self._counts
        freed = []
        for done, page in enumerate(reversed(pages)):
            if not 0 <= page < self.num_pages or counts[page] == 0:
                for again in pages[len(pages) - done :]:
                    counts[again] += 1
                self._refuse_foreign(page)
                raise PageError(f"page {page} is free already; it cannot be released")
            counts[page] -= 1
            if counts[page] == 0:
                freed.append(page)
        self._free += freed  # last page first, so that the first is on top
        return len(freed)
        # endregion

    def check(self) -> None:
        """Raise PageError unless every page is free exactly once or in use."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise PageError("a page is on the free stack twice")
        for page in range(self.num_pages):
            if (page in free) != (self._counts[page] == 0):
                raise PageError(
                    f"page {page} has {self._counts[page]} users and is {'' if page in free else 'not '}free"
                )
        if not free <= set(range(self.num_pages)):
            raise PageError(f"foreign pages on the free stack: {sorted(free - set(range(self.num_pages)))}")

    def _refuse_foreign(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise PageError(f"page {page} is not of this pool; its pages run from 0 to {self.num_pages - 1}")


def runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Pages as runs of neighbours: (first page, how many). A page table of one run can be read without following it."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found
