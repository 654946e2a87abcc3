"""Invariants of a cache and its tree, checked between two calls. Slow; for tests and for `--check-invariants`."""

from collections import Counter
from collections.abc import Iterator, Set
from copy import deepcopy

from phase1_kv_pool.allocator import PageError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.checkpoints import Checkpoints
from phase1_kv_pool.extras.invariants import check_counts, check_windows
from phase1_kv_pool.extras.windows import WindowedCache
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.extras.nodes import nodes_of, path_to
from phase4_radix.extras.windows import WindowedPrefixCache
from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import FREE, ROOT, RadixTree


def check_cache(cache: PagedCache) -> None:
    """Raise PageError unless every page's reference count equals the tables that name it, plus one if the tree holds
    it, and every node's reference count equals the requests that have locked it. Of layers with windows, also what
    `check_windows` says."""
    if isinstance(cache, WindowedCache):
        unheld = {page for page, _ in cache.unheld.items()} if isinstance(cache, WindowedPrefixCache) else set[int]()
        check_windows(cache, unheld)
    if not isinstance(cache, PrefixCache):
        check_counts(cache)
        return
    check_tree(cache.tree)
    nodes = {view.node: view for view in nodes_of(cache.tree)}
    cached = {page for view in nodes.values() for page in view.pages}
    check_counts(cache, cached)
    if isinstance(cache, WindowedPrefixCache) and not cached.issuperset([*cache.times, *cache.reused]):
        raise PageError(f"windowed pages are cached of {cache.times.keys() | cache.reused}, and the tree has {cached}")
    if isinstance(cache, CheckpointedPrefixCache):
        _check_checkpoints(cache.checkpoints, cached)
    locks = Counter[int]()
    for name, handle in cache.handles.items():
        path, table = path_to(cache.tree, handle.node), cache.tables[name]
        locks.update(path)
        if table[: handle.published] != [page for node in path for page in nodes[node].pages]:
            raise PageError(f"request {name} has locked other pages than those its table begins with")
        if not cached.isdisjoint(table[handle.published :]):
            raise PageError(f"request {name} has a page that is not published, and is in the tree")
    for view in nodes.values():
        if view.ref_count != locks[view.node]:
            raise PageError(f"node {view.node} has {view.ref_count} references, from {locks[view.node]} requests")


def _check_checkpoints(checkpoints: Checkpoints, cached: Set[int]) -> None:
    """Raise PageError unless each slot is free, of one cached page, or taken by one request."""
    of_pages, taken = (checkpoints.kept, checkpoints.passed), checkpoints.taken.values()
    slots = [*checkpoints.free, *(slot for each in (*of_pages, *taken) for slot in each.values())]
    if sorted(slots) != [*range(checkpoints.num_slots)]:
        raise PageError(f"{checkpoints.num_slots} slots for checkpoints, and these are accounted for: {sorted(slots)}")
    if wrong := {page for each in of_pages for page in each} - cached:
        raise PageError(f"pages {wrong} have checkpoints, and are not in the tree")


def check_tree(tree: RadixTree) -> None:
    """Raise PageError unless the arena is a tree and all counters are right."""
    for problem in _problems(tree):
        raise PageError(problem)


def _problems(tree: RadixTree) -> Iterator[str]:
    reached = [ROOT]
    for number in reached:
        node = tree.nodes[number]
        reached += node.children.values()
        if number != ROOT and node.ref_count < sum(tree.nodes[child].ref_count for child in node.children.values()):
            yield f"node {number} has fewer references than its children"
        for first, index in node.children.items():
            child = tree.nodes[index]
            if child.parent != number or child.key[:1] != [first]:
                yield f"node {index} is not the child that node {number} says it is"
            if len(child.key) != len(child.pages):
                yield f"node {index} has {len(child.pages)} pages for a key of {len(child.key)}"
            if number != ROOT and child.last_used > node.last_used:
                yield f"node {index} was used after its parent {number}"
    free = [number for number, node in enumerate(tree.nodes) if node is FREE]
    if sorted(tree.free) != free or len(reached) + len(free) != len(tree.nodes):
        yield f"{len(tree.nodes)} nodes, {len(reached)} of them in the tree, {len(tree.free)} free"
    nodes = {number: tree.nodes[number] for number in reached[1:]}
    pages = [page for node in nodes.values() for page in node.pages]
    if len(pages) != len(set(pages)):
        yield "a page is in the tree twice"
    locked = sum(len(node.pages) for node in nodes.values() if node.ref_count)
    if (has := (len(pages), locked)) != (counts := (tree.num_pages, tree.num_locked)):
        yield "the tree has {} pages, {} of them locked, and counts {} pages, {} locked".format(*has, *counts)
    leaves = {(number, node.last_used) for number, node in nodes.items() if not (node.ref_count or node.children)}
    if wrong := tree.leaves.items() ^ leaves:
        yield f"unlocked leaves and the eviction queue differ in (node, last use): {sorted(wrong)}"
    elif leaves and (oldest := deepcopy(tree.leaves).oldest()) != min(leaves, key=lambda leaf: leaf[1])[0]:
        yield f"node {oldest} is evicted next, and is not the least recently used leaf"
