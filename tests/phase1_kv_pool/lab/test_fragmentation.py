from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request.request import Request
from phase1_kv_pool.lab.fragmentation import PAGE_SIZES, SLOTS, policies, study
from phase1_kv_pool.lab.memories import KVMemory
from phase1_kv_pool.lab.serving import SyntheticTrace

LONGEST = 16
SMALL = policies(64, LONGEST, page_sizes=(1, 2, 4, 16))


def held_slots(memory: KVMemory, requests: list[Request]) -> list[int]:
    spans = [span for request in requests for span in memory.spans(request)]
    return [slot for start, size in spans for slot in range(start, start + size)]


def room(memory: KVMemory, request: Request) -> int:
    return sum(size for _, size in memory.spans(request))


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["admit", "grow", "grow", "release"]), st.integers(1, LONGEST)), max_size=80
    )
)
def test_allocations_never_overlap_and_a_refusal_changes_nothing(
    make: Callable[[], KVMemory], actions: list[tuple[str, int]]
) -> None:
    memory = make()
    lengths: dict[Request, int] = {}
    for turn, (action, number) in enumerate(actions):
        known = list(lengths)
        before = {request: memory.spans(request) for request in known}
        chosen = known[number % len(known)] if known else None
        if action == "admit":
            newcomer = Request(f"r{turn}", (0,))
            if memory.admit(newcomer, number):
                lengths[newcomer] = number
            else:
                assert {request: memory.spans(request) for request in known} == before
        elif chosen is not None and action == "release":
            memory.release(chosen)
            del lengths[chosen]
        elif chosen is not None and lengths[chosen] < LONGEST:
            if memory.grow(chosen, lengths[chosen] + 1):
                lengths[chosen] += 1
            else:
                assert {request: memory.spans(request) for request in known} == before
        slots = held_slots(memory, list(lengths))
        assert len(set(slots)) == len(slots) == memory.reserved
        assert set(slots) <= set(range(memory.slots))
        assert all(room(memory, request) >= tokens for request, tokens in lengths.items())
    for request in lengths:
        memory.release(request)
    assert memory.reserved == 0
    longest = [Request(f"last{n}", (0,)) for n in range(memory.slots // LONGEST)]
    assert all(memory.admit(request, LONGEST) for request in longest)  # free memory has merged completely


@pytest.mark.proof
def test_pages_waste_half_a_page_for_each_request_and_contiguous_memory_far_more() -> None:
    """The study with 600 requests of its default trace: memory is full for most of its steps."""
    outcomes = dict(study(SyntheticTrace(num_requests=600)))
    for size in PAGE_SIZES:
        outcome = outcomes[f"pages_{size}"]
        assert outcome.waste_per_request == pytest.approx((size - 1) / 2, rel=0.02)
        tokens = outcome.memory_share * SLOTS / outcome.mean_running
        assert outcome.utilisation == pytest.approx(tokens / (tokens + outcome.waste_per_request))
    paged = [outcomes[f"pages_{size}"] for size in PAGE_SIZES]
    for measure in ("utilisation", "mean_running"):
        values = [getattr(outcome, measure) for outcome in paged]
        assert values == sorted(values, reverse=True)
    assert outcomes["pages_16"].utilisation >= 0.96
    assert outcomes["contiguous_pow2"].utilisation < 0.75
    assert outcomes["contiguous_max"].utilisation < 0.25
