"""Engines under load: how many requests fit, what their rows say, and when an engine is made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phase0_request.core import Step
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import Device
from phase2_prefill_decode.loading.weights import random_weights
from phase6_integration.engine.options import EngineOptions
from phase6_integration.lab.gpu import serving, steps
from phase6_integration.lab.gpu.loads import GPULoad, opened, served, steady
from phase6_integration.lab.gpu.rows import MODELS, TINY, Day


@pytest.fixture
def day(tmp_path: Path) -> Day:
    return Day("steps", True, tmp_path)


@contextmanager
def engine(day: Day, **options: int) -> Iterator[GPULoad]:
    with opened(day, TINY, random_weights(TINY), **options) as load:
        yield load


def test_requests_are_as_many_as_the_pool_holds_whole(day: Day) -> None:
    with engine(day, kv_cache_pages=6) as load:  # a request of 20 + 20 tokens takes three at its end
        row = served(load, 4, 20, 20)
        assert (row["clients"], row["requests"], row["tokens"], row["preemptions"]) == (2, 2, 2 * 20, 0)
        assert row["pages"] == {"total": 6, "most": 6}
        assert row["decode_steps"]["steps"] + row["prefill_steps"]["steps"] >= 20
        with pytest.raises(RuntimeError, match="the pool does not hold a request of 96 tokens"):
            load.fit(4, 96)


def test_activations_are_no_part_of_what_a_step_reads_from_memory(day: Day) -> None:
    with engine(day) as load:
        row = steady(load, 2, 20, 4, False, Device("slow", 1e15, 1e6))
    assert 0 < row["of_memory"] < row["of_roofline"]
    step = CostModel(MODELS["8b"]).pieces([(1100, 1)] * 256).total
    assert round(step.activations / 1e6) == 2884, "the roofline of the first day has them"


@pytest.mark.parametrize("chunks", [False, True])
def test_what_a_step_moves_are_its_weights_and_the_keys_and_values_that_it_reads_and_writes(
    day: Day, chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, for the tiny model in float32, whose step takes a byte for each microsecond."""
    ran: list[Step] = []

    def run(*given: Any, run: Callable[..., list[Step]] = GPULoad.run) -> list[Step]:
        ran[:] = run(*given)
        return ran

    monkeypatch.setattr(GPULoad, "run", run)
    with engine(day) as load:
        row = steady(load, 2, 20, 1, chunks, Device("slow", 1e15, 1e6))
    (step,) = ran
    tokens, seen = (sum(getattr(piece, each) for piece in step.batch.slices) for each in ("length", "stop"))
    layer = 32 * (64 + 2 * 32) + 64 * 32 + 32 * 2 * 64 + 64 * 32 + 2 * 32 + 2 * 16  # matrices, then norms
    weights = 2 * layer + 32 + 128 * 32 + tokens * 32  # the last norm, the head, a row of the embedding for each token
    kv = 2 * 2 * 2 * 16  # of a token: layers, K and V, heads, numbers
    moved = 4 * (weights + kv * seen + kv * tokens)
    assert row["of_memory"] * row["ms"] * 1e3 == pytest.approx(moved)
    assert (tokens > 2) == chunks


def test_a_client_sends_its_next_request_when_its_last_is_answered(day: Day) -> None:
    with engine(day, kv_cache_pages=12) as load:
        row = served(load, 2, 20, 6, rounds=3)
        assert (row["requests"], row["tokens"], row["pages"]["most"]) == (6, 6 * 6, 2 * 2)
        assert 0 < row["itl_ms"]["median"] <= row["itl_ms"]["p99"]
        lengths = [(len(tokens), params.max_tokens) for tokens, params in load.requests(200, 20, 6, least=3)]
    prompts, answers = map(set, zip(*lengths, strict=True))
    assert (prompts, answers) == (set(range(3, 21)), set(range(3, 7)))


def test_what_is_measured_is_what_ships(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the engines of a real day are the defaults, but for the way to run and the 8-bit keys."""
    asked: list[dict[str, object]] = []

    @contextmanager
    def no_engine(day: Day, config: object, weights: object, **options: object) -> Iterator[GPULoad]:
        asked.append(options)
        raise RuntimeError("not here")
        yield

    monkeypatch.setattr("phase6_integration.lab.gpu.loads.opened", no_engine)
    steps.steps_8b(day)
    for stage in ("serve", "serve_all_fp8"):
        serving.serve(Day(stage, True, day.out))
    assert asked[0] == {"async_scheduling": True}
    assert set().union(*asked) == {"async_scheduling", "enforce_eager", "kv_cache_dtype"}
    assert EngineOptions().budget(True, 40_960).max_batched_tokens == 2048
