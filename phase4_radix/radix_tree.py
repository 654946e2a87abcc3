"""RadixTree: which pages hold which prefix. Nodes are numbers in an arena; what they name, they name by number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase1_kv_pool.allocator import PageError
from phase4_radix.eviction import EvictionQueue
from phase4_radix.runs import TOKEN_BYTES, common, in_pages, salt_of, tokens_of

ROOT = 0
GONE = -1  # no node's number


@dataclass(slots=True)
class Node:
    """A run of whole pages that comes after what the parent holds."""

    parent: int
    run: list[bytes]  # the tokens, page by page
    pages: list[int]  # where they lie
    children: dict[bytes, int] = field(default_factory=dict)  # by the first page of their runs
    locks: int = 0  # how many locked paths lead through here
    used: int = 0  # when it was last used; never later than its parent


HOLE = Node(parent=GONE, run=[], pages=[])  # stands in the place of each node that is gone


class Match(NamedTuple):
    """How far the tree knows a prefix. Good until the tree changes."""

    node: int  # where the prefix ends
    inside: int  # after so many pages of that node's run
    pages: list[int]  # where the prefix lies


class Branch(NamedTuple):
    """What is to be seen of a node."""

    node: int
    depth: int  # below the root; its children have 1
    salt: str  # children of the root may have one
    tokens: list[int]
    pages: list[int]
    locks: int
    used: int


class RadixTree:
    """Prefixes of whole pages, each stored once. It knows where they lie; who owns the pages is its owner's affair.

    A locked path stays as it is, whatever is inserted or evicted. Its end keeps its number, even when the run there is
    split, or joined with the one above it. Since a lock holds the whole path from the root, what is under an unlocked
    node is unlocked too: all unlocked pages can be evicted.

    A run is split where somebody parts from it, where a lock ends, and where one part was used without the other. Once
    a path is used on which no such reason is left, its runs are joined again.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0  # in the tree
        self.num_locked = 0  # of these, in nodes with a lock
        self._nodes = [Node(parent=GONE, run=[], pages=[], locks=1)]  # nobody evicts the root
        self._unused: list[int] = []  # numbers of nodes that are gone; the next new nodes get them
        self._leaves = EvictionQueue()  # those without a lock
        self._clock = 0

    def __len__(self) -> int:
        """How many nodes there are; the root, which holds nothing, is not counted."""
        return len(self._nodes) - len(self._unused) - 1

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """The longest known prefix in whole pages. Changes nothing: no split, no lock, no time of use."""
        return self._walk(ROOT, in_pages(tokens, self.page_size, salt))

    def cut(self, match: Match) -> int:
        """The node that ends where the match ends. A run that goes on from there is split."""
        if match.inside < len(self._node(match.node).run):
            return self._split(match.node, match.inside)
        return match.node

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "", after: int = ROOT) -> Match:
        """Hold these tokens, which lie in these pages. Returns what the tree held of them already, with the node at
        whose end they are all held now: where it knew a page of tokens, the page given for it is not taken.

        They follow what `after` holds, and the caller has a lock on that path. If the lock is the only one and nothing
        follows yet, the node grows; else the new tokens get a node of their own.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(pages)} pages of {self.page_size} cannot hold just {len(tokens)} tokens")
        if self._node(after).locks == 0:
            raise PageError(f"node {after} is not locked; what is to follow it could be left hanging")
        run = in_pages(tokens, self.page_size, salt if after == ROOT else "")
        known = self._walk(after, run)
        node, count = self.cut(known), len(known.pages)
        if count < len(run):
            node = self._append(node, run[count:], list(pages[count:]), own_locks=int(node == after))
        self._touch(node)
        return Match(node, len(self._nodes[node].run), known.pages)

    def lock(self, node: int) -> None:
        """Hold the path from the root to the end of this node until `unlock`. Every lock counts."""
        self._node(node)
        while node != ROOT:
            one = self._nodes[node]
            if one.locks == 0:
                self.num_locked += len(one.pages)
                self._leaves.discard(node)
            one.locks += 1
            node = one.parent

    def unlock(self, node: int, used: bool = True) -> None:
        """Take one lock off the path. It counts as used now, or not at all."""
        if self._node(node).locks == 0:
            raise PageError(f"node {node} is not locked")
        end = node
        while node != ROOT:
            one = self._nodes[node]
            one.locks -= 1
            if one.locks == 0:
                self.num_locked -= len(one.pages)
            node = one.parent
        if used:
            self._touch(end)
        else:
            self._offer(end)
            if len(children := self._nodes[end].children) == 1:
                self._join(*children.values())

    def evict(self, count: int) -> list[int]:
        """Forget so many pages, or all that are unlocked if they are fewer, and return them. The leaf least recently
        used goes first, from its end; a node whose last child is gone is a leaf."""
        forgotten: list[int] = []
        # region exercise 4.3
        while len(forgotten) < count and self._leaves:
            leaf = self._leaves.oldest()
            node = self._nodes[leaf]
            kept = max(len(node.pages) - (count - len(forgotten)), 0)
            forgotten += node.pages[kept:]
            if kept == 0:
                self._detach(leaf)
            del node.run[kept:], node.pages[kept:]
        # endregion
        self.num_pages -= len(forgotten)
        return forgotten

    def remove(self, node: int) -> list[int]:
        """Forget a node and all that follows it, and return their pages. None of them may be locked."""
        if self._node(node).locks:
            raise PageError(f"node {node} is locked; it cannot be removed")
        doomed = [node]
        for one in doomed:
            doomed += self._nodes[one].children.values()
        forgotten = [page for one in doomed for page in self._nodes[one].pages]
        for one in reversed(doomed):
            self._detach(one)
        self.num_pages -= len(forgotten)
        return forgotten

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to this one."""
        self._node(node)
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]

    def branches(self) -> Iterator[Branch]:
        """Every node but the root, each before those below it."""
        stack = [(child, 1) for child in reversed(self._nodes[ROOT].children.values())]
        while stack:
            number, depth = stack.pop()
            node = self._nodes[number]
            salt, tokens = salt_of(node.run[0], self.page_size), tokens_of(node.run, self.page_size)
            yield Branch(number, depth, salt, tokens, list(node.pages), node.locks, node.used)
            stack += [(child, depth + 1) for child in reversed(node.children.values())]

    def check(self) -> None:
        """Raise PageError unless the arena is a tree and all that is counted adds up."""
        reached = self._reached()
        holes = {number for number, node in enumerate(self._nodes) if node is HOLE}
        if sorted(self._unused) != sorted(holes) or len(reached) + len(holes) != len(self._nodes):
            raise PageError(f"{len(self._nodes)} nodes, {len(reached)} of them in the tree, {len(self._unused)} unused")
        nodes = {number: self._nodes[number] for number in reached if number != ROOT}
        pages = [page for node in nodes.values() for page in node.pages]
        if len(pages) != len(set(pages)):
            raise PageError("a page is in the tree twice")
        locked = sum(len(node.pages) for node in nodes.values() if node.locks)
        if (len(pages), locked) != (self.num_pages, self.num_locked):
            counts = f"{self.num_pages} pages and {self.num_locked} locked ones"
            raise PageError(f"the tree has {len(pages)} pages, {locked} of them locked, and counts {counts}")
        leaves = {(number, node.used) for number, node in nodes.items() if not node.locks and not node.children}
        if leaves != self._leaves.items():
            raise PageError(
                f"unlocked leaves that are not to be evicted, or others that are: {self._leaves.items() ^ leaves}"
            )

    def _reached(self) -> list[int]:
        """All that hangs on the root, every node looked at with its parent."""
        reached = [ROOT]
        for number in reached:
            node = self._nodes[number]
            below = [self._nodes[child] for child in node.children.values()]
            for (first, child), one in zip(node.children.items(), below, strict=True):
                if one.parent != number or not one.run or one.run[0] != first or len(one.run) != len(one.pages):
                    raise PageError(f"node {child} does not hang where node {number} says, or has no pages for its run")
                if any(len(page) != self.page_size * TOKEN_BYTES for page in one.run[number == ROOT :]):
                    raise PageError(f"node {child} holds a page that is not full")
                if number != ROOT and one.used > node.used:
                    raise PageError(f"node {child} was used after node {number} above it")
            if number != ROOT and node.locks < sum(one.locks for one in below):
                raise PageError(f"node {number} has fewer locks than those below it")
            reached += node.children.values()
        return reached

    def _walk(self, after: int, run: list[bytes]) -> Match:
        """Follow a run from the end of a node as far as the tree knows it."""
        node, inside = after, len(self._nodes[after].run)
        pages: list[int] = []
        # region exercise 4.1
        while len(pages) < len(run):
            child = self._nodes[node].children.get(run[len(pages)])
            if child is None:
                break
            node, inside = child, common(self._nodes[child].run, run, len(pages))
            pages += self._nodes[child].pages[:inside]
            if inside < len(self._nodes[child].run):
                break
        # endregion
        return Match(node, inside, pages)

    def _split(self, lower: int, length: int) -> int:
        """Give the first pages of a run to a new node above it, and return that. The lower part keeps the number, for
        the sake of those who have locked it."""
        node = self._nodes[lower]
        # region exercise 4.2
        upper = self._new(Node(node.parent, node.run[:length], node.pages[:length], locks=node.locks, used=node.used))
        self._nodes[node.parent].children[node.run[0]] = upper
        del node.run[:length], node.pages[:length]
        self._nodes[upper].children[node.run[0]] = lower
        node.parent = upper
        # endregion
        return upper

    def _join(self, lower: int) -> bool:
        """Undo a split: put a node and the one above it together, if nothing tells them apart any more. So nothing else
        follows the upper one, no lock ends there, and neither was used without the other."""
        node = self._nodes[lower]
        upper = self._nodes[node.parent]
        if node.parent == ROOT or len(upper.children) > 1 or (upper.locks, upper.used) != (node.locks, node.used):
            return False
        self._nodes[upper.parent].children[upper.run[0]] = lower
        self._drop(node.parent)
        node.parent = upper.parent
        upper.run += node.run  # this way round, for what follows is short where two write on side by side
        upper.pages += node.pages
        node.run, node.pages = upper.run, upper.pages
        return True

    def _append(self, node: int, run: list[bytes], pages: list[int], own_locks: int) -> int:
        """Put a run that nothing begins like behind a node: into it, if nobody else counts on where it ends."""
        end = self._nodes[node]
        self.num_pages += len(pages)
        if node != ROOT and not end.children and end.locks == own_locks:
            self.num_locked += len(pages) * own_locks
            end.run += run
            end.pages += pages
            return node
        child = self._new(Node(node, run, pages))
        end.children[run[0]] = child
        return child

    def _new(self, node: Node) -> int:
        if not self._unused:
            self._nodes.append(node)
            return len(self._nodes) - 1
        number = self._unused.pop()
        self._nodes[number] = node
        return number

    def _detach(self, leaf: int) -> None:
        node = self._nodes[leaf]
        parent = self._nodes[node.parent]
        del parent.children[node.run[0]]
        self._leaves.discard(leaf)
        self._offer(node.parent)
        self._drop(leaf)

    def _drop(self, number: int) -> None:
        self._nodes[number] = HOLE
        self._unused.append(number)

    def _touch(self, node: int) -> None:
        """The path to this node is used now. What of it nothing tells apart any more is joined."""
        self._clock += 1
        end = node
        while node != ROOT:
            one = self._nodes[node]
            one.used = self._clock
            node = one.parent
        self._offer(end)
        while end != ROOT:
            if not self._join(end):
                end = self._nodes[end].parent

    def _offer(self, node: int) -> None:
        one = self._nodes[node]
        if not one.locks and not one.children:
            self._leaves.add(node, one.used)

    def _node(self, node: int) -> Node:
        """A node whose number came from outside."""
        if 0 <= node < len(self._nodes) and self._nodes[node] is not HOLE:
            return self._nodes[node]
        raise PageError(f"node {node} is not in the tree")
