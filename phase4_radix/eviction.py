"""EvictionQueue: the unlocked leaves in LRU order. Adding a leaf and finding the oldest never search the queue."""

import heapq
from collections import deque

NODE_BITS = 32
NODE_MASK = (1 << NODE_BITS) - 1
SLACK = 64  # so many stale entries are never worth a rebuild


class EvictionQueue:
    """Nodes that may be evicted, the least recently used first.

    A node that is used now is newer than all others, so most nodes arrive in LRU order and wait in a plain deque: O(1),
    however long it is. Only a parent that has just lost its last child arrives with an old time. Such nodes go into a
    heap: O(log n).

    Removing an entry from the middle would need a search. Instead, a node that is discarded or used again leaves a
    stale entry behind. `_entries` holds the valid one of each node; an entry that differs from it is dropped when it
    reaches the front. When more than half of the entries are stale, the deque is rebuilt without them.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}  # by node: time and node in one integer, which compares faster than a tuple
        self._deque: deque[int] = deque()
        self._heap: list[int] = []

    # region exercise 4.4
    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: int, time: int) -> None:
        """Allow this node to be evicted, or update the time of its last use."""
        entry = self._entries[node] = time << NODE_BITS | node
        if not self._deque or entry > self._deque[-1]:
            self._deque.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        if len(self._deque) + len(self._heap) > 2 * len(self._entries) + SLACK:
            self._deque, self._heap = deque(sorted(self._entries.values())), []

    def discard(self, node: int) -> None:
        """Remove a node, if it is in the queue."""
        self._entries.pop(node, None)

    def oldest(self) -> int:
        """Return the least recently used node without removing it. IndexError if the queue is empty."""
        deque_, heap = self._deque, self._heap
        while deque_ and self._is_stale(deque_[0]):
            deque_.popleft()
        while heap and self._is_stale(heap[0]):
            heapq.heappop(heap)
        return (min(deque_[0], heap[0]) if deque_ and heap else (deque_ or heap)[0]) & NODE_MASK

    def items(self) -> set[tuple[int, int]]:
        """All nodes in the queue, each with the time of its last use."""
        return {(node, entry >> NODE_BITS) for node, entry in self._entries.items()}

    def _is_stale(self, entry: int) -> bool:
        return self._entries.get(entry & NODE_MASK) != entry

    # endregion
