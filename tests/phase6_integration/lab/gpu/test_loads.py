"""Engines under load: how many requests fit, what their rows say, and when an engine is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        assert (row["requests"], row["tokens"], row["preemptions"]) == (2, 2 * 20, 0)
        assert row["pages"] == {"total": 6, "most": 6}
        assert row["decode_steps"]["steps"] + row["prefill_steps"]["steps"] >= 20
        with pytest.raises(RuntimeError, match="the pool does not hold a request of 96 tokens"):
            load.fit(4, 96)


def test_activations_are_no_part_of_what_a_step_reads_from_memory(day: Day) -> None:
    with engine(day) as load:
        row = steady(load, 2, 20, 4, False, Device("slow", 1e15, 1e6))
    assert 0 < row["of_memory"] < row["of_roofline"]
    step = CostModel(MODELS["8b"]).pieces([(1100, 1)] * 256).total
    assert round(step.activations / 1e6) == 2884, "the claims about 82 % subtract them"


def test_what_is_measured_is_what_ships(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the engines of a real day are the defaults, but for the way to run and the page size."""
    asked: list[dict[str, object]] = []

    @contextmanager
    def no_engine(day: Day, config: object, weights: object, **options: object) -> Iterator[GPULoad]:
        asked.append(options)
        raise RuntimeError("not here")
        yield

    monkeypatch.setattr("phase6_integration.lab.gpu.loads.opened", no_engine)
    steps.steps_8b(day)
    serving.serve_8b(Day("serve", True, day.out))
    assert asked[0] == {"async_scheduling": True}
    assert set().union(*asked) == {"async_scheduling", "enforce_eager", "page_size"}
    assert EngineOptions().budget(True, 40_960).max_batched_tokens == 2048
