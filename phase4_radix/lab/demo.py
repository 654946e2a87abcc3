"""`python -m phase4_radix`: a radix tree grows, splits, is locked, and evicts its leaves; `--type` reads prompts."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from phase0_request.lab.viewer import Recording
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.lab.serving import contiguous_runs
from phase4_radix.engine import cached
from phase4_radix.extras.nodes import NodeView, nodes_of
from phase4_radix.prefix_cache import PrefixCache

INSTRUCTION = "You are a helpful assistant."  # of every conversation
ANSWER = 16  # tokens, at most
GLACIER = ("What is a glacier?",)
UNRELATED = tuple((f"How does a {thing} work?",) for thing in ("rainbow", "volcano", "telescope", "compass"))
# Captions, and the conversations that arrive together: questions, and None for the answer that the model gave.
SCENES: tuple[tuple[str, Sequence[Sequence[str | None]]], ...] = (
    ("One request. Its pages enter the tree once they are full and computed.", [("What is a desert?",)]),
    ("Two requests share its prefix. Its node is split where they diverge.", [("What is a comet?",), ("Why?",)]),
    ("The next turn of the first conversation. Its answer is cached, too.", [("What is a desert?", None, "Why?")]),
    ("One prompt three times at once. All compute it; duplicates are freed.", [GLACIER] * 3),
    ("Other prompts need pages. The least recently used leaves are evicted.", UNRELATED),
    ("Again the first prefix. It was used often, so it is still cached.", [("What is a planet?",)]),
)


class TreeDemo:
    """Phase 4's engine over a small cache, on the bundled model."""

    def __init__(self, pages: int, page_size: int = 4) -> None:
        from phase2_prefill_decode.model import (
            Model,  # torch and numba load here, after the options were checked
        )

        self.model = Model.load(progress=True)
        assert self.model.tokenizer is not None
        self.tokenizer = self.model.tokenizer
        self.engine = cached(self.model, num_pages=pages, page_size=page_size)
        cache = self.engine.core.scheduler.cache
        assert isinstance(cache, PrefixCache)
        self.cache = cache
        self.recording = Recording()
        self._answers: dict[tuple[str | None, ...], str] = {}
        self._asked = 0

    def ask(self, *conversations: Sequence[str | None], salt: str = "") -> list[Request]:
        """Submit conversations together, and compute their prompts. ValueError if one does not fit into the cache."""
        requests, self.recording = [], Recording()
        for seed, said in enumerate(conversations):
            texts = [self._answers.get(tuple(said[:n]), "") if text is None else text for n, text in enumerate(said)]
            roles = ("user", "assistant")
            messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
            prompt = self.tokenizer.chat([{"role": "system", "content": INSTRUCTION}, *messages])
            self._asked += 1
            params = SamplingParams(max_tokens=ANSWER, temperature=min(seed, 1), seed=seed)
            requests.append(Request(f"r{self._asked}", tuple(prompt), params, cache_salt=salt))
            self.engine.core.submit(requests[-1])
        while not all(request.output_tokens for request in requests):
            self._step()
        return requests

    def finish(self, requests: Iterable[Request], *conversations: Sequence[str | None]) -> None:
        """Decode to the ends, and remember the answers: they may be part of a later conversation."""
        while self.engine.core.has_work:
            self._step()
        for request, said in zip(requests, conversations, strict=False):
            self._answers.setdefault(tuple(said), self.tokenizer.decode(request.output_tokens))

    def show(self, console: Console, caption: str) -> None:
        usage, counts = self.cache.usage, self.cache.counts
        self.recording.show(console, caption)
        console.print(
            f"{counts.hit_tokens} of {counts.query_tokens} prompt tokens were found\n"
            f"pages: {usage.referenced} in use, {usage.cached} cached, {usage.free} free; "
            f"{counts.duplicates} duplicates and {counts.evictions} evicted so far"
        )
        console.print(self.tree(), "", sep="\n")

    def tree(self) -> Tree:
        """The tree, a line for each node with its pages, its locks and its text."""
        tree = self.cache.tree
        head = f"{tree.num_pages} pages in {len(tree)} node{'s' * (len(tree) != 1)}, {tree.num_locked} locked"
        path = [Tree(Text(head, "bold"), guide_style="dim")]
        for node in nodes_of(tree):  # parents before children
            del path[node.depth :]
            path.append(path[-1].add(self._describe(node)))
        return path[0]

    def _step(self) -> None:
        step = self.engine.core.step()
        if step is not None:
            self.recording.add(step)

    def _describe(self, node: NodeView) -> Text:
        pages = " ".join(
            f"{first}-{first + n - 1}" if n > 1 else f"{first}" for first, n in contiguous_runs(node.pages)
        )
        locks = f"{node.ref_count} lock{'s' * (node.ref_count > 1)} " if node.ref_count else ""
        salt = f"[{node.salt}] " if node.salt else ""
        text = self.tokenizer.decode(node.tokens).replace("\n", "\u21b5")
        parts = ((f"pages {pages} ", "dim"), (locks, "green"), (salt, "magenta"))
        style = "green" if node.ref_count else "default"
        return Text.assemble(*parts, (text, style), no_wrap=True, overflow="ellipsis")


def typed() -> Iterator[str]:
    """Lines of the standard input, with a prompt on a terminal."""
    while line := (input("> ") if sys.stdin.isatty() else sys.stdin.readline()).strip():
        yield line


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase4_radix", description=__doc__)
    p.add_argument("--type", action="store_true", help="read questions, one a line, until an empty one")
    p.add_argument("--pages", type=int, default=48, help="of four tokens, in the cache (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    try:
        demo = TreeDemo(options.pages)
        scenes = ((line, [(line,)]) for line in typed()) if options.type else iter(SCENES)
        for caption, conversations in scenes:
            requests = demo.ask(*conversations)
            demo.show(console, caption)
            demo.finish(requests, *conversations)
    except ValueError as error:
        p.error(str(error))
    return 0
