"""Replays a trace of prompts and answers through a prefix cache, without a model: hit rates by cache size."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase4_radix.prefix_cache import PrefixCache

VOCABULARY = 50_000
CHAT_PAGES = (192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
GROUP_PAGES = (40, 56, 72, 88, 104, 112, 120, 128, 136, 152)


class Turn(NamedTuple):
    """One request with its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Concurrent multi-turn chats. Each request repeats the whole conversation so far; after its last turn the
    user starts a new conversation.

    Every conversation starts with one of a few instructions. Lengths are uniform around their means, and each request
    comes from a random user.
    """

    people: int = 16
    requests: int = 1000
    instructions: int = 4
    instruction: int = 256  # tokens of each
    question: int = 32  # tokens, on average
    answer: int = 96  # tokens, on average
    turns: int = 6  # of a conversation, on average

    def turns_in_order(self, seed: int = 0) -> Iterator[Turn]:
        rng = random.Random(seed)
        instructions = [_tokens(rng, self.instruction) for _ in range(self.instructions)]
        said: list[tuple[int, ...]] = [()] * self.people
        left = [0] * self.people
        for _ in range(self.requests):
            person = rng.randrange(self.people)
            if left[person] == 0:
                said[person], left[person] = rng.choice(instructions), rng.randint(1, 2 * self.turns - 1)
            turn = Turn(said[person] + _tokens(rng, _about(rng, self.question)), _tokens(rng, _about(rng, self.answer)))
            said[person], left[person] = turn.prompt + turn.answer, left[person] - 1
            yield turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Requests of a few groups. All requests of a group share a prefix and have a suffix of their own."""

    groups: int = 4
    requests: int = 400
    common: int = 512  # tokens
    own: int = 32
    in_turn: bool = True  # round robin; otherwise at random

    def turns_in_order(self, seed: int = 0) -> Iterator[Turn]:
        rng = random.Random(seed)
        common = [_tokens(rng, self.common) for _ in range(self.groups)]
        for number in range(self.requests):
            group = number % self.groups if self.in_turn else rng.randrange(self.groups)
            yield Turn(common[group] + _tokens(rng, self.own), _tokens(rng, 1))


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after one request: its hits, and the cache's pages."""

    prompt: int  # tokens
    found: int  # of these, tokens found in the cache
    evicted: int  # pages, to make room for it
    cached: int  # pages
    free: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The totals of a replay through a cache of this many pages."""

    pages: int
    hit_rate: float
    evictions: int  # pages


def play(turns: Iterable[Turn], cache: PrefixCache) -> Iterator[Moment]:
    """Replay the requests one after the other, with the cache calls of every step of an engine."""
    for number, turn in enumerate(turns):
        before = cache.counts.evictions
        request = Request(f"r{number}", turn.prompt, SamplingParams(max_tokens=len(turn.answer)))
        request.admit(0.0)
        found = cache.attach(request)
        if found:
            request.advance(0, found)
        for token in turn.answer:
            cache.grow(request, request.total)
            request.advance(request.computed, request.total - request.computed)
            cache.publish(request)
            request.append(token, 0.0)
        request.finish(FinishReason.LENGTH, 0.0)
        cache.release(request)
        usage = cache.usage
        yield Moment(len(turn.prompt), found, cache.counts.evictions - before, usage.cached, usage.free)


def outcome(turns: Iterable[Turn], pages: int, page_size: int = 16) -> Outcome:
    """Replay all requests and return the totals."""
    cache = PrefixCache(pages, page_size)
    for _ in play(turns, cache):
        pass
    return Outcome(pages, cache.counts.hit_rate, cache.counts.evictions)


def chats(people: int, sizes: Sequence[int] = CHAT_PAGES) -> list[Outcome]:
    """One chat trace, replayed through caches of several sizes."""
    turns = list(Chats(people=people).turns_in_order())
    return [outcome(turns, pages) for pages in sizes]


def pressure(in_turn: bool, sizes: Sequence[int] = GROUP_PAGES) -> list[Outcome]:
    """One trace of four groups, replayed through caches most of which are too small for the four prefixes."""
    turns = list(Groups(in_turn=in_turn).turns_in_order())
    return [outcome(turns, pages) for pages in sizes]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCABULARY), k=count))


def _about(rng: random.Random, mean: int) -> int:
    return rng.randint(mean // 2, mean + mean // 2)
