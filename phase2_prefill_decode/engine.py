"""Engine: generates the outputs of a set of prompts with static batching.

A batch is formed once. Its prompts are prefilled in one step; then every step decodes one token for each request that
still runs. No request enters before the last of the batch has finished, and each reserves pool memory for the longest
output it may have. Both are waste. Phases 3 to 5 remove it, with another plan of the steps and another cache.
"""

import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from tqdm import tqdm

from phase0_request.batch import Batch, Event, Slice, StepOutput, reason_to_finish
from phase0_request.checks import check_int
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.generation import Completion, Delta, Prompt, Transcript, make_requests
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.runner import ModelRunner

Params = SamplingParams | Sequence[SamplingParams] | None
Plan = Callable[[Sequence[Request]], Batch]


class TimedStep(NamedTuple):
    """The tokens of one step, its time and its events."""

    prefill_tokens: int
    decode_tokens: int
    seconds: float
    events: list[Event]


def together(running: Sequence[Request]) -> Batch:
    """Plan a step in which every request computes all its pending tokens: its prompt, or the token drawn last."""
    return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in running))


class Stepper:
    """The running requests of an engine, advanced step by step. `plan` chooses the tokens of each step.

    The caller admits a request only if the pool can hold it to its end.
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
        """Start a request: give it a page table. Tokens that the cache holds count as computed."""
        request.admit(self._clock())
        computed = self.cache.attach(request)
        self.running[request.id] = request
        if computed:
            request.advance(0, computed)

    # region step
    def step(self) -> TimedStep:
        """Plan, allocate pages, pack, run, commit."""
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
        return TimedStep(prefill, decode, now - start, events)

    # endregion

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request between two steps. A finished request is not changed."""
        if not request.finished:
            request.finish(reason, self._clock())
        self.release(request)

    def release(self, request: Request) -> None:
        """Free the pages of a request."""
        if self.running.pop(request.id, None) is not None:
            self.cache.release(request)


# region commit
def commit(
    batch: Batch, output: StepOutput, cache: PagedCache, eos_ids: Collection[int], now: float
) -> Iterator[Event]:
    """Advance every request of the step by its slice, and append its token if the slice completed it."""
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


class Engine:
    """A model with a pool of its own. It serves one caller at a time."""

    def __init__(
        self,
        model: Model,
        *,
        cache: PagedCache | None = None,
        plan: Plan = together,
        batch_size: int = 64,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cache` is by default a plain one of 512 pages of 16 tokens; `seed` is for requests without one."""
        check_int("batch_size", batch_size, 1)
        self.model = model
        self.cache = cache or PagedCache(512, 16)
        self.batch_size = batch_size
        self.clock = clock
        self._names = (f"request-{number}" for number in itertools.count(1))
        decoder = model.decoder
        layout = model.config.kv_layout(self.cache.page_size)
        pool = KVPool(layout, self.cache.max_tokens // self.cache.page_size, decoder.device, decoder.dtype)
        runner = ModelRunner(decoder, pool, self.cache, Sampler.of(model, seed))
        self.stepper = Stepper(runner, model.eos_ids, plan, clock)

    def generate(self, prompts: Sequence[Prompt], params: Params = None, *, progress: bool = False) -> list[Completion]:
        """Generate the outputs, in the order of the prompts."""
        requests = make_requests(prompts, params, self.model, self.clock(), self._names)
        transcript = Transcript(requests, self.model.tokenizer)
        bar = tqdm(desc="generating", total=len(requests), leave=False, disable=not progress)
        with bar, closing(self._run(requests, transcript)) as deltas:
            for delta in deltas:
                bar.update(delta.finish_reason is not None)
        return [transcript.completions[request.id] for request in requests]

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> Generator[Delta]:
        """Generate the outputs token by token. Closing the generator aborts the requests that still run."""
        requests = make_requests(prompts, params, self.model, self.clock(), self._names)
        return self._run(requests, Transcript(requests, self.model.tokenizer))

    # region run
    def _run(self, requests: Sequence[Request], transcript: Transcript) -> Generator[Delta]:
        """Run one static batch after the other, each until its last request has finished."""
        stepper = self.stepper
        if stepper.running:
            raise RuntimeError("this engine is generating already; finish that first, or close it")
        for batch in list(self._batches(requests)):
            try:
                for request in batch:
                    stepper.admit(request)
                while stepper.running:
                    for event in stepper.step().events:
                        delta = transcript.add(event)
                        if delta.finish_reason is not None:  # a stop string, which the step cannot see
                            stepper.finish(event.request, delta.finish_reason)
                        yield delta
            finally:
                for request in list(stepper.running.values()):
                    stepper.finish(request, FinishReason.ABORT)

    # endregion

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Split the requests into batches that fit into the pool at their longest outputs."""
        batch: list[Request] = []
        reserved, total = 0, self.cache.max_tokens // self.cache.page_size
        for request in requests:
            longest = len(request.prompt_tokens) + request.params.max_tokens - 1  # the last token is not computed
            pages = -(-longest // self.cache.page_size)
            if pages > total:
                raise ValueError(
                    f"{request.id} may grow to {longest} tokens, and the pool has room for {self.cache.max_tokens}; "
                    f"give the engine a larger cache or the request a smaller max_tokens"
                )
            if batch and (reserved + pages > total or len(batch) == self.batch_size):
                yield batch
                batch, reserved = [], 0
            batch.append(request)
            reserved += pages
        if batch:
            yield batch
