from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request.request import Request
from phase1_kv_pool.lab.fragmentation import PAGE_SIZES, SLOTS, policies, study
from phase1_kv_pool.lab.memories import KVMemory, PagedMemory
from phase1_kv_pool.lab.serving import ServingSimulator, SyntheticTrace, TraceRequest

LONGEST = 16
SMALL = policies(64, LONGEST, page_sizes=(1, 2, 4, 16))


def held_slots(memory: KVMemory, requests: list[Request]) -> list[int]:
    spans = [span for request in requests for span in memory.spans(request)]
    return [slot for start, size in spans for slot in range(start, start + size)]


def room(memory: KVMemory, request: Request) -> int:
    return sum(size for _, size in memory.spans(request))


def test_the_youngest_is_preempted_and_requests_stay_in_order_of_arrival() -> None:
    simulator = ServingSimulator(PagedMemory(9, 1), [TraceRequest(n, prompt=2, length=8) for n in range(4)])
    seen = []
    while simulator.unfinished:
        simulator.step()
        running = {active.spec.number: active.tokens for active in simulator.running}
        seen.append((running, [active.spec.number for active in simulator.waiting]))
        if simulator.steps == 4:
            assert simulator.recomputed == 2 + 3 + 4
    assert seen[:5] == [
        ({0: 2, 1: 2, 2: 2, 3: 2}, []),
        ({0: 3, 1: 3, 2: 3}, [3]),  # r0 took the last slot; r1 and r2 grow into the slots of r3, the youngest
        ({0: 4, 1: 4}, [2, 3]),  # the youngest by then was r2
        ({0: 5}, [1, 2, 3]),  # r0 took the last slot; the youngest was r1 itself
        ({0: 6}, [1, 2, 3]),  # three slots are free, r1 needs four, and no request overtakes it
    ]
    assert [active.spec.number for active in simulator.done] == [0, 1, 2, 3]
    order = [[*running, *waiting] for running, waiting in seen]  # oldest first; waiting requests are younger
    assert all(numbers == sorted(numbers) for numbers in order)


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


traces = st.lists(
    st.tuples(st.integers(1, LONGEST - 1), st.integers(1, LONGEST), st.integers(0, 12)), min_size=1, max_size=20
).map(lambda drawn: [TraceRequest(n, p, min(p + a, LONGEST), at) for n, (p, a, at) in enumerate(drawn)])


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
@given(requests=traces)
def test_every_request_ends_with_its_length_and_no_slot_is_allocated_twice(
    make: Callable[[], KVMemory], requests: list[TraceRequest]
) -> None:
    memory = make()
    simulator = ServingSimulator(memory, requests)
    while simulator.unfinished:
        before = {active.spec.number: active.tokens for active in simulator.running}
        simulator.step()
        running = simulator.running
        slots = held_slots(memory, [active.request for active in running])
        assert len(set(slots)) == len(slots) == memory.reserved <= memory.slots
        assert simulator.tokens == sum(active.tokens for active in running) <= memory.reserved
        assert all(room(memory, active.request) >= active.tokens for active in running)
        stayed = [active for active in running if active.spec.number in before]
        assert all(active.tokens == before[active.spec.number] + 1 for active in stayed)
        parts = [*simulator.coming, *simulator.waiting, *running, *simulator.done]
        assert len(parts) == len(requests)
    assert memory.reserved == 0
    assert sorted(active.spec.number for active in simulator.done) == [one.number for one in requests]
    assert all(active.tokens == active.spec.length for active in simulator.done)


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
