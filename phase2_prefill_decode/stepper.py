"""Stepper: requests that hold pages, moved on together a step at a time."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from phase0_request.batch import Batch, Event, Slice, StepOutput, reason_to_finish
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import KVCache
from phase2_prefill_decode.runner import ModelRunner

Plan = Callable[[Sequence[Request]], Batch]


class Step(NamedTuple):
    """What one step did, and how long it took."""

    prefill_tokens: int
    decode_tokens: int
    seconds: float
    events: list[Event]


def together(running: Sequence[Request]) -> Batch:
    """Everyone catches up at once: a whole prompt, or the one token that was drawn last."""
    return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in running))


class Stepper:
    """The running requests of an engine. `plan` says which of their tokens a step computes.

    Whoever admits a request sees to it that the pool can hold it to its end.
    """

    def __init__(
        self,
        runner: ModelRunner,
        eos_ids: Collection[int],
        plan: Plan = together,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.cache = runner.cache
        self.eos_ids = frozenset(eos_ids)
        self.plan = plan
        self.running: dict[str, Request] = {}
        self._clock = clock

    def admit(self, request: Request) -> None:
        """Give it a page table. What the cache has of it already counts as computed."""
        request.admit(self._clock())
        computed = self.cache.attach(request)
        self.running[request.id] = request
        if computed:
            request.advance(0, computed)

    # region step
    def step(self) -> Step:
        """Plan, make room, pack, run, commit."""
        start = self._clock()
        batch = self.plan(list(self.running.values()))
        prefill, decode = batch.num_prefill_tokens, batch.num_decode_tokens
        for piece in batch:
            self.cache.grow(piece.request, piece.stop)
        output = self.runner.run(self.runner.pack(batch))
        now = self._clock()
        events = list(commit(batch, output, self.cache, self.eos_ids, now))
        for event in events:
            if event.request.finished:
                self.release(event.request)
        return Step(prefill, decode, now - start, events)

    # endregion

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside, between two steps. One that has ended stays as it is."""
        if not request.finished:
            request.finish(reason, self._clock())
        self.release(request)

    def release(self, request: Request) -> None:
        if self.running.pop(request.id, None) is not None:
            self.cache.release(request)


# region commit
def commit(batch: Batch, output: StepOutput, cache: KVCache, eos_ids: Collection[int], now: float) -> Iterator[Event]:
    """Move every request of the step on by its slice and its token."""
    for number, (piece, token) in enumerate(zip(batch.slices, output.tokens, strict=True)):
        request = piece.request
        completes = piece.completes
        request.advance(piece.start, piece.length)
        if number in output.failed:
            request.finish(FinishReason.ERROR, now, output.failed[number])
            yield Event(request, None, FinishReason.ERROR)
            continue
        if number in output.prompt_logprobs:
            request.add_prompt_logprobs(piece.start, output.prompt_logprobs[number])
        cache.publish(request)
        if not completes:
            continue
        if token is None:
            raise ValueError(f"the step gave no token for request {request.id}, which it completed")
        request.append(token, now)
        reason = reason_to_finish(request, eos_ids)
        if reason is not None:
            request.finish(reason, now)
        yield Event(request, token, reason, output.logprobs.get(number))


# endregion
