"""A state machine over the scheduler: any event in any order, with the invariants checked after each."""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from phase0_request import FinishReason, QueueFullError, Request, SamplingParams
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.invariants import check_cache
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.extras.speculation.speculation import Proposer, Speculation, speculation_in
from phase5_continuous.policies import ByPriority, FirstComeFirstServed, LongestPrefixFirst
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.turns import OneQueue, Turns
from tests.phase5_continuous.recorded import Recorded
from tests.phase5_continuous.support import EOS, Device, Engine, Oracle, draft_model, waiting_of

BEGINNINGS = [(), (5,) * 4, (5,) * 8, (5,) * 8 + (6,) * 5]


Arrival = tuple[tuple[int, ...], int, int, int, str, float | None, bool, str]
ARRIVALS: st.SearchStrategy[Arrival] = st.tuples(
    st.sampled_from(BEGINNINGS),
    st.integers(0, 9),  # tokens of its own
    st.sampled_from([30, 15, 7, 2, 1]),  # max_tokens
    st.integers(-2, 2),  # priority
    st.sampled_from(["", "", "", "other"]),  # salt
    st.sampled_from([None] * 8 + [6, 15]),  # timeout
    st.booleans(),  # ignore_eos
    st.sampled_from(["", "", "a", "b"]),  # tenant
)


