"""EvictionQueue: the unlocked leaves in LRU order. Finding the oldest never searches the queue."""

import heapq

NODE_BITS = 32
NODE_MASK = (1 << NODE_BITS) - 1
SLACK = 64  # stale entries that are never worth a rebuild


class EvictionQueue:
    """Nodes that may be evicted, the least recently used first: a heap of entries, each a time and a node.

    A node that was used just now is newer than all others, so `add` puts it at the end of the heap and moves nothing.
    Only a parent that has just lost its last child comes with an old time, and takes O(log n).

    Removing an entry from the middle would need a search. Instead, a node that is discarded or used again leaves a
    stale entry behind. `_entries` holds the valid one of each node; an entry that differs from it is dropped when it
    reaches the top. When more than half of the entries are stale, the heap is rebuilt without them.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}  # by node: time and node in one integer, which compares faster than a tuple
        self._heap: list[int] = []

    # region exercise 4.6
    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: int, time: int) -> None:
        """Allow this node to be evicted, or update the time of its last use."""
        entry = self._entries[node] = time << NODE_BITS | node
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = sorted(self._entries.values())  # a sorted list is a heap

    def discard(self, node: int) -> None:
        """Remove a node, if it is in the queue."""
        self._entries.pop(node, None)

    def oldest(self) -> int:
        """Return the least recently used node without removing it. IndexError if the queue is empty."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] & NODE_MASK

    def items(self) -> set[tuple[int, int]]:
        """All nodes in the queue, each with the time of its last use."""
        return {(node, entry >> NODE_BITS) for node, entry in self._entries.items()}

    def _is_stale(self, entry: int) -> bool:
        return self._entries.get(entry & NODE_MASK) != entry

    # endregion
