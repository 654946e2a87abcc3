"""Constraints: which tokens a request may draw next, by a grammar, a list of allowed tokens, or a list of bad words.

    text of a grammar -> Grammars.compile -> a matcher for each request -> a bit mask for each step -> the sampler

A grammar is compiled by llguidance (`grammar`), which follows the output token by token. Its mask of the next token is
made on the host while the device runs the model.

A server does not trust the grammars of its clients: there the same Constraint runs in another process, and masks may be
late (`phase6_integration.extras.structured.isolated_grammars`).
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phase0_request.params import GRAMMAR_FAILED, SamplingParams, TokenSet
from phase0_request.queue import WaitHandle
from phase0_request.request import Request
from phase2_prefill_decode.extras.grammar.grammar import Grammars
from phase2_prefill_decode.extras.outcome import Forced

if TYPE_CHECKING:  # the process that follows the grammars of a server needs no torch
    from llguidance import LLExecutor, LLMatcher
    from torch import Tensor

THREADS = 4  # at most, that make masks
NOTHING = np.zeros(1, np.uint32)  # a word of a mask that allows no token


def words(vocab_size: int) -> int:
    """The number of words of a mask: a bit for each token, 32 to a word, the lowest first."""
    return -(-vocab_size // 32)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "masks")


@cache
def _fillers() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(max(1, min(THREADS, (os.cpu_count() or 1) * 4 // 5)))


def fill_by_grammar(matchers: Sequence["LLMatcher | None"], bits: NDArray[np.uint32]) -> None:
    """Fill mask i with what matcher i allows, where there is one, on all cores and without Python's lock."""
    numbered = [(matcher, number) for number, matcher in enumerate(matchers) if matcher is not None]
    if not numbered:
        return
    from llguidance.numpy import fill_next_token_bitmask_par

    fill_next_token_bitmask_par(_fillers(), numbered, bits.view(np.int32))


def _bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint32] | None:
    """The mask of the tokens that may be drawn at any place; None for all."""
    bits = None if params.allowed is None else _allowed(params.allowed, vocab_size)
    never = [word[0] for word in params.bad_words if len(word) == 1]
    if never:
        bits = np.full(words(vocab_size), 0xFFFFFFFF, np.uint32) if bits is None else bits.copy()
        for token in never:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    return bits


@lru_cache(64)
def _allowed(tokens: TokenSet, vocab_size: int) -> NDArray[np.uint32]:
    """The mask of a set of tokens. The completions of a request share it."""
    bits = tokens.bits[: 4 * words(vocab_size)].ljust(4 * words(vocab_size), b"\0")
    return np.frombuffer(bits, "<u4").astype(np.uint32, copy=False)


def is_constrained(params: SamplingParams) -> bool:
    return bool(params.grammar is not None or params.allowed_token_ids is not None or params.bad_words)


class Follower(Protocol):
    """The constraint of one request as a step sees it: a Constraint, or in a server one in another process."""

    output: Sequence[int]  # committed

    @property
    def error(self) -> str | None: ...

    def take(self, index: int, token: int) -> None: ...

    def forced(self, index: int) -> Forced | None: ...


