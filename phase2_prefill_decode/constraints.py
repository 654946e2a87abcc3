"""Constraints: which tokens a request may draw next, by a grammar, a list of allowed tokens, or a list of bad words.

    text of a grammar -> Grammars.compile -> a matcher for each request -> a bit mask for each step -> the sampler

A grammar is compiled by llguidance, which follows the output token by token. Its mask of the next token is made on the
host while the device runs the model. llguidance is imported at the first grammar: all else works without it.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.batch import Forced
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.token_set import TokenSet
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.kernels.mask import words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT = 128  # compiled grammars


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the latest. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()
        self._compiler = ThreadPoolExecutor(1, "grammar")

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokens as llguidance needs them: a second's work for a large vocabulary, at the first grammar."""
        from phase0_request.grammar import vocabulary

        return vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)

    def compile(self, grammar: str) -> "LLMatcher":
        """A matcher at the beginning of a grammar. ValueError if that is none."""
        return self.prepare(grammar).result().deep_copy()

    def prepare(self, grammar: str) -> "Future[LLMatcher]":
        """Have a grammar compiled in a thread, unless it is: what `compile` takes later, it finds."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return compiled

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        from phase0_request.grammar import LIMITS

        compiled = LLMatcher(self.vocabulary, grammar, limits=LIMITS, log_level=0)
        if compiled.is_error():
            raise ValueError(f"the grammar cannot be used: {compiled.get_error()}")
        return compiled


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "masks")


@cache
def _fillers() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


def fill_by_grammar(matchers: list[tuple["LLMatcher", int]], bits: NDArray[np.uint32]) -> None:
    """Fill the masks of these numbers with what each matcher allows, on all cores and without Python's lock."""
    if not matchers:
        return
    from llguidance.numpy import fill_next_token_bitmask_par

    fill_next_token_bitmask_par(_fillers(), matchers, bits.view(np.int32))


def _bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint32] | None:
    """The mask of the tokens that may be drawn wherever they come. None: all."""
    bits = None if params.allowed is None else _allowed(params.allowed, vocab_size)
    never = [word[0] for word in params.bad_words if len(word) == 1]
    if never:
        bits = np.full(words(vocab_size), 0xFFFFFFFF, np.uint32) if bits is None else bits.copy()
        for token in never:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    return bits


@lru_cache(64)
def _allowed(tokens: TokenSet, vocab_size: int) -> NDArray[np.uint32]:
    """The mask of a set: the completions of a request share it."""
    bits = tokens.bits[: 4 * words(vocab_size)].ljust(4 * words(vocab_size), b"\0")
    return np.frombuffer(bits, "<u4").astype(np.uint32, copy=False)


def is_constrained(params: SamplingParams) -> bool:
    return bool(params.grammar is not None or params.allowed_token_ids is not None or params.bad_words)


class Constraint:
    """What one request may draw. It follows the output, also tokens that are drawn and not committed yet; if those are
    discarded, it goes back."""

    def __init__(self, request: Request, vocab_size: int, grammars: Grammars | None) -> None:
        params = request.params
        if params.grammar is not None and grammars is None:
            raise ValueError(f"request {request.id} has a grammar, and this model no tokenizer to follow it")
        self.matcher = grammars.compile(params.grammar) if params.grammar is not None and grammars else None
        self.output: Sequence[int] = request.output_tokens  # committed
        self._followed: list[int] = []  # the output as far as the masks know it
        self._allowed = _bits(params, vocab_size)
        self._bad_words: dict[int, list[list[int]]] = {}  # by the token before their last
        for word in params.bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append([*word])
        self._jumps = params.logprobs is None and self._allowed is None and not self._bad_words

    # region exercise 2.20
    def take(self, index: int, token: int) -> None:
        """Follow output token `index`, which was drawn. If another one is there already, it was drawn in vain."""
        if index >= len(self.output) and self._followed[index:] != [token]:
            self._go_back(index)
            self._follow([token])

    def go_to(self, index: int) -> None:
        """Be where output token `index` is to be drawn."""
        self._go_back(index)
        self._follow(self.output[len(self._followed) : index])
        if len(self._followed) != index:
            raise RuntimeError(f"output token {index} cannot be constrained: {len(self._followed)} are known before it")

    # endregion

    # region exercise 2.21
    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Clear the bits of what the lists exclude."""
        if self._allowed is not None:
            mask &= self._allowed
        for *before, last in self._bad_words.get(self._followed[-1], ()) if self._followed else ():
            if self._followed[-len(before) :] == before:
                mask[last // 32] &= ~np.uint32(1 << last % 32)

    # endregion

    # region exercise 2.20
    def forced(self, index: int) -> Forced | None:
        """What follows output token `index`, just drawn, in any case. None if there is a choice.

        A request that asks for log-probabilities draws forced tokens one by one: only computing them yields these.
        """
        if self.matcher is None or index + 1 != len(self._followed):
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
        return f"its grammar cannot be followed any further: {self.matcher.get_error().splitlines()[0][:200]}"

    # region exercise 2.20
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


@dataclass(frozen=True, slots=True)
class Masks:
    """The constrained rows of a step, and the masks of their next tokens."""

    rows: Sequence[tuple[int, Constraint, int]]  # row, its constraint, which output token it draws
    numbers: Tensor  # [all rows] int64: of each row's mask, -1 for none
    vocab_size: int

    # region exercise 2.21
    @property
    def in_flight(self) -> bool:
        """Whether the step before must end first: it draws a token that one of the masks depends on."""
        return any(index > len(constraint.output) for _, constraint, index in self.rows)

    # endregion

    def start(self) -> "Future[Tensor]":
        """Fill them in a thread, while this one has the model run."""
        return _thread().submit(self.fill)

    # region exercise 2.21
    def fill(self) -> Tensor:
        """The bits: [masks, words] int32. Of a grammar that fails all are 0, so that the row does too."""
        bits = np.full((len(self.rows), words(self.vocab_size)), 0xFFFFFFFF, np.uint32)
        matchers = []
        for number, (_, constraint, index) in enumerate(self.rows):
            constraint.go_to(index)
            if constraint.matcher is not None:
                matchers.append((constraint.matcher, number))
        fill_by_grammar(matchers, bits)
        for matcher, number in matchers:
            if matcher.is_error():  # it would allow the end of the output
                bits[number] = 0
        for (_, constraint, _), mask in zip(self.rows, bits, strict=True):
            constraint.restrict(mask)
        return torch.from_numpy(bits.view(np.int32))

    # endregion
