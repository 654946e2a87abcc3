"""EvictionQueue: who goes first. Nothing in it is ever searched for."""

import heapq
from collections import deque

NODE_BITS = 32
NODE_MASK = (1 << NODE_BITS) - 1
SLACK = 64  # so many stale entries are never worth a sorting


class EvictionQueue:
    """Nodes that may be evicted, the least recently used first.

    What is used now is used later than anything before, so nodes come in order and most wait in a plain line. Taking
    the first costs the same however many wait behind it. Only a parent whose last child has gone comes with a time long
    past: for such there is a heap, at O(log n).

    Neither can find an entry to remove it. So a node that leaves, or is used again, leaves an old entry behind. That
    one is known to be stale because `_entries` says otherwise, and is dropped when it comes first. When most entries
    are stale the line is laid anew, so there are never many more than twice those that count.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}  # by node: time and node in one number, which compares faster than a tuple
        self._line: deque[int] = deque()
        self._late: list[int] = []  # a heap

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: int, time: int) -> None:
        """From now on the node may be evicted; it was last used at `time`."""
        entry = self._entries[node] = time << NODE_BITS | node
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heapq.heappush(self._late, entry)
        if len(self._line) + len(self._late) > 2 * len(self._entries) + SLACK:
            self._line, self._late = deque(sorted(self._entries.values())), []

    def discard(self, node: int) -> None:
        """The node may not be evicted, whether it was to be or not."""
        self._entries.pop(node, None)

    def oldest(self) -> int:
        """The one to be evicted next. It stays until it is discarded. IndexError if there is none."""
        line, late = self._line, self._late
        while line and self._is_stale(line[0]):
            line.popleft()
        while late and self._is_stale(late[0]):
            heapq.heappop(late)
        return (min(line[0], late[0]) if line and late else (line or late)[0]) & NODE_MASK

    def items(self) -> set[tuple[int, int]]:
        """Everyone in the queue, with the time of last use."""
        return {(node, entry >> NODE_BITS) for node, entry in self._entries.items()}

    def _is_stale(self, entry: int) -> bool:
        return self._entries.get(entry & NODE_MASK) != entry
