"""Which replica a request goes to, by a table that has heard of them."""

import random

from hypothesis import given
from hypothesis import strategies as st

from phase6_integration.cluster.digest import Digest
from phase6_integration.cluster.routing import RoutingPolicy, RoutingTable, rank
from phase6_integration.engine.stats import Gauges

POLICY, IDLE = RoutingPolicy(), Gauges()
loads = st.lists(st.integers(0, 200), min_size=1, max_size=12)


@given(loads, st.data(), st.integers(0, 1 << 30))
def test_no_cached_prefix_sends_a_request_beyond_the_bound_of_imbalance(
    loads: list[int], data: st.DataObject, seed: int
) -> None:
    hits = data.draw(st.lists(st.integers(0, 10), min_size=len(loads), max_size=len(loads)))
    order = rank(loads, hits, 10, POLICY, random.Random(seed))
    assert sorted(order) == [*range(len(loads))]
    average = sum(loads) / len(loads)
    if any(hits):
        assert loads[order[0]] <= min(loads) + max(POLICY.slack, POLICY.imbalance * average)
    elif len(loads) > 1:
        assert loads[order[0]] <= loads[order[1]]


def test_a_hit_of_the_whole_prompt_is_worth_two_average_loads_and_no_hit_is_worth_none() -> None:
    draw, policy = random.Random(0), RoutingPolicy(imbalance=10)
    assert rank([19, 1, 10], [10, 0, 0], 10, policy, draw)[0] == 0
    assert rank([22, 1, 7], [10, 0, 0], 10, policy, draw)[0] == 1
    assert rank([5, 4, 6], [3, 3, 3], 10, policy, draw)[0] == 1


def test_without_hits_two_drawn_replicas_compete() -> None:
    """The power of two choices: the busiest of many is never chosen, and it is not always the least busy one."""
    draw, busy = random.Random(0), [5, 0, 1, 2, 3]
    first = [rank(busy, [0] * 5, 10, POLICY, draw)[0] for _ in range(2000)]
    counts = [first.count(replica) for replica in range(5)]
    assert counts[0] == 0
    assert counts[1] > counts[2] > counts[3] > counts[4] > 0
    assert abs(counts[1] - 800) < 100, "in two of five draws of two"


def two() -> tuple[RoutingTable, Digest, Digest]:
    table, digests = RoutingTable(seed=0), (Digest(), Digest())
    table.front = "me"
    table.keep("ab")
    return table, *digests


def test_a_conversation_stays_with_its_replica_before_any_report_and_after() -> None:
    table, *_ = two()
    prompt = [1, 2, 3]
    (first, other) = table.choose(prompt, "ab")
    table.send(first, "r1", prompt)
    table.finish("r1")
    assert {table.choose([*prompt, 4, 5], "ab")[0] for _ in range(20)} == {first}
    digest = Digest()
    digest.stored([1, 2, 3, 4])
    for _ in range(4):
        table.report(first, digest.report({}, IDLE))
        table.report(other, Digest().report({}, IDLE))
    assert {table.choose([*prompt, 4, 5], "ab")[0] for _ in range(20)} == {first}


def test_pages_that_a_replica_does_not_tell_of_are_not_expected_for_ever() -> None:
    table, digest, _ = two()
    table.send("a", "r1", [1, 2, 3])
    for _ in range(5):
        table.report("a", digest.report({"me": 1}, IDLE))
        assert table.replicas["a"].hits([1, 2, 3]) == 3, "it may be prefilling them"
    table.finish("r1")
    table.report("a", digest.report({}, IDLE))
    table.report("a", digest.report({}, IDLE))
    assert table.replicas["a"].hits([1, 2, 3]) == 0
    assert not table.replicas["a"].expected


def test_requests_between_two_reports_do_not_all_go_to_one_replica() -> None:
    table, digest, empty = two()
    digest.stored([1, 2, 3])
    table.report("a", digest.report({}, IDLE))
    table.report("b", empty.report({}, IDLE))
    for number in range(40):
        name = table.choose([1, 2, 3], "ab")[0]
        table.send(name, f"r{number}", [1, 2, 3])
    sent = [table.replicas[name].load for name in "ab"]
    assert sum(sent) == 40
    assert max(sent) - min(sent) <= max(POLICY.slack, POLICY.imbalance * 20) + 1


def test_load_counts_the_requests_of_other_fronts_and_not_the_own_ones_twice() -> None:
    table, digest, _ = two()
    table.send("a", "r1", [1])
    table.send("a", "r2", [2])
    table.report("a", digest.report({"me": 5, "other": 3}, IDLE))
    assert table.replicas["a"].load == 5
    table.finish("r1")
    assert table.replicas["a"].load == 4
    table.send("b", "r2", [2])
    assert [table.replicas[name].load for name in "ab"] == [3, 1], "a retry has moved"


def test_a_replica_that_is_gone_is_forgotten_with_its_requests() -> None:
    table, digest, _ = two()
    digest.stored([1, 2, 3])
    table.report("a", digest.report({}, IDLE))
    table.send("a", "r1", [1, 2, 3])
    table.keep("b")
    table.finish("r1")
    table.keep("ab")
    assert table.replicas["a"].load == 0
    assert table.replicas["a"].hits([1, 2, 3]) == 0


def test_a_replica_that_is_gone_has_no_state_and_its_counts_stay() -> None:
    """Prometheus takes a counter that falls for one that began anew."""
    table, one, other = two()
    table.report("a", one.report({}, Gauges(3, 1, 64, 50, 8, 6, 2, 500, 250, 4, 12, (4, 2))))
    table.report("b", other.report({}, Gauges(1, 0, 64, 60, 4, 0, 1, 100, 0, 1, 3, (1, 1, 1))))
    assert table.gauges == Gauges(4, 1, 128, 110, 12, 6, 3, 600, 250, 5, 15, (5, 3, 1))
    table.keep("b")
    assert table.gauges == Gauges(1, 0, 64, 60, 4, 0, 3, 600, 250, 5, 15, (5, 3, 1))
