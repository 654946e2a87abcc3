"""The rungs of the ladder: transformers and the engines of phases 2 to 6, behind one interface.

Static engines serve a batch of the requests that have arrived, to its end, and then form the next one. Continuous
engines take a request whenever it arrives. The length of an answer is not known to any of them: it is ended from
outside, as by a stop string, long before its `max_tokens`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from phase0_request.core import EngineCore
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model, default_device
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.engine import chunked
from phase4_radix.engine import cached
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase6_integration.engine.engine import NanoServingEngine

PAGE_SIZE, BATCH = 16, 64
BUDGET = TokenBudget(256, 512)
Answers = Mapping[str, int]  # the length of each answer, by request id


class EngineRung:
    """The engine of a phase. Phases 2 to 4 reserve pages up to a request's `max_tokens`."""

    def __init__(self, core: EngineCore[Any, Any], answers: Answers) -> None:
        self.core, self.answers = core, answers
        self.submit = core.submit
        self.steps = self.pages = 0  # pages held at most

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def hit_rate(self) -> float:
        cache = self.core.scheduler.cache
        return cache.counts.hit_rate if isinstance(cache, PrefixCache) else 0.0

    def step(self) -> None:
        """Run a step, and end the requests with complete answers."""
        step = self.core.step()
        if step is None:
            return
        self.steps += bool(step.batch)
        self.pages = max(self.pages, step.pages)
        for request, token, _, _ in step.events:
            if token is not None and len(request.output_tokens) == self.answers[request.id]:
                self.core.finish(request, FinishReason.STOP)


class TransformersRung:
    """`generate` of transformers: static batches, padded on the left, in as much memory as the pool has."""

    hit_rate = 0.0

    def __init__(self, model: Any, slots: int, answers: Answers) -> None:
        self.model, self.slots, self.answers = model, slots, answers
        self.steps = self.pages = 0
        self._waiting: deque[Request] = deque()
        self.submit = self._waiting.append

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """Serve a whole batch, with the steps of `generate`."""
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
        with torch.inference_mode():
            self.model.generate(
                torch.tensor(rows, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                generation_config=config,
                stopping_criteria=[after_step],
            )

    def _form_batch(self) -> list[Request]:
        batch: list[Request] = []
        while self._waiting and len(batch) < BATCH:
            both = [*batch, self._waiting[0]]
            if batch and len(both) * max(len(r.prompt_tokens) + r.params.max_tokens for r in both) > self.slots:
                break
            batch.append(self._waiting.popleft())
        return batch


Rung = EngineRung | TransformersRung
Build = Callable[[Answers], Rung]


def rungs(directory: Path, pages: int) -> dict[str, Build]:
    """A function for each rung that makes its engine, all of the same weights in float32 and of the same pool."""
    model = Model.load(directory, dtype="float32")

    def transformers(answers: Answers) -> Rung:
        from transformers import AutoModelForCausalLM

        theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        theirs.generation_config.eos_token_id = None
        return TransformersRung(theirs.to(default_device()).eval(), pages * PAGE_SIZE, answers)

    def phase6() -> EngineCore[Any, Any]:
        return NanoServingEngine.from_pretrained(
            directory, dtype="float32", kv_cache_pages=pages, page_size=PAGE_SIZE, max_num_seqs=BATCH,
            max_chunk_size=BUDGET.max_chunk_size, max_num_batched_tokens=BUDGET.max_batched_tokens,
        ).parts.core  # fmt: skip

    def plain() -> PagedCache:
        return PagedCache(pages, PAGE_SIZE)

    cores: dict[str, Callable[[], EngineCore[Any, Any]]] = {
        "phase2": lambda: static(model, cache=plain(), batch_size=BATCH).core,
        "phase3": lambda: chunked(model, BUDGET, cache=plain(), batch_size=BATCH).core,
        "phase4": lambda: cached(model, BUDGET, num_pages=pages, batch_size=BATCH).core,
        "phase5": lambda: continuous(model, BUDGET, cache=PrefixCache(pages, PAGE_SIZE), max_running=BATCH).core,
        "phase6": phase6,
    }
    engines: dict[str, Build] = {
        name: lambda answers, make=make: EngineRung(make(), answers)  # type: ignore[misc]
        for name, make in cores.items()
    }
    return {"transformers": transformers, **engines}
