"""The demo's engine: requests with and without common prefixes, over a small cache. Answers come from the corpus, not
from a model; queue, cache and preemption work as in the engine."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phase0_request.batch import Slice
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase4_radix.lab.draw import counted
from phase4_radix.lab.scenes import ANSWERS, SCENES, Ask, Scene
from phase4_radix.prefix_cache import Counts, PrefixCache

CHUNK = 8  # tokens of a prompt computed in a step
UNKNOWN = "That is more than I know."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The size of the cache, and the speed of the demo."""

    pages: int = 60
    page_size: int = 4
    steps_per_second: float = 12.0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page-size must be at least 1, got {self.page_size}")
        if self.pages * self.page_size < 128:
            raise ValueError(
                f"pages must be at least {-(-128 // self.page_size)} of {self.page_size} tokens, "
                f"to hold the longest conversation; got {self.pages}"
            )
        if not 0 < self.steps_per_second < float("inf"):
            raise ValueError(f"steps-per-second must be above 0 and finite, got {self.steps_per_second}")


@dataclass(slots=True, eq=False)
class Running:
    """A request, and the tokens of its answer that it has not produced yet."""

    request: Request
    answer: deque[int]


@dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot of the tree, to compare with later."""

    pages: dict[int, tuple[int, ...]]  # each with its tokens
    nodes: int
    counts: Counts


class World:
    """A prefix cache and its requests, step by step. First come, first served; the last admitted is preempted first."""

    def __init__(self, setting: Setting) -> None:
        self.tokenizer = Tokenizer.from_pretrained()
        self.cache = PrefixCache(setting.pages, setting.page_size)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.steps = self.asked = 0
        self._answers = ANSWERS
        self.mark()

    def mark(self) -> None:
        """Take the snapshot that `news` and `fresh` compare with."""
        self._marked = Mark(self._in_tree(), len(self.cache.tree), replace(self.cache.counts))

    @property
    def news(self) -> list[str]:
        """What changed in the tree since the mark."""
        marked, counts, nodes = self._marked, self.cache.counts, len(self.cache.tree) - self._marked.nodes
        changes = [
            (abs(nodes), "node", "more" if nodes > 0 else "fewer"),
            (len(self.fresh), "page", "new"),
            (counts.evictions - marked.counts.evictions, "page", "evicted"),
            (counts.duplicates - marked.counts.duplicates, "duplicate", "freed"),
        ]
        return [f"{counted(number, name)} {what}" for number, name, what in changes if number]

    @property
    def fresh(self) -> set[int]:
        """Pages that entered the tree since the mark, or hold other tokens now."""
        return {page for page, tokens in self._in_tree().items() if self._marked.pages.get(page) != tokens}

    def ask(self, ask: Ask) -> Request:
        *before, last = ask.questions
        said = "".join(f"Q: {question}\nA: {self._answer(question)}\n" for question in before)
        return self.say(f"{ask.instruction}{said}Q: {last}\nA:", f" {ask.answer or self._answer(last)}", ask.salt)

    def say(self, prompt: str, answer: str = "", salt: str = "") -> Request:
        """Add a prompt to the waiting queue. ValueError if it does not fit into the cache."""
        tokens, reply = self.tokenizer.encode(prompt), self.tokenizer.encode(answer or f" {self._answer(prompt)}")
        if len(tokens) + len(reply) > self.cache.max_tokens:
            raise ValueError(f"{len(tokens)} tokens and their answer do not fit into {self.cache.max_tokens}")
        self.asked += 1
        request = Request(f"r{self.asked}", tuple(tokens), SamplingParams(max_tokens=len(reply)), cache_salt=salt)
        self.waiting.append(Running(request, deque(reply)))
        return request

    def step(self) -> bool:
        """Run one step: every running request computes a chunk, then publishes. Returns whether any did."""
        self._admit()
        pieces = [piece for each in list(self.running) if (piece := self._piece(each))]
        batch = [piece for piece in pieces if any(piece.request is each.request for each in self.running)]
        for piece in batch:
            piece.request.advance(piece.start, piece.length)
        for piece in batch:
            self.cache.publish(piece.request)
        for each in self.running:
            if each.answer and each.request.computed == each.request.total:
                each.request.append(each.answer.popleft(), float(self.steps))
        self.steps += 1
        return bool(batch)

    def finish(self, each: Running) -> None:
        self.running.remove(each)
        each.request.finish(FinishReason.LENGTH, float(self.steps))
        self.cache.release(each.request)

    def _answer(self, question: str) -> str:
        return self._answers.get(question, UNKNOWN)

    def _in_tree(self) -> dict[int, tuple[int, ...]]:
        """The tokens of every page in the tree."""
        size = self.cache.page_size
        return {
            page: tuple(node.tokens[at * size : (at + 1) * size])
            for node in self.cache.tree.nodes()
            for at, page in enumerate(node.pages)
        }

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0].request
            found = self.cache.attach(request)
            if not self.cache.can_grow(request, min(found + CHUNK, request.total)):
                self.cache.release(request)
                return
            request.admit(float(self.steps))
            if found:
                request.advance(0, found)
            self.running.append(self.waiting.popleft())

    def _piece(self, each: Running) -> Slice | None:
        """The slice that the request computes in this step. If pages are missing, the last admitted are preempted."""
        request = each.request
        length = min(request.total - request.computed, CHUNK)
        while length and each in self.running:
            if self.cache.can_grow(request, request.computed + length):
                self.cache.grow(request, request.computed + length)
                return Slice(request, request.computed, length)
            last = self.running.pop()
            last.request.preempt()
            self.cache.release(last.request)
            self.waiting.appendleft(last)
        return None


def play(world: World) -> Iterator[Scene]:
    """Play the scenes in order, and yield the current one after each step."""
    for scene in SCENES:
        world.mark()
        for ask in scene.asks:
            world.ask(ask)
        while world.waiting or world.running:
            world.step()
            yield scene
            for each in [each for each in world.running if not each.answer]:
                world.finish(each)
