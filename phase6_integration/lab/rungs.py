"""The rungs of the ladder: transformers and the engines of phases 2 to 6, behind one interface.

Static engines serve a batch of the requests that have arrived, to its end, and then form the next one. Continuous
engines take a request whenever it arrives. The length of an answer is not known to any of them: it is ended from
outside, as by a stop string, long before its `max_tokens`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from phase0_request.core import EngineCore
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.loading.model import Model, default_device
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.engine import chunked
from phase4_radix.engine import cached
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase6_integration.engine.engine import NanoServingEngine

PAGE_SIZE, BATCH = 16, 64
BUDGET = TokenBudget(256, 512)


class Rung(Protocol):
    """An engine that takes requests as they arrive, and computes one step at a time."""

    steps: int
    pages: int  # held at most

    @property
    def has_work(self) -> bool: ...

    @property
    def hit_rate(self) -> float: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> Iterable[Request]:
        """Compute a step. Returns the requests that got a token."""
        ...

    def finish(self, request: Request) -> None:
        """End a request: its answer is complete."""
        ...


class EngineRung:
    """The engine of a phase. Phases 2 to 4 reserve pages up to a request's `max_tokens`."""

    def __init__(self, core: EngineCore[Any, Any]) -> None:
        self.core = core
        self.steps = self.pages = 0

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def hit_rate(self) -> float:
        cache = self.core.scheduler.cache
        return cache.counts.hit_rate if isinstance(cache, PrefixCache) else 0.0

    def submit(self, request: Request) -> None:
        self.core.submit(request)

    def step(self) -> Iterable[Request]:
        step = self.core.step()
        if step is None:
            return []
        self.steps += bool(step.batch)
        self.pages = max(self.pages, step.pages)
        return [event.request for event in step.events if event.token is not None]

    def finish(self, request: Request) -> None:
        self.core.finish(request, FinishReason.STOP)


class TransformersRung:
    """`generate` of transformers: static batches, padded on the left, in as much memory as the pool has."""

    hit_rate = 0.0

    def __init__(self, model: Any, slots: int, answers: Mapping[str, int]) -> None:
        self.model, self.slots, self.answers = model, slots, answers
        self.steps = self.pages = 0
        self._waiting: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> Iterable[Request]:
        """Serve a whole batch: the steps are those of `generate`."""
        from transformers import GenerationConfig

        batch = self._form_batch()
        longest = max(len(request.prompt_tokens) for request in batch)
        rows = [[0] * (longest - len(request.prompt_tokens)) + [*request.prompt_tokens] for request in batch]
        mask = [[0] * row.count(0) + [1] * (longest - row.count(0)) for row in rows]
        for request in batch:
            request.admit(time.perf_counter())

        def after_step(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            now, newest = time.perf_counter(), tokens[:, -1].tolist()
            self.steps += 1
            self.pages = max(self.pages, tokens.numel() // PAGE_SIZE)
            for request, token in zip(batch, newest, strict=True):
                if not request.finished:
                    request.advance(request.computed, request.total - request.computed)
                    request.append(token, now)
                    if len(request.output_tokens) == self.answers[request.id]:
                        request.finish(FinishReason.STOP, now)
            return torch.tensor([request.finished for request in batch], device=tokens.device)

        make: Any = GenerationConfig
        config = make(do_sample=False, max_new_tokens=max(r.params.max_tokens for r in batch), pad_token_id=0)
        place = self.model.device
        with torch.inference_mode():
            self.model.generate(
                torch.tensor(rows, device=place),
                attention_mask=torch.tensor(mask, device=place),
                generation_config=config,
                stopping_criteria=[after_step],
            )
        return []

    def finish(self, request: Request) -> None:
        raise AssertionError("its batches run to their end")

    def _form_batch(self) -> list[Request]:
        batch: list[Request] = []
        while self._waiting and len(batch) < BATCH:
            both = [*batch, self._waiting[0]]
            if batch and len(both) * max(len(r.prompt_tokens) + r.params.max_tokens for r in both) > self.slots:
                break
            batch.append(self._waiting.popleft())
        return batch


Build = Callable[[Mapping[str, int]], Rung]  # from the length of each answer, which only transformers' batches need


def rungs(directory: Path, pages: int) -> dict[str, Build]:
    """A function for each rung that makes its engine, all of the same weights in float32 and of the same pool."""
    model = Model.load(directory, dtype="float32")

    def transformers(answers: Mapping[str, int]) -> Rung:
        from transformers import AutoModelForCausalLM

        theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        theirs.generation_config.eos_token_id = None
        return TransformersRung(theirs.to(default_device()).eval(), pages * PAGE_SIZE, answers)

    def phase6(_: object) -> Rung:
        engine = NanoServingEngine.from_pretrained(
            directory, dtype="float32", kv_cache_pages=pages, page_size=PAGE_SIZE, max_num_seqs=BATCH,
            max_chunk_size=BUDGET.max_chunk_size, max_num_batched_tokens=BUDGET.max_batched_tokens,
        )  # fmt: skip
        return EngineRung(engine.parts.core)

    return {
        "transformers": transformers,
        "phase2": lambda _: EngineRung(static(model, cache=PagedCache(pages, PAGE_SIZE), batch_size=BATCH).core),
        "phase3": lambda _: EngineRung(
            chunked(model, BUDGET, cache=PagedCache(pages, PAGE_SIZE), batch_size=BATCH).core
        ),
        "phase4": lambda _: EngineRung(cached(model, BUDGET, num_pages=pages, batch_size=BATCH).core),
        "phase5": lambda _: EngineRung(
            continuous(model, BUDGET, cache=PrefixCache(pages, PAGE_SIZE), max_running=BATCH).core
        ),
        "phase6": phase6,
    }
