"""RadixTree: finds the pages that hold the longest cached prefix of a prompt. Knows no requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase1_kv_pool.allocator import PageError
from phase4_radix.eviction import EvictionQueue
from phase4_radix.page_keys import common_pages, page_keys

ROOT = 0
NO_PARENT = -1


@dataclass(slots=True)
class Node:
    """A run of whole pages that continues the parent's. Nodes refer to each other by their index in the arena."""

    parent: int
    key: list[bytes]  # the tokens, page by page
    pages: list[int]  # the pages that hold their keys and values
    children: dict[bytes, int] = field(default_factory=dict)  # by the first page of the child's key
    ref_count: int = 0  # locked paths that pass through this node
    last_used: int = 0  # never later than the parent's


FREE = Node(parent=NO_PARENT, key=[], pages=[])  # fills the arena's free entries


class Match(NamedTuple):
    """The longest cached prefix of some tokens. Valid until the tree changes."""

    node: int  # where the prefix ends
    offset: int  # how many pages of that node belong to the prefix
    pages: list[int]  # all pages of the prefix


class RadixTree:
    """Stores each cached prefix once, in whole pages. The caller owns the pages; the tree only names them.

    Locking a node adds one reference to every node from it up to the root. So below a node without references there
    are only nodes without references, and every unlocked page can be evicted by removing leaves.

    A locked node keeps its index. Its end moves only when the holder of its only lock inserts after it. Nodes are split
    where two prefixes diverge, a lock ends, or only the first part was used, and merged when no such reason remains.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked = 0  # pages of nodes with ref_count > 0
        self.nodes = [Node(parent=NO_PARENT, key=[], pages=[], ref_count=1)]  # the arena; the root is never evicted
        self.free: list[int] = []  # free entries of the arena
        self.leaves = EvictionQueue()  # leaves without references
        self._clock = 0

    def __len__(self) -> int:
        """The number of nodes, without the root."""
        return len(self.nodes) - len(self.free) - 1

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """Return the longest cached prefix in whole pages. Read-only: no split, no lock, no update of `last_used`."""
        return self._walk(ROOT, page_keys(tokens, self.page_size, salt))

    def split(self, match: Match) -> int:
        """Return the node that ends exactly where the match ends, splitting a node that extends beyond."""
        if match.offset < len(self._get(match.node).key):
            return self._split(match.node, match.offset)
        return match.node

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], salt: str = "", after: int = ROOT
    ) -> tuple[int, list[int]]:
        """Add `tokens`, held in `pages`, after the path to node `after`. Returns the node where they end now, and the
        pages that the tree already had for the first of these tokens; the pages given for those are not taken.

        The caller must hold a lock on `after`. The new tokens extend the node where the walk ended, unless that is the
        root, has children, or has another lock than the caller's on `after`; then they become a child of it.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}")
        if self._get(after).ref_count == 0:
            raise PageError(f"node {after} is not locked: it could be evicted before its new child")
        key = page_keys(tokens, self.page_size, salt if after == ROOT else "")
        known = self._walk(after, key)
        node, count = self.split(known), len(known.pages)
        if count < len(key):
            node = self._append(node, key[count:], list(pages[count:]), ref_count=int(node == after))
        self._touch(node)
        return node, known.pages

    def lock(self, node: int) -> None:
        """Add one reference to every node on the path to this one. Each `lock` needs an `unlock`."""
        self._get(node)
        # region exercise 4.4
        while node != ROOT:
            current = self.nodes[node]
            if current.ref_count == 0:
                self.num_locked += len(current.pages)
                self.leaves.discard(node)
            current.ref_count += 1
            node = current.parent
        # endregion

    def unlock(self, node: int, used: bool = True) -> None:
        """Remove one reference from every node on the path, and with `used` mark the path as used now."""
        if self._get(node).ref_count == 0:
            raise PageError(f"node {node} is not locked")
        end = node
        # region exercise 4.4
        while node != ROOT:
            current = self.nodes[node]
            current.ref_count -= 1
            if current.ref_count == 0:
                self.num_locked -= len(current.pages)
            node = current.parent
        # endregion
        if used:
            self._touch(end)
        else:
            self._add_to_queue(end)
            if len(children := self.nodes[end].children) == 1:
                self._merge(*children.values())

    # region exercise 4.5
    def evict(self, count: int) -> list[int]:
        """Remove `count` pages, or all unlocked pages if there are fewer, and return them. The least recently used leaf
        is evicted first, from its end. A node that loses its last child becomes a leaf."""
        evicted: list[int] = []
        while len(evicted) < count and self.leaves:
            leaf = self.leaves.oldest()
            node = self.nodes[leaf]
            kept = max(len(node.pages) - (count - len(evicted)), 0)
            evicted += node.pages[kept:]
            if kept == 0:
                self._remove_leaf(leaf)
            del node.key[kept:], node.pages[kept:]
        self.num_pages -= len(evicted)
        return evicted

    # endregion

    # region exercise 4.2
    def _walk(self, after: int, key: list[bytes]) -> Match:
        """Follow `key` down the tree from the end of node `after`, as far as the tree holds it."""
        node, offset = after, len(self.nodes[after].key)
        pages: list[int] = []
        while len(pages) < len(key):
            child = self.nodes[node].children.get(key[len(pages)])
            if child is None:
                break
            node, offset = child, common_pages(self.nodes[child].key, key, len(pages))
            pages += self.nodes[child].pages[:offset]
            if offset < len(self.nodes[child].key):
                break
        return Match(node, offset, pages)

    # endregion

    # region exercise 4.3
    def _split(self, lower: int, offset: int) -> int:
        """Move the first `offset` pages of a node to a new parent, and return the parent. The lower part keeps its
        index, because locks refer to it."""
        node = self.nodes[lower]
        above = Node(node.parent, node.key[:offset], node.pages[:offset], {}, node.ref_count, node.last_used)
        upper = self._allocate(above)
        self.nodes[node.parent].children[node.key[0]] = upper
        del node.key[:offset], node.pages[:offset]
        self.nodes[upper].children[node.key[0]] = lower
        node.parent = upper
        return upper

    # endregion

    def _append(self, node: int, key: list[bytes], pages: list[int], ref_count: int) -> int:
        """Extend a leaf that has only the caller's `ref_count` references; otherwise add a child."""
        end = self.nodes[node]
        self.num_pages += len(pages)
        if node != ROOT and not end.children and end.ref_count == ref_count:
            self.num_locked += len(pages) * ref_count
            end.key += key
            end.pages += pages
            return node
        end.children[key[0]] = child = self._allocate(Node(node, key, pages))
        return child

    # region exercise 4.7
    def _merge(self, lower: int) -> bool:
        """Undo a split: merge a node with its parent if it is the only child, no lock ends between the two, and both
        were last used together. Returns whether they were merged."""
        node = self.nodes[lower]
        upper = self.nodes[node.parent]
        same = (upper.ref_count, upper.last_used) == (node.ref_count, node.last_used)
        if node.parent == ROOT or len(upper.children) > 1 or not same:
            return False
        self.nodes[upper.parent].children[upper.key[0]] = lower
        self._recycle(node.parent)
        node.parent = upper.parent
        upper.key += node.key  # append to the upper lists: during decoding the lower ones are the short ones
        upper.pages += node.pages
        node.key, node.pages = upper.key, upper.pages
        return True

    # endregion

    def _touch(self, node: int) -> None:
        """Mark the path to a node as used now, and merge the nodes on it that no longer need to be separate."""
        self._clock += 1
        end = node
        while node != ROOT:
            self.nodes[node].last_used = self._clock
            node = self.nodes[node].parent
        self._add_to_queue(end)
        while end != ROOT:
            end = end if self._merge(end) else self.nodes[end].parent

    def _allocate(self, node: Node) -> int:
        if not self.free:
            self.nodes.append(node)
            return len(self.nodes) - 1
        number = self.free.pop()
        self.nodes[number] = node
        return number

    def _recycle(self, number: int) -> None:
        self.nodes[number] = FREE
        self.free.append(number)

    def _remove_leaf(self, leaf: int) -> None:
        node = self.nodes[leaf]
        del self.nodes[node.parent].children[node.key[0]]
        self.leaves.discard(leaf)
        self._add_to_queue(node.parent)
        self._recycle(leaf)

    def _add_to_queue(self, node: int) -> None:
        """Add a node to the eviction queue if it is an unlocked leaf."""
        current = self.nodes[node]
        if not current.ref_count and not current.children:
            self.leaves.add(node, current.last_used)

    def _get(self, node: int) -> Node:
        """Return the node with a caller's index. PageError if it is not in the tree."""
        if 0 <= node < len(self.nodes) and self.nodes[node] is not FREE:
            return self.nodes[node]
        raise PageError(f"node {node} is not in the tree")
