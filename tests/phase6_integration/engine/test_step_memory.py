"""The memory of the largest step: how it is measured, and that no step takes more."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from phase0_request import SamplingParams
from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.extras.logprobs import BLOCK
from phase2_prefill_decode.extras.outcome import SliceOutcome
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.runner import ModelRunner
from phase6_integration.engine.connect_engine import largest_params
from phase6_integration.engine.runners import Computing
from phase6_integration.engine.sizing import peak_bytes, profile

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports a process's peak memory"
)
# Logits of 64 rows are 38 MB. Of what is below 32 MB, malloc keeps an amount that varies.
MUCH = ModelConfig(vocab_size=150_000, num_hidden_layers=1, num_attention_heads=2, hidden_size=32)
COPY = BLOCK * MUCH.vocab_size * 4  # bytes of the logits of a block, in float32


@pytest.fixture(scope="module")
def new_process() -> Iterator[ProcessPoolExecutor]:
    """To measure in. In this one malloc has gaps that earlier tests left, uses them, and gives none back in time."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def test_peak_bytes_measures_the_peak_of_the_work_alone() -> None:
    kept = []

    def work() -> None:
        torch.ones(16 << 20)  # 64 MiB, freed at once
        kept.append(torch.ones(2 << 20))

    torch.ones(64 << 20)  # an earlier, higher peak does not count
    torch.ones(6 << 20)  # from now on malloc keeps the memory of smaller tensors that are freed: 160 MiB
    freed, still_used = ([torch.ones(1 << 20) for _ in range(40)] for _ in range(2))
    del freed
    assert 60 << 20 <= peak_bytes(work, torch.device("cpu")) < 96 << 20
    assert len(still_used) == 40


def largest_steps(*params: SamplingParams) -> list[int]:
    """The profiled memory for requests that ask for these parameters."""
    model = Model.random(MUCH, device="cpu")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phase6_integration.engine.sizing.scored_rows", lambda: (1, SamplingParams(prompt_logprobs=20)))
        for one in params:
            patch.setattr("phase6_integration.engine.sizing.largest_params", lambda one=one: one)
            computing = Computing(model, sampler_for(model, 0), MUCH.kv_layout(16))
            found.append(profile(computing, BLOCK, BLOCK, BLOCK))
    return found


def test_the_largest_step_has_the_copies_of_logits_that_requests_can_ask_for(new_process: ProcessPoolExecutor) -> None:
    """In float32: log-probabilities make seven of them. The copy that a bias makes may be gone by then."""
    asked = (
        largest_params(),
        SamplingParams(),
        SamplingParams(logprobs=20),
        largest_params(),
    )  # the first compiles, which takes memory
    _, drawn, scored, all_of_it = new_process.submit(largest_steps, *asked).result()
    assert drawn + 5 * COPY < scored < all_of_it + 0.5 * COPY


def scored_prompt(tokens: int, running: int) -> tuple[int, int]:
    """The memory of a step that scores a prompt, and the profiled one."""
    model, cache = Model.random(MUCH, device="cpu", dtype="float32"), PagedCache(13, 16)
    sampler, pool = sampler_for(model, 0), KVPool(MUCH.kv_layout(16), 13, torch.device("cpu"), torch.float32)
    request = Request("scored", (5,) * tokens, SamplingParams(prompt_logprobs=20))
    cache.attach(request)
    cache.grow(request, tokens)
    runner = ModelRunner(model.decoder, pool, cache, sampler)

    def step() -> None:
        output = runner.run(runner.pack(Batch((Slice(request, 0, tokens),))))
        (outcome,) = output.more.values()
        assert isinstance(outcome, SliceOutcome)
        assert len(outcome.prompt_logprobs) == tokens - 1

    step()  # compiles what it needs, which takes memory
    largest = profile(Computing(model, sampler, MUCH.kv_layout(16, "float32")), tokens, running, tokens)
    return peak_bytes(step, torch.device("cpu")), largest


@pytest.mark.parametrize(("tokens", "running"), [(200, 1), pytest.param(63, 32, marks=pytest.mark.slow)])
def test_a_scored_prompt_takes_no_more_than_the_largest_step(
    tokens: int, running: int, new_process: ProcessPoolExecutor
) -> None:
    """Its logits are computed and sorted a block of rows at a time."""
    taken, largest = new_process.submit(scored_prompt, tokens, running).result()
    assert 6 * COPY < taken < 8 * COPY, "the logits of 199 rows would be another two"
    assert taken < 1.1 * largest
