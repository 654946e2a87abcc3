"""The compiled model of a fleet, against the router's own function and phase 5's simulator."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase6_integration.cluster.routing import RoutingPolicy, rank
from phase6_integration.lab.scale import fleet, routers

POLICY = RoutingPolicy()


def test_the_compiled_router_has_the_defaults_of_the_real_one() -> None:
    assert (POLICY.load_weight, POLICY.slack, POLICY.imbalance) == (fleet.WEIGHT, fleet.SLACK, fleet.IMBALANCE)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_the_compiled_router_chooses_as_the_real_one(replicas: list[tuple[int, int]], seed: int) -> None:
    loads, hits = map(list, zip(*replicas, strict=True))
    first = fleet.first_of_rank(np.array(loads), np.array(hits), 10, fleet.WEIGHT, fleet.SLACK, fleet.IMBALANCE)
    if any(hits):  # equal ones take turns
        order = rank(loads, hits, 10, POLICY, random.Random(seed))
        assert (loads[first], hits[first]) in {
            (loads[r], hits[r])
            for r in range(len(loads))
            if cost(r, loads, hits) == pytest.approx(cost(order[0], loads, hits))
        }
    elif len(loads) > 1:
        assert loads[first] < max(loads) or loads.count(max(loads)) > 1, "the busiest loses against any other"


def cost(r: int, loads: list[int], hits: list[int]) -> float:
    return 1 - hits[r] / 10 + POLICY.load_weight * (loads[r] - min(loads)) / max(1.0, sum(loads) / len(loads))


@pytest.mark.parametrize("router", ["least loaded", "digests"])
def test_a_small_fleet_is_the_same_with_the_schedulers_of_the_engine(router: str) -> None:
    kind, size = replace(routers.KINDS["tenants"], question=64, answer=16), routers.Size(2, 400, 8.0, 2048)
    compiled = routers.run(kind, router, *size, period=0.0, skipped=0.0)
    full = routers.with_schedulers(kind.rows(size.requests, size.rate * size.replicas), kind.shared, router, *size[::3])
    assert compiled.hit_rate == pytest.approx(full["hit_rate"], abs=0.03)
    assert compiled.ttft_p50_ms == pytest.approx(full["ttft_p50_ms"], rel=0.1)
    assert compiled.ttft_p99_ms == pytest.approx(full["ttft_p99_ms"], rel=0.2)