class Constraint:
    """The tokens that one request may draw. It follows the output, including tokens that are drawn and not committed
    yet; if those are discarded, it goes back."""

    def __init__(self, request: Request, vocab_size: int, grammars: Grammars | None) -> None:
        params = request.params
        if params.grammar is not None and grammars is None:
            raise ValueError(f"request {request.id} has a grammar, and this model no tokenizer to follow it")
        self._grammars, self._grammar = grammars, params.grammar
        self.matcher = grammars.compile(params.grammar) if params.grammar is not None and grammars else None
        self._renewed = False
        self.output: Sequence[int] = request.output_tokens  # committed
        self._followed: list[int] = []  # the output as far as the masks know it
        self._allowed = _bits(params, vocab_size)
        self._bad_words: dict[int, list[list[int]]] = {}  # by the token before their last
        for word in params.bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append([*word])
        self._jumps = params.logprobs is None and self._allowed is None and not self._bad_words

    # region exercise 8.4
    def take(self, index: int, token: int) -> None:
        """Follow output token `index`, which was drawn. If that place is committed already, the draw was in vain."""
        if index >= len(self.output) and self._followed[index:] != [token]:
            self._go_back(index)
            self._follow([token])

    def go_to(self, index: int) -> None:
        """Move to where output token `index` is to be drawn."""
        self._go_back(index)
        self._follow(self.output[len(self._followed) : index])
        if len(self._followed) != index:
            raise RuntimeError(f"output token {index} cannot be constrained: {len(self._followed)} are known before it")

    # endregion

    def places(self, index: int, draft: Sequence[int]) -> list[tuple["Constraint", int]]:
        """Where the rows of a slice draw: output token `index`, and one token after each of a draft. There a copy
        follows the draft, so this constraint need not go back when the draft is rejected."""
        self.go_to(index)
        found = [(self, index)]
        for place, token in enumerate(draft, index):
            found.append((found[-1][0]._behind(place, token), place + 1))
        return found

    def _behind(self, index: int, token: int) -> "Constraint":
        """The constraint if output token `index` is this one. It allows nothing where no token would be drawn: after
        a token that is not allowed, or that forces others."""
        there = copy.copy(self)
        there.matcher = None if self.matcher is None else self.matcher.deep_copy()
        there._followed, there._renewed = [*self._followed], True
        there._follow([token])
        if there.error or there.forced(index):
            there.matcher, there._allowed = None, NOTHING
        return there

    # region exercise 8.3
    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Clear the bits of the tokens that the lists exclude."""
        if self._allowed is not None:
            mask &= self._allowed
        for *before, last in self._bad_words.get(self._followed[-1], ()) if self._followed else ():
            if self._followed[-len(before) :] == before:
                mask[last // 32] &= ~np.uint32(1 << last % 32)

    # endregion

    # region exercise 8.6
    def forced(self, index: int) -> Forced | None:
        """The tokens that must follow output token `index`, just drawn. None if there is a choice.

        A request that asks for log-probabilities draws forced tokens one by one: only computing them yields these.
        """
        if self.matcher is None or index + 1 != len(self._followed):
            return None
        if self.matcher.is_error():  # which it takes for the end
            return None
        tokens = self.matcher.compute_ff_tokens() if self._jumps else []
        tokens = tokens[: self.matcher.validate_tokens(tokens)]  # text that spells a control token is not that token
        self._follow(tokens)
        ends = self.matcher.is_stopped()
        return Forced(tuple(tokens), ends) if tokens or ends else None

    # endregion

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further."""
        if self.matcher is None or not self.matcher.is_error():
            return None
        return f"{GRAMMAR_FAILED}: {self.matcher.get_error().splitlines()[0][:200]}"

    def renew(self) -> bool:
        """Follow the output with a new matcher, once: this one may have reached a limit that its copies share.
        Returns False if that does not help."""
        if self._renewed or self._grammars is None or self._grammar is None:
            return False
        self._renewed = True
        self._grammars.forget()
        self.matcher = self._grammars.compile(self._grammar)
        self.matcher.consume_tokens([*self._followed])
        return not self.matcher.is_error()

    # region exercise 8.4
    def _follow(self, tokens: Sequence[int]) -> None:
        self._followed += tokens
        if self.matcher is not None and tokens:
            self.matcher.consume_tokens([*tokens])

    def _go_back(self, index: int) -> None:
        more = len(self._followed) - index
        if more > 0:
            del self._followed[index:]
            if self.matcher is not None:
                self.matcher.rollback(more)

    # endregion


# region exercise 8.5
def fill_masks(rows: Sequence[tuple[Constraint, int]], vocab_size: int) -> NDArray[np.uint32]:
    """The bits of the tokens that each constraint allows at a place of its output: [masks, words]. Of a grammar that
    fails all are 0, so that the row does too."""
    bits = np.full((len(rows), words(vocab_size)), 0xFFFFFFFF, np.uint32)
    for constraint, index in rows:
        constraint.go_to(index)
    fill_by_grammar([constraint.matcher for constraint, _ in rows], bits)
    again = [constraint.matcher if constraint.error and constraint.renew() else None for constraint, _ in rows]
    fill_by_grammar(again, bits)
    for (constraint, _), mask in zip(rows, bits, strict=True):
        if constraint.error is not None:  # its matcher would allow the end of the output
            mask[:] = 0
        constraint.restrict(mask)
    return bits


# endregion


Rows = Sequence[tuple[int, Follower, int, Sequence[int]]]
"""For each slice: the first row of its logits that draws, its constraint, which output token that row draws, and the
draft that the rows behind it verify."""


def in_flight(rows: Rows) -> bool:
    """Whether the step before must end first: it draws a token that one of the masks depends on."""
    return any(index > len(constraint.output) for _, constraint, index, _ in rows)


class Filled(NamedTuple):
    """The masks of a step."""

    bits: "Tensor"  # [masks, words] int32; a slice has one for each row that draws
    late: Mapping[int, WaitHandle] = {}  # by first row of a slice: those that are not ready, and draw nothing


class Constraints:
    """Makes the constraints of requests, and the masks of steps. A server's makes them in another process."""

    def __init__(self, vocab_size: int, grammars: Grammars | None) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars  # None: the model has no tokenizer

    def of(self, request: Request) -> Follower:
        """A request's constraint, at the beginning of its output. ValueError if its grammar is invalid."""
        return Constraint(request, self.vocab_size, self.grammars)

    def start(self, rows: Rows) -> Callable[[], Filled]:
        """Fill the masks in a thread while the caller runs the model. Returns a function that waits for them."""
        return _thread().submit(self.fill, rows).result

    def fill(self, rows: Rows) -> Filled:
        """Fill the masks of a step now."""
        import torch

        places = list[tuple[Constraint, int]]()
        for _, constraint, index, draft in rows:
            assert isinstance(constraint, Constraint)
            places += constraint.places(index, draft)
        return Filled(torch.from_numpy(fill_masks(places, self.vocab_size).view(np.int32)))