class Anything(RuleBasedStateMachine):
    """Requests with shared prefixes, in a pool that holds a few of them."""

    cache_type: type[PagedCache] = PagedCache
    device_type: type[Device] = Device
    how = "one by one"
    turns: Callable[[int | None], Turns] = FairQueues
    ahead = 0
    rules_run = 0
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        room=st.sampled_from([36, 60, 24, 90]),
        page_size=st.sampled_from([4, 3, 1]),
        batched=st.sampled_from([24, 60, 12, 6, 2]),
        chunk=st.sampled_from([60, 12, 4, 1]),
        max_running=st.sampled_from([6, 4, 2, 1]),
        watermark=st.sampled_from([0, 0, 0.3]),
        policy=st.sampled_from([FirstComeFirstServed(), ByPriority(3), LongestPrefixFirst(20)]),
        queue_limit=st.sampled_from([None, 3]),
    )
    def start(
        self,
        room: int,
        page_size: int,
        batched: int,
        chunk: int,
        max_running: int,
        watermark: float,
        policy: FirstComeFirstServed | ByPriority | LongestPrefixFirst,
        queue_limit: int | None,
    ) -> None:
        self.cache = self.make_cache(room // page_size, page_size, min(chunk, batched))
        proposers: dict[str, Callable[[], Proposer]] = {
            "with drafts": Oracle,
            "with a draft model": lambda: draft_model(self.cache_type(room // page_size // 2, page_size)),
        }
        proposer = proposers[self.how]() if self.how in proposers else None
        scheduler = Scheduler(
            self.cache,
            EOS,
            TokenBudget(min(chunk, batched), batched),
            policy=policy,
            turns=type(self).turns,
            max_running=max_running,
            watermark=watermark,
            queue_limit=queue_limit,
            ahead=self.ahead,
            extender=None if proposer is None else Speculation(proposer, 5, spare_rows=200),
        )
        self.engine, self.queue_limit = Engine(scheduler), queue_limit
        self.engine.device = self.device_type(self.cache)
        self.recorded = Recorded(self.engine)
        self.joined: Recorded | None = None  # a record that began in the middle

    def make_cache(self, pages: int, page_size: int, chunk: int) -> PagedCache:
        return self.cache_type(pages, page_size)

    @rule(burst=st.lists(ARRIVALS, min_size=1, max_size=4))
    def submit(self, burst: list[Arrival]) -> None:
        for arrival in burst:
            self.arrive(*arrival)

    def arrive(
        self,
        beginning: tuple[int, ...],
        ending: int,
        max_tokens: int,
        priority: int = 0,
        salt: str = "",
        timeout: float | None = None,
        ignore_eos: bool = True,
        tenant: str = "",
    ) -> Request | None:
        """Submit a request. None if it had to be refused, and was."""
        engine, limit = self.engine, self.queue_limit
        number = len(engine.requests)
        prompt = (*beginning, *range(number, number + ending)) or (1,)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        one = Request(f"r{number}", prompt, params, priority, engine.now, salt, tenant)
        if len(prompt) > self.cache.max_tokens:
            with pytest.raises(ValueError, match="can never be served"):
                engine.submit(one)
            return None
        if len(waiting_of(engine.scheduler)) == limit:
            with pytest.raises(QueueFullError):
                engine.submit(one)
            return None
        engine.submit(one, timeout=timeout)
        return one

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(turns=st.integers(1, 6))
    def steps(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @precondition(lambda self: len(self.engine.in_flight) <= self.ahead)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.in_flight)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "well", "failed"]))
    def commit(self, data: st.DataObject, how: str) -> None:
        engine, failed = self.engine, {}
        if how == "failed":
            failed = {data.draw(st.integers(0, len(engine.in_flight[0]) - 1)): "NaN in its logits"}
        engine.commit(failed)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), mishap=st.sampled_from(["abort", "error", "late", "lost", "again"]))
    def mishap(self, data: st.DataObject, mishap: str) -> None:
        """End a request at any moment, also one that has ended already and is still in flight; or lose a step."""
        engine, scheduler = self.engine, self.engine.scheduler
        here = [sequence.request for sequence in scheduler.sequences]
        one = data.draw(st.sampled_from(here or list(engine.requests.values())))
        had_ended = one.finished
        if mishap == "abort":
            assert scheduler.finish(one, FinishReason.ABORT, engine.now) == (not had_ended)
        elif mishap == "error":
            assert scheduler.finish(one, FinishReason.ERROR, engine.now, "its tokenizer failed") == (not had_ended)
        elif mishap == "late":
            engine.now += 3
        elif mishap == "lost":
            engine.discard_in_flight()
        elif one in here or had_ended:
            with pytest.raises(ValueError, match=r"only a new request can be submitted|is here already"):
                scheduler.submit(one)

    @rule()
    def join(self) -> None:
        """A record begins now."""
        if self.joined is not None:
            self.joined.close()
        self.joined = Recorded(self.engine)

    # These cases have rules of their own: the rules above reach them too seldom.

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def end_in_flight(self, data: st.DataObject, reason: FinishReason) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        if not engine.in_flight:
            engine.plan()
        if running := [piece.request for batch in engine.in_flight for piece in batch if not piece.request.finished]:
            one = data.draw(st.sampled_from(running))
            scheduler.finish(one, reason, engine.now, "its text is broken" if reason is FinishReason.ERROR else None)
            assert one.finished
            assert one in [sequence.request for sequence in scheduler.running_set.leaving]
            Anything.seen["ended in flight"] += 1

    @rule(turns=st.integers(0, 8))
    def be_late(self, turns: int) -> None:
        """A request with a short deadline arrives, which passes while it waits, runs, is in flight or preempted."""
        engine = self.engine
        late = self.arrive((), 5, 30, timeout=turns + 1)
        for _ in range(turns):
            engine.step()
        engine.now += 1
        while len(engine.in_flight) > self.ahead:
            engine.commit()
        engine.plan()
        assert late is None or late.finished

    @precondition(lambda self: len(self.engine.scheduler.sequences) < 8)
    @rule()
    def crowd(self) -> None:
        """Three requests arrive with prompts that fill the pool, so that a running request is preempted."""
        engine, running_set, cache = self.engine, self.engine.scheduler.running_set, self.cache
        pages = cache.usage.total - running_set.watermark // cache.page_size
        for _ in range(3):
            self.arrive((), pages // 2 * cache.page_size, 2 * cache.page_size + running_set.watermark // 2)
        preemptions = running_set.num_preemptions
        for _ in range(40):
            if running_set.num_preemptions > preemptions:
                break
            engine.step()

    @invariant()
    def holds(self) -> None:
        Anything.rules_run += 1
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        for recorded in (self.recorded, self.joined):
            if recorded is not None:
                recorded.check()
        if not self.cache.shares:  # a cache that shares may replace a page by its duplicate while it is read
            for page in self.engine.device.pages_in_flight:
                assert self.cache.allocator.count(page) > 0, f"page {page} is free, and a step in flight reads it"
        speculation = speculation_in(self.engine.scheduler)
        if speculation is not None and speculation.draft_model is not None:
            check_cache(speculation.draft_model.cache)
        running_set = self.engine.scheduler.running_set
        Anything.seen += Counter(leaving=len(running_set.leaving), pool_full=running_set.did_not_fit is not None)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.in_flight:
                self.engine.commit()
            self.engine.run().check_the_end()
            self.holds()
            Anything.seen += Counter(reason.value for reason in self.engine.ended.values())
            Anything.seen += Counter(f"held: {why}" for why in self.recorded.whys)
            Anything.seen["preempted"] += self.engine.scheduler.running_set.num_preemptions
            Anything.seen["pending preemption"] += self.engine.pending_preemptions
            if (speculation := speculation_in(self.engine.scheduler)) is not None:
                assert self.recorded.accepted == sum(speculation.accepted)
                Anything.seen["accepted"] += sum(speculation.accepted)
                Anything.seen["rejected"] += speculation.drafted - sum(speculation.accepted)


def run_machine(
    cache_type: type[PagedCache],
    how: str,
    examples: int,
    rarely: int,
    turns: Callable[[int | None], Turns] = FairQueues,
    machine: type[Anything] = Anything,
) -> int:
    """The number of rules that were run. Each rare case is counted, and must have happened."""

    class Machine(machine):  # type: ignore[misc, valid-type]
        pass

    Machine.cache_type, Machine.how, Machine.ahead, Machine.turns = cache_type, how, int(how == "ahead"), turns
    Anything.rules_run, Anything.seen = 0, Counter()
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=60, derandomize=True, deadline=None)
    )
    rare = [
        "preempted",
        "leaving",
        "pool_full",
        "ended in flight",
        "stop",
        "length",
        "abort",
        "error",
        "timeout",
    ]
    rare += ["pending preemption"] if how == "ahead" else []
    rare += ["accepted", "rejected"] if how.startswith("with") else []
    rare += [f"held: {why}" for why in ("tokens", "places", "pages")]
    rare += ["held: fairness"] if turns is FairQueues else []
    assert {what: Anything.seen[what] for what in rare if Anything.seen[what] < rarely} == {}
    return Anything.rules_run


HOW = "one by one", "ahead", "with drafts", "with a draft model"
SETTINGS = [(cache_type, how) for cache_type in (PagedCache, PrefixCache) for how in HOW]


@pytest.mark.parametrize(("cache_type", "how"), SETTINGS)
def test_any_order_of_events(cache_type: type[PagedCache], how: str) -> None:
    assert run_machine(cache_type, how, examples=12, rarely=3) >= 600


@pytest.mark.parametrize(("cache_type", "how"), [(PagedCache, "one by one"), (PrefixCache, "ahead")])
def test_any_order_of_events_in_one_queue(cache_type: type[PagedCache], how: str) -> None:
    assert run_machine(cache_type, how, examples=12, rarely=3, turns=OneQueue) >= 600


@pytest.mark.slow
@pytest.mark.parametrize(("cache_type", "how"), SETTINGS)
def test_thirty_thousand_rules_hold(cache_type: type[PagedCache], how: str) -> None:
    """Five thousand for each of six settings."""
    assert run_machine(cache_type, how, examples=130, rarely=50) >= 5_000
