"""The demo: people ask, alike and unlike, of a memory of few pages. No model computes; all else is as in the engine."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phase0_request.batch import Slice
from phase0_request.lab.corpus.generate import load
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase4_radix.lab.draw import counted
from phase4_radix.lab.scenes import SCENES, Ask, Scene
from phase4_radix.prefix_cache import Counts, PrefixCache

CHUNK = 8  # tokens of a prompt computed in a step
UNKNOWN = "That is more than I know."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How large the memory is, and how fast time goes."""

    pages: int = 60
    page_size: int = 4
    steps_per_second: float = 12.0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page-size must be at least 1, got {self.page_size}")
        if self.pages * self.page_size < 128:
            raise ValueError(
                f"pages must be at least {-(-128 // self.page_size)} of {self.page_size} tokens, "
                f"to hold the longest talk; got {self.pages}"
            )
        if not 0 < self.steps_per_second < float("inf"):
            raise ValueError(f"steps-per-second must be above 0 and finite, got {self.steps_per_second}")


@dataclass(slots=True, eq=False)
class Talk:
    """A request, and what is still to be said in answer to it."""

    request: Request
    answer: deque[int]


@dataclass(frozen=True, slots=True)
class Mark:
    """The tree as it was at some moment."""

    pages: dict[int, tuple[int, ...]]  # with their tokens
    nodes: int
    counts: Counts


class World:
    """A cache and those who use it, step by step. Whoever came first is served first; who came last gives way."""

    def __init__(self, setting: Setting) -> None:
        self.tokenizer = Tokenizer.from_pretrained()
        self.cache = PrefixCache(setting.pages, setting.page_size)
        self.waiting: deque[Talk] = deque()
        self.running: list[Talk] = []
        self.steps = self.asked = 0
        self._answers = {question: fact.answer for fact in load().facts for question in fact.questions}
        self.mark()

    def mark(self) -> None:
        """From now on is what `news` and `fresh` tell of."""
        self._marked = Mark(self._in_tree(), len(self.cache.tree), replace(self.cache.counts))

    @property
    def news(self) -> list[str]:
        """What has become of the tree since the mark."""
        marked, counts, nodes = self._marked, self.cache.counts, len(self.cache.tree) - self._marked.nodes
        changes = [
            (abs(nodes), "node", "more" if nodes > 0 else "fewer"),
            (len(self.fresh), "page", "new"),
            (counts.evictions - marked.counts.evictions, "page", "evicted"),
            (counts.duplicates - marked.counts.duplicates, "duplicate", "given back"),
        ]
        return [f"{counted(number, name)} {what}" for number, name, what in changes if number]

    @property
    def fresh(self) -> set[int]:
        """The pages that have come into the tree since the mark, those too that went and came with other tokens."""
        return {page for page, tokens in self._in_tree().items() if self._marked.pages.get(page) != tokens}

    def ask(self, ask: Ask) -> Request:
        *before, last = ask.questions
        said = "".join(f"Q: {question}\nA: {self._answer(question)}\n" for question in before)
        return self.say(f"{ask.instruction}{said}Q: {last}\nA:", f" {ask.answer or self._answer(last)}", ask.salt)

    def say(self, prompt: str, answer: str = "", salt: str = "") -> Request:
        """Put a prompt in the queue. ValueError if it could never fit."""
        tokens, reply = self.tokenizer.encode(prompt), self.tokenizer.encode(answer or f" {self._answer(prompt)}")
        if len(tokens) + len(reply) > self.cache.max_tokens:
            raise ValueError(f"{len(tokens)} tokens and the answer to them do not fit; {self.cache.max_tokens} do")
        self.asked += 1
        request = Request(f"r{self.asked}", tuple(tokens), SamplingParams(max_tokens=len(reply)), cache_salt=salt)
        self.waiting.append(Talk(request, deque(reply)))
        return request

    def step(self) -> bool:
        """Everyone computes a piece, then everyone publishes. False if nobody could compute anything."""
        self._admit()
        pieces = [piece for talk in list(self.running) if (piece := self._piece(talk))]
        batch = [piece for piece in pieces if any(piece.request is talk.request for talk in self.running)]
        for piece in batch:
            piece.request.advance(piece.start, piece.length)
        for piece in batch:
            self.cache.publish(piece.request)
        for talk in self.running:
            if talk.answer and talk.request.computed == talk.request.total:
                talk.request.append(talk.answer.popleft(), float(self.steps))
        self.steps += 1
        return bool(batch)

    def finish(self, talk: Talk) -> None:
        self.running.remove(talk)
        talk.request.finish(FinishReason.LENGTH, float(self.steps))
        self.cache.release(talk.request)

    def _answer(self, question: str) -> str:
        return self._answers.get(question, UNKNOWN)

    def _in_tree(self) -> dict[int, tuple[int, ...]]:
        """The tokens of every page."""
        size = self.cache.page_size
        return {
            page: tuple(branch.tokens[at * size : (at + 1) * size])
            for branch in self.cache.tree.branches()
            for at, page in enumerate(branch.pages)
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

    def _piece(self, talk: Talk) -> Slice | None:
        """What it computes in this step, with room made for it, if need be by those who came last."""
        request = talk.request
        length = min(request.total - request.computed, CHUNK)
        while length and talk in self.running:
            if self.cache.can_grow(request, request.computed + length):
                self.cache.grow(request, request.computed + length)
                return Slice(request, request.computed, length)
            last = self.running.pop()
            last.request.preempt()
            self.cache.release(last.request)
            self.waiting.appendleft(last)
        return None


def play(world: World) -> Iterator[Scene]:
    """Scene after scene, and the scene again after each of its steps."""
    for scene in SCENES:
        world.mark()
        for ask in scene.asks:
            world.ask(ask)
        while world.waiting or world.running:
            world.step()
            yield scene
            for talk in [talk for talk in world.running if not talk.answer]:
                world.finish(talk)
