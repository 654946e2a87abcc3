"""Chunker: who gets how much of a step. Integers only; one rule for a fixed set of requests and for a scheduler."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase3_chunked_prefill.budget import TokenBudget

T = TypeVar("T", bound=Hashable)


def cut(start: int, pending: int, room: int, page_size: int) -> int:
    """How many of `pending` tokens from position `start` on to compute when there is room for so many.

    All of them if they fit. What must be cut is cut at a page border, where its last page is full and can be shared,
    unless that would leave nothing.
    """
    # region exercise 3.1
    length = min(pending, room)
    if length < pending:
        border = (start + length) // page_size * page_size
        if border > start:
            length = border - start
    return length
    # endregion


@dataclass(slots=True)
class Share:
    """What a step has to give: `decodes` requests their one token, and `left` tokens to prompts.

    Ask `offer` for each prompt in order, and `take` what is used of it.
    """

    budget: TokenBudget
    page_size: int
    decodes: int
    left: int
    kept: int  # of those left, for short prompts alone; below 0 once these have had more

    def offer(self, start: int, pending: int) -> int:
        """How many of its `pending` tokens a prompt may compute now, from position `start` on; it may be none."""
        # region exercise 3.2
        room = min(self.left, self.budget.max_chunk_size)
        if self.is_long(pending):
            room = min(room, self.left - self.kept)
        # endregion
        return cut(start, pending, room, self.page_size)

    def take(self, pending: int, length: int) -> None:
        """A prompt with so many tokens pending computes `length` of them."""
        self.left -= length
        if not self.is_long(pending):
            self.kept -= length

    def is_long(self, pending: int) -> bool:
        return pending > self.budget.max_chunk_size


class Chunker:
    """Splits every step between decodes and prompts, and among each of them.

    A request with one token to compute is a decode, with more a prompt: one that is new, that is half done, or that
    comes back from a preemption. A prompt is long while it needs more than one chunk (`max_chunk_size`), else short.

    - Decodes come first. While there are prompts, decodes leave them `budget.prompt_floor` tokens of the step.
    - If not all decodes fit, those who wait longest run: of n with room for k, each runs once in ceil(n / k) steps.
    - What decodes leave goes to prompts in order, each at most a chunk. Long ones leave to short ones what these can
      use, up to half: a long prompt does not stop short ones behind it, and they cannot have the half that is its.

    So in every step some decode moves on, the first prompt, and the first short one, and whoever is before a prompt
    ends one day: nobody starves. (A single token that is left to prompts goes to the first of them, long or short.)
    """

    def __init__(self, budget: TokenBudget, page_size: int = 1) -> None:
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size must be an integer from 1, got {page_size!r}")
        self.budget = budget
        self.page_size = page_size
        self._left_out: list[Hashable] = []  # the decodes that did not run in the last step, who waits longest first

    def begin(self, decodes: int, prompts: Iterable[int]) -> Share:
        """The share of a step with so many decodes and with prompts of so many pending tokens each."""
        budget = self.budget
        pending = list(prompts)
        room = budget.max_batched_tokens - (budget.prompt_floor if pending else 0)
        running = min(decodes, room)
        left = budget.max_batched_tokens - running
        short = sum(n for n in pending if n <= budget.max_chunk_size)
        return Share(budget, self.page_size, running, left, min(short, left // 2))

    def turns(self, decodes: Sequence[T], room: int) -> Sequence[T]:
        """Which decodes run if there is room for so many, in the order in which they stand. Once a step."""
        if len(decodes) <= room:
            self._left_out = []
            return decodes
        # region exercise 3.3
        rank = {decode: place for place, decode in enumerate(self._left_out)}
        behind = len(rank)
        queue = sorted(decodes, key=lambda decode: rank.get(decode, behind))  # a stable sort: the others in order
        self._left_out = list(queue[room:])
        chosen = set(queue[:room])
        return [decode for decode in decodes if decode in chosen]
        # endregion

    def plan(self, running: Iterable[Request]) -> Batch:
        """A step for a fixed set of requests, in their order: decodes first, then as much of the prompts as fits."""
        todo = [(request, request.total - request.computed) for request in running]
        decodes = [request for request, pending in todo if pending == 1]
        prompts = [(request, pending) for request, pending in todo if pending > 1]
        share = self.begin(len(decodes), (pending for _, pending in prompts))
        slices = [Slice(request, request.computed, 1) for request in self.turns(decodes, share.decodes)]
        for request, pending in prompts:
            length = share.offer(request.computed, pending)
            if length:
                share.take(pending, length)
                slices.append(Slice(request, request.computed, length))
        return Batch(tuple(slices))
