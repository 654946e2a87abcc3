"""RadixTree: finds the pages that hold the longest cached prefix of a prompt. Knows tokens and pages, no requests."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase1_kv_pool.allocator import PageError
from phase4_radix.eviction import EvictionQueue

ROOT = 0
NO_PARENT = -1
TOKEN_BYTES = array("i").itemsize


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


class NodeView(NamedTuple):
    """A copy of a node for checks and drawings."""

    node: int
    depth: int  # 1 for children of the root
    salt: str  # only children of the root have one
    tokens: list[int]
    pages: list[int]
    ref_count: int
    last_used: int


# region exercise 4.1
def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Pack the whole pages of `tokens` into one `bytes` object each; an incomplete last page is left out.

    Bytes are hashed and compared in C, and the garbage collector does not have to look inside them. The first page
    starts with the salt, so prefixes of different salts have no page in common.
    """
    width = page_size * TOKEN_BYTES
    packed = array("i", tokens).tobytes()
    key = [packed[at : at + width] for at in range(0, len(packed) - width + 1, width)]
    if key:
        key[0] = salt.encode("utf-8", "surrogatepass") + key[0]
    return key


def common_pages(key: list[bytes], other: list[bytes], start: int) -> int:
    """Count the pages that `key` has in common with `other` from page `start` of `other` on.

    A binary search over slices: Python compares a slice in C, and single pages in a loop of bytecode.
    """
    low, high = 0, min(len(key), len(other) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if key[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


# endregion


class RadixTree:
    """Stores each cached prefix once, in whole pages. The caller owns the pages; the tree only names them.

    Locking a node adds one reference to every node from it up to the root. So a node below one without references has
    none either, and every unlocked page can be evicted by removing leaves.

    A locked node keeps its number. Its end moves only when the holder of its only lock inserts behind it. Nodes are
    split where two prefixes diverge, where a lock ends, and where only the first part was used. They are merged again
    once no such reason remains.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked = 0  # pages of nodes with ref_count > 0
        self._nodes = [Node(parent=NO_PARENT, key=[], pages=[], ref_count=1)]  # the root is never evicted
        self._free: list[int] = []  # free entries of the arena
        self._leaves = EvictionQueue()  # leaves without references
        self._clock = 0

    def __len__(self) -> int:
        """The number of nodes, without the root."""
        return len(self._nodes) - len(self._free) - 1

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    # region exercise 4.2
    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """Return the longest cached prefix in whole pages. Read-only: no split, no lock, no update of `last_used`."""
        return self._walk(ROOT, page_keys(tokens, self.page_size, salt))

    def split(self, match: Match) -> int:
        """Return the node that ends exactly where the match ends, splitting a node if it goes on beyond that."""
        if match.offset < len(self._get(match.node).key):
            return self._split(match.node, match.offset)
        return match.node

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "", after: int = ROOT) -> Match:
        """Add `tokens`, held in `pages`, after the path to node `after`. Returns the node where they end now, and the
        pages that the tree had already for the first of them; the pages given for those are not taken.

        The caller must hold a lock on `after`. The tokens that are left extend the node where the walk ended, if it is
        not the root, has no children, and no lock but the caller's on `after`; otherwise they become a child of it.
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
        return Match(node, len(self._nodes[node].key), known.pages)

    def lock(self, node: int) -> None:
        """Add one reference to every node on the path to this one. Each `lock` needs an `unlock`."""
        self._get(node)
        while node != ROOT:
            current = self._nodes[node]
            if current.ref_count == 0:
                self.num_locked += len(current.pages)
                self._leaves.discard(node)
            current.ref_count += 1
            node = current.parent

    def unlock(self, node: int, used: bool = True) -> None:
        """Remove one reference from every node on the path, and with `used` mark the path as used now."""
        if self._get(node).ref_count == 0:
            raise PageError(f"node {node} is not locked")
        end = node
        while node != ROOT:
            current = self._nodes[node]
            current.ref_count -= 1
            if current.ref_count == 0:
                self.num_locked -= len(current.pages)
            node = current.parent
        if used:
            self._touch(end)
        else:
            self._add_to_queue(end)
            if len(children := self._nodes[end].children) == 1:
                self._merge(*children.values())

    def evict(self, count: int) -> list[int]:
        """Remove `count` pages, or all unlocked pages if there are fewer, and return them. The least recently used
        leaf is evicted first, from its end. A node that has lost its last child is a leaf."""
        evicted: list[int] = []
        while len(evicted) < count and self._leaves:
            leaf = self._leaves.oldest()
            node = self._nodes[leaf]
            kept = max(len(node.pages) - (count - len(evicted)), 0)
            evicted += node.pages[kept:]
            if kept == 0:
                self._remove_leaf(leaf)
            del node.key[kept:], node.pages[kept:]
        self.num_pages -= len(evicted)
        return evicted

    def _walk(self, after: int, key: list[bytes]) -> Match:
        """Follow `key` down the tree from the end of node `after`, as far as the tree has it."""
        node, offset = after, len(self._nodes[after].key)
        pages: list[int] = []
        while len(pages) < len(key):
            child = self._nodes[node].children.get(key[len(pages)])
            if child is None:
                break
            node, offset = child, common_pages(self._nodes[child].key, key, len(pages))
            pages += self._nodes[child].pages[:offset]
            if offset < len(self._nodes[child].key):
                break
        return Match(node, offset, pages)

    def _split(self, lower: int, offset: int) -> int:
        """Move the first `offset` pages of a node to a new parent, and return that. The lower part keeps the number,
        since locks refer to it."""
        node = self._nodes[lower]
        above = Node(node.parent, node.key[:offset], node.pages[:offset], {}, node.ref_count, node.last_used)
        upper = self._allocate(above)
        self._nodes[node.parent].children[node.key[0]] = upper
        del node.key[:offset], node.pages[:offset]
        self._nodes[upper].children[node.key[0]] = lower
        node.parent = upper
        return upper

    def _append(self, node: int, key: list[bytes], pages: list[int], ref_count: int) -> int:
        """Add a key that shares its first page with no child: extend the node if it is a leaf with no references but
        the caller's `ref_count`, and otherwise add a child."""
        end = self._nodes[node]
        self.num_pages += len(pages)
        if node != ROOT and not end.children and end.ref_count == ref_count:
            self.num_locked += len(pages) * ref_count
            end.key += key
            end.pages += pages
            return node
        child = self._allocate(Node(node, key, pages))
        end.children[key[0]] = child
        return child

    # endregion

    # region exercise 4.3
    def _merge(self, lower: int) -> bool:
        """Undo a split: merge a node with its parent if it is the only child, no lock ends between the two, and both
        were last used together. Returns whether it did."""
        node = self._nodes[lower]
        upper = self._nodes[node.parent]
        same = (upper.ref_count, upper.last_used) == (node.ref_count, node.last_used)
        if node.parent == ROOT or len(upper.children) > 1 or not same:
            return False
        self._nodes[upper.parent].children[upper.key[0]] = lower
        self._recycle(node.parent)
        node.parent = upper.parent
        upper.key += node.key  # append to the upper lists: during decoding the lower ones are the short ones
        upper.pages += node.pages
        node.key, node.pages = upper.key, upper.pages
        return True

    def _touch(self, node: int) -> None:
        """Mark the path to a node as used now, and merge the nodes on it that no longer need to be separate."""
        self._clock += 1
        end = node
        while node != ROOT:
            current = self._nodes[node]
            current.last_used = self._clock
            node = current.parent
        self._add_to_queue(end)
        while end != ROOT:
            if not self._merge(end):
                end = self._nodes[end].parent

    # endregion

    def path(self, node: int) -> list[int]:
        """The nodes from the root, which is left out, down to this one."""
        self._get(node)
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]

    def nodes(self) -> Iterator[NodeView]:
        """Copies of all nodes but the root, parents before their children."""
        stack = [(child, 1) for child in reversed(self._nodes[ROOT].children.values())]
        width = self.page_size * TOKEN_BYTES
        while stack:
            number, depth = stack.pop()
            node = self._nodes[number]
            salt = node.key[0][:-width].decode("utf-8", "surrogatepass")
            tokens = array("i", b"".join([page[-width:] for page in node.key])).tolist()
            yield NodeView(number, depth, salt, tokens, list(node.pages), node.ref_count, node.last_used)
            stack += [(child, depth + 1) for child in reversed(node.children.values())]

    def check(self) -> None:
        """Raise PageError unless the arena is a tree and all counters are right."""
        for problem in self._problems():
            raise PageError(problem)

    def _problems(self) -> Iterator[str]:
        reached = [ROOT]
        for number in reached:
            node = self._nodes[number]
            reached += node.children.values()
            if number != ROOT and node.ref_count < sum(
                self._nodes[child].ref_count for child in node.children.values()
            ):
                yield f"node {number} has fewer references than its children"
            for first, index in node.children.items():
                child = self._nodes[index]
                if child.parent != number or child.key[:1] != [first]:
                    yield f"node {index} is not the child that node {number} says it is"
                if len(child.key) != len(child.pages):
                    yield f"node {index} has {len(child.pages)} pages for a key of {len(child.key)}"
                if number != ROOT and child.last_used > node.last_used:
                    yield f"node {index} was used after its parent {number}"
        free = [number for number, node in enumerate(self._nodes) if node is FREE]
        if sorted(self._free) != free or len(reached) + len(free) != len(self._nodes):
            yield f"{len(self._nodes)} nodes, {len(reached)} of them in the tree, {len(self._free)} free"
        nodes = {number: self._nodes[number] for number in reached[1:]}
        pages = [page for node in nodes.values() for page in node.pages]
        if len(pages) != len(set(pages)):
            yield "a page is in the tree twice"
        locked = sum(len(node.pages) for node in nodes.values() if node.ref_count)
        if (len(pages), locked) != (self.num_pages, self.num_locked):
            counts = f"{self.num_pages} pages and {self.num_locked} locked ones"
            yield f"the tree has {len(pages)} pages, {locked} of them locked, and counts {counts}"
        leaves = {(number, node.last_used) for number, node in nodes.items() if not (node.ref_count or node.children)}
        if wrong := self._leaves.items() ^ leaves:
            yield f"unlocked leaves and the eviction queue differ in (node, last use): {sorted(wrong)}"

    def _allocate(self, node: Node) -> int:
        if not self._free:
            self._nodes.append(node)
            return len(self._nodes) - 1
        number = self._free.pop()
        self._nodes[number] = node
        return number

    def _recycle(self, number: int) -> None:
        self._nodes[number] = FREE
        self._free.append(number)

    def _remove_leaf(self, leaf: int) -> None:
        node = self._nodes[leaf]
        del self._nodes[node.parent].children[node.key[0]]
        self._leaves.discard(leaf)
        self._add_to_queue(node.parent)
        self._recycle(leaf)

    def _add_to_queue(self, node: int) -> None:
        """Add a node to the eviction queue if it is an unlocked leaf."""
        current = self._nodes[node]
        if not current.ref_count and not current.children:
            self._leaves.add(node, current.last_used)

    def _get(self, node: int) -> Node:
        """The node with a number that came from a caller."""
        if 0 <= node < len(self._nodes) and self._nodes[node] is not FREE:
            return self._nodes[node]
        raise PageError(f"node {node} is not in the tree")
