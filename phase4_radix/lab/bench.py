"""`python -m phase4_radix.lab bench`: what the prefix cache costs on the host.

Matching: tokens per second that are looked up and inserted, by the size of the tree. Evicting: microseconds per page,
by the number of leaves. Decoding: microseconds per running request and step, in a plain cache and in a prefix cache.
"""

import random
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from phase0_request.batch import Slice
from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import RadixTree

PAGE = 16
NODES = (1_000, 10_000, 100_000)
LEAVES = (1_000, 10_000, 100_000)
PAGES_EACH = (1, 8)
PREFIXES = 200  # that prompts share, each of so many pages
PREFIX_PAGES = 16
VOCABULARY = 50_000
PROMPTS = 25  # in a timed round
EVICTED = 50  # pages in a timed round
RUNNING = 256
STEPS = 64
ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Matching:
    """Million tokens per second, matched and inserted, by the number of nodes. Half of each prompt is new."""

    nodes: int
    pages: int
    match_and_insert: float


@dataclass(frozen=True, slots=True)
class Evicting:
    """Microseconds per page, evicted one at a time from a tree with this many leaves under a tenth as many nodes."""

    leaves: int
    pages_each: int
    oldest_first: float  # leaves used in the order of insertion
    any_first: float  # leaves used in random order: random memory accesses


@dataclass(frozen=True, slots=True)
class Decoding:
    """Microseconds per running request and step: grow, slots, publish."""

    running: int
    plain: float
    sharing: float


class Prompts:
    """Prompts with shared prefixes: a part of one of a few prefixes, then as many tokens of their own."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._pages = 0
        self._prefixes = [self._tokens(PREFIX_PAGES) for _ in range(PREFIXES)]

    def one(self, own: int | None = None) -> list[int]:
        pages = self._rng.randint(1, PREFIX_PAGES)
        return self._rng.choice(self._prefixes)[: pages * PAGE] + self._tokens(own or pages)

    def insert(self, tree: RadixTree, prompt: list[int]) -> None:
        """Insert a prompt, in new pages."""
        first, self._pages = self._pages, self._pages + len(prompt) // PAGE
        tree.insert(prompt, range(first, self._pages))

    def _tokens(self, pages: int) -> list[int]:
        return self._rng.choices(range(VOCABULARY), k=pages * PAGE)


def matching(nodes: int) -> Matching:
    """The best of the rounds. A round adds about two nodes per prompt."""
    tree, prompts = RadixTree(PAGE), Prompts()
    while len(tree) < nodes:
        prompts.insert(tree, prompts.one(own=4))
    pages, best = tree.num_pages, 0.0
    for _ in range(ROUNDS):
        batch = [prompts.one() for _ in range(PROMPTS)]
        for prompt in batch:
            tree.match(prompt)  # half of it is found; the tree is in the CPU's cache then
        start = time.perf_counter()
        for prompt in batch:
            tree.match(prompt)
            prompts.insert(tree, prompt)
        best = max(best, sum(map(len, batch)) / (time.perf_counter() - start) / 1e6)
    return Matching(nodes, pages, best)


def evicting(leaves: int, pages_each: int) -> Evicting:
    """The best of the rounds. After each, as many leaves are added as were evicted."""

    def leaf(number: int) -> None:
        above, first = number % (leaves // 10), number * (pages_each + 1)
        own = [number] * (PAGE * pages_each)
        tree.insert([above] * PAGE + own, range(first, first + pages_each + 1))

    rng, rounds = random.Random(0), []
    for used in (range(leaves), rng.sample(range(leaves), leaves)):
        tree, best = RadixTree(PAGE), float("inf")
        for number in (*range(leaves), *used):
            leaf(number)
        for number in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(EVICTED * pages_each):
                tree.evict(1)
            best = min(best, (time.perf_counter() - start) / (EVICTED * pages_each) * 1e6)
            for new in range(EVICTED):
                leaf(leaves + number * EVICTED + new)
        rounds.append(best)
    return Evicting(leaves, pages_each, *rounds)


def decoding(running: int, rounds: int = 5) -> Decoding:
    """The best of the rounds, alternating between the caches. All requests share a prompt; their answers differ."""
    best = {PagedCache: float("inf"), PrefixCache: float("inf")}
    for _ in range(rounds):
        for kind in best:
            cache = kind(running * (STEPS // PAGE + 5), PAGE)
            requests = [_prompted(cache, number) for number in range(running)]
            spent = 0.0
            for _ in range(STEPS):
                for request in requests:
                    request.append(request.total, 0.0)
                start = time.perf_counter()
                for request in requests:
                    step = Slice(request, request.computed, 1)
                    cache.grow(request, step.stop)
                    cache.slots(step)
                spent += time.perf_counter() - start
                for request in requests:
                    request.advance(request.computed, 1)
                start = time.perf_counter()
                for request in requests:
                    cache.publish(request)
                spent += time.perf_counter() - start
            best[kind] = min(best[kind], spent / STEPS / running * 1e6)
    return Decoding(running, best[PagedCache], best[PrefixCache])


def _prompted(cache: PagedCache, number: int) -> Request:
    request = Request(f"r{number}", (*range(4 * PAGE), number), SamplingParams(max_tokens=STEPS))
    request.admit(0.0)
    cached = cache.attach(request)
    if cached:
        request.advance(0, cached)
    cache.grow(request, request.total)
    request.advance(cached, request.total - cached)
    cache.publish(request)
    return request


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase4_radix.lab bench", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    match = [matching(nodes) for nodes in track(NODES, "matching", console=console, transient=True)]
    pairs = [(leaves, each) for each in PAGES_EACH for leaves in LEAVES]
    evict = [evicting(*pair) for pair in track(pairs, "evicting", console=console, transient=True)]
    decode = decoding(RUNNING)
    matched = f"Matching: million tokens a second, pages of {PAGE}, prompts half new"
    evicted = "Evicting: microseconds a page"
    decoded = "Decoding: microseconds a running request a step: grow, slots, publish"
    figures = {
        "matching": section(console, matched, {f"nodes_{m.nodes}": m for m in match}, digits=2),
        "evicting": section(console, evicted, {f"leaves_{e.leaves}_pages_{e.pages_each}": e for e in evict}, digits=2),
        "decoding": section(console, decoded, {f"running_{decode.running}": decode}, digits=2),
    }
    finish(p, options, arguments, figures)
    return 0
