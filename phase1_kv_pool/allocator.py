"""PageAllocator: allocates, shares and frees pages by reference count, at a cost independent of the pool's size."""

from collections.abc import Sequence

from phase0_request.support.checks import check_int


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than requested, and none was allocated. Not a bug: the scheduler handles it."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} free")


class PageError(RuntimeError):
    """A page was freed twice, shared while free, or is not in this pool: always a bug in the engine."""


class PageAllocator:
    """Pages 0 to num_pages - 1, each with a reference count.

    Free pages are on a stack. A request's pages are freed together and in order, so the next large allocation gets them
    in order. Do not rely on that: the pages of requests that grow side by side interleave.

        count == 0   the page is on the free stack, exactly once
        count >= 1   that many page tables (or the prefix cache) refer to the page; it is not on the stack
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = check_int("num_pages", num_pages, 1)
        self.free = list(range(num_pages - 1, -1, -1))  # the top of the stack is the end of the list: page 0
        self.counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self.free)

    def count(self, page: int) -> int:
        """The reference count of a page; 0 if it is free."""
        self._check_page(page)
        return self.counts[page]

    # region exercise 1.2
    def allocate(self, n: int) -> list[int]:
        """Allocate n pages with a reference count of 1; OutOfPagesError, and nothing allocated, if fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self.free):
            raise OutOfPagesError(n, len(self.free))
        if n == 0:
            return []
        pages = self.free[-n:]
        del self.free[-n:]
        pages.reverse()
        counts = self.counts
        for page in pages:
            counts[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Increment the reference count of each page. All of them must be in use."""
        for page in pages:
            self._check_page(page)
            if self.counts[page] == 0:
                raise PageError(f"page {page} is free; only a page in use can be shared")
        for page in pages:
            self.counts[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Decrement the reference count of each page and free those that reach 0. Returns how many were freed.

        Raises PageError, and changes no count, if one of the pages is already free or is not in this pool.
        """
        counts = self.counts
        freed = []
        for done, page in enumerate(reversed(pages)):
            if not 0 <= page < self.num_pages or counts[page] == 0:
                for undone in pages[len(pages) - done :]:
                    counts[undone] += 1
                self._check_page(page)
                raise PageError(f"page {page} is free already; it cannot be released")
            counts[page] -= 1
            if counts[page] == 0:
                freed.append(page)
        self.free += freed  # last page first, so that the first page is on top
        return len(freed)

    # endregion

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise PageError(f"page {page} is not of this pool; its pages run from 0 to {self.num_pages - 1}")
