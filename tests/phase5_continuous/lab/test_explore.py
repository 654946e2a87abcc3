"""Every state of a small engine: its promises hold, planted bugs are found, and a story leads to what it says."""

import json
import signal
import time
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from phase0_request.batch import Batch, Event, StepOutput
from phase0_request.queue import RequestQueue, SequenceState
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import StepPlan, TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.admission import Admission
from phase5_continuous.extras.fairness import FairQueues, FairShare, places_of
from phase5_continuous.extras.record.record_file import read
from phase5_continuous.extras.record.replay import Replay
from phase5_continuous.lab import explore as command
from phase5_continuous.lab.exploring.planting import ROOT, bug, bugs, planted
from phase5_continuous.lab.exploring.search import Ways, explore
from phase5_continuous.lab.exploring.setting import Setting, kinds
from phase5_continuous.lab.exploring.story import tell
from phase5_continuous.lab.exploring.world import KEY, Happening, World
from phase5_continuous.lab.exploring.worlds import BUGS, WORLDS
from phase5_continuous.running import RunningSet
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.turns import OneQueue, Turns

FAST = "smallest", "small", "outgrown", "failures"
SMALLEST = WORLDS["smallest"]
KNOWN = json.loads((ROOT / "chapters/results/phase5_explore.json").read_text())["figures"]["bugs"]


def doubled(scheduler: Scheduler, batch: Batch, output: StepOutput, now: float) -> list[Event]:
    events = COMMIT(scheduler, batch, output, now)
    return [*events, *events[-1:]]


def enter_with_none(share: FairShare, tenant: str) -> None:
    share._live[tenant] += 1
    share.served.setdefault(tenant, 0.0)


def charge_without_virtual_time(share: FairShare, tenant: str, tokens: int) -> None:
    share.served[tenant] += tokens


def charge_nothing(share: FairShare, tenant: str, tokens: int) -> None:
    share.virtual_time += tokens / len(share._live)


def in_turn_backwards(share: FairShare, queues: Mapping[str, Iterable[SequenceState]]) -> Iterator[SequenceState]:
    share.virtual_time = max(share.virtual_time, min(share.served[tenant] for tenant in queues))
    return chain(*reversed(queues.values()))  # type: ignore[call-overload]


def in_turn_without_virtual_time(
    share: FairShare, queues: Mapping[str, Iterable[SequenceState]]
) -> Iterator[SequenceState]:
    before, order = share.virtual_time, [*IN_TURN(share, queues)]
    share.virtual_time = before
    return iter(order)


def of_twice_the_budget(
    owner: type[StepPlan], limits: TokenBudget, page_size: int, num_decodes: int, pending: Sequence[int]
) -> StepPlan:
    return OF_STEP(replace(limits, max_batched_tokens=2 * limits.max_batched_tokens), page_size, num_decodes, pending)


def fit_all(step: StepPlan, start: int, pending: int) -> int:
    return min(pending, step.left)


def victim_of_the_fewest(queues: FairQueues, running: Iterable[SequenceState]) -> SequenceState:
    places = places_of(running)
    return max(running, key=lambda each: (-places[each.request.tenant], each.key))


def twice_the_watermark(running_set: RunningSet, cache: PagedCache, turns: Turns, watermark: int) -> None:
    RUNNING_SET(running_set, cache, turns, 2 * watermark)


COMMIT, IN_TURN, OF_STEP, RUNNING_SET = Scheduler.commit, FairShare.in_turn, StepPlan.of_step, RunningSet.__init__
FULL = Setting(kinds=kinds(["aa", "bb", "z"], 3, ["x", "x", "y"]), fair=True, lost=0, ends=())
TENANTS = Setting(kinds=kinds(["a", "b", "z"], 2, ["x", "x", "y"]), places=2, fair=True, lost=0, ends=())


@cache
def keeps(setting: Setting) -> bool:
    return explore(setting, processes=1).broken is None


MUTANTS: list[tuple[str, type, str, Any, Setting]] = [  # of promises that no planted bug breaks
    (
        "the order is kept",
        OneQueue,
        "reorder",
        lambda queue, candidates, place: candidates[::-1],
        replace(SMALLEST, places=1),
    ),
    (
        "none waits beside room that fits",
        Admission,
        "is_open",
        property(lambda admission: bool(admission.turns) and not admission.running_set.running),
        SMALLEST,
    ),
    (
        "the last in rank is preempted",
        OneQueue,
        "victim",
        lambda queue, running: min(running, key=lambda each: each.key),
        SMALLEST,
    ),
    ("tokens come once and in order", Scheduler, "commit", doubled, SMALLEST),
    ("every page comes back", PrefixCache, "reset", lambda cache: 0, SMALLEST),
    (
        "a full queue refuses requests",
        RequestQueue,
        "add",
        lambda queue, entry, again=False: insort(queue._entries, entry, key=KEY),
        replace(SMALLEST, limit=1),
    ),
    (
        "running requests keep their pages",
        Scheduler,
        "plan_again",
        Scheduler.discard_in_flight,
        replace(SMALLEST, also=("again",)),
    ),
    (
        "the tenant with the fewest tokens is next",
        FairShare,
        "in_turn",
        in_turn_backwards,
        replace(TENANTS, places=1),
    ),
    ("a tenant with few requests takes a place", FairQueues, "gives_way", lambda queues, running: None, TENANTS),
    (
        "a place is taken from the tenant with the most",
        FairQueues,
        "gives_way",
        lambda queues, running: queues.victim(running),
        TENANTS,
    ),
    ("a tenant pays for its tokens", FairShare, "charge", charge_nothing, TENANTS),
    ("no tenant saves up tokens", FairShare, "enter", enter_with_none, TENANTS),
    ("no tenant saves up tokens", FairShare, "charge", charge_without_virtual_time, TENANTS),
    ("no tenant saves up tokens", FairShare, "in_turn", in_turn_without_virtual_time, TENANTS),
    (
        "none waits beside room that fits",
        RunningSet,
        "__init__",
        twice_the_watermark,
        replace(WORLDS["watermark"], kinds=kinds(["aa", "zz"])),
    ),
    ("the tenant with the most is preempted", FairQueues, "victim", victim_of_the_fewest, FULL),
    (
        "blocked requests are preempted first",
        OneQueue,
        "victim",
        lambda queue, running: max(running, key=KEY),
        replace(WORLDS["late"], kinds=kinds(["aab", "zz"], 3), ends=(), lost=0),
    ),
    (
        "a step keeps its budget",
        StepPlan,
        "of_step",
        classmethod(of_twice_the_budget),
        replace(SMALLEST, budget=2, chunk=2),
    ),
    ("a chunk keeps its size", StepPlan, "fit", fit_all, replace(SMALLEST, chunk=1)),
    ("what has ended leaves", Scheduler, "finish", lambda *_: True, SMALLEST),
]


@pytest.mark.parametrize("name", FAST)
def test_every_state_of_a_small_engine_keeps_its_promises(name: str) -> None:
    found = explore(WORLDS[name], processes=1)
    assert found.broken is None
    assert found.whole
    assert found.longest is not None
    assert found.longest <= WORLDS[name].bound


def test_every_way_in_one_piece_leads_to_the_state_that_was_found_and_its_record_too() -> None:
    for ahead, also in ((0, ("reset",)), (1, ("again", "fail"))):
        setting = replace(SMALLEST, ahead=ahead, kinds=kinds(["aab", "aab"]), also=also)
        found = explore(setting, processes=1, again=True)
        assert found.broken is None
        assert found.states > 40


def test_lost_steps_free_pages_in_the_order_of_submission_and_not_of_priority() -> None:
    found = explore(WORLDS["priorities"], processes=1, again=True)
    assert found.broken is None
    assert found.whole


@pytest.mark.parametrize(("more", "last"), [({"fair": True}, "plan"), ({"also": ("again",)}, "again")])
def test_a_story_in_which_all_is_well_ends_with_its_last_event(more: dict[str, Any], last: str) -> None:
    begin = [Happening("submit", 0), Happening("submit", 1), Happening("plan"), Happening("end", 0, "abort")]
    story = [
        *begin,
        Happening("commit", how=(0, 0)),
        *(Happening("plan") for _ in range(last == "again")),
        Happening(last),
    ]
    assert len([*tell(replace(SMALLEST, **more), story)]) == len(story)


def test_requests_whose_masks_are_late_end_once_these_are_there() -> None:
    found = explore(replace(WORLDS["late"], kinds=kinds(["aab"], 3)), processes=1, again=True)
    assert found.broken is None
    assert found.longest is not None
    assert found.longest <= WORLDS["late"].bound


def test_two_processes_find_what_one_finds() -> None:
    one, two = (explore(SMALLEST, processes=processes) for processes in (1, 2))
    assert (one.states, one.edges, one.depth, one.longest) == (two.states, two.edges, two.depth, two.longest)


def test_requests_that_differ_in_names_alone_come_in_one_order() -> None:
    alike, other = (
        explore(replace(SMALLEST, kinds=kinds(prompts)), processes=1) for prompts in (["aa", "bb"], ["aa", "bc"])
    )
    assert alike.states < other.states


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_breaks_its_promise_and_its_story_can_be_replayed(name: str, tmp_path: Path) -> None:
    file, replayed = tmp_path / "story.jsonl", Replay()
    with bug(name):
        found = explore(BUGS[name], processes=1, again=True)
        assert found.broken is not None
        assert {"broken": found.broken.promise, "events": len(found.story)}.items() <= KNOWN[name].items()
        *told, _ = tell(BUGS[name], found.story, file)  # and last, what is broken then
    assert len(told) == len(found.story)
    for line in read(file):
        replayed.apply(line)
    assert {each.id for each in replayed.requests.values()} == {
        sentence.split()[0] for sentence in told if "arrives" in sentence
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0]}-{mutant[2]}")
def test_an_engine_that_does_otherwise_breaks_its_promise(
    mutant: tuple[str, type, str, Any, Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    promise, owner, name, other, setting = mutant
    assert promise not in {each["broken"] for each in KNOWN.values()}
    assert keeps(setting)
    monkeypatch.setattr(owner, name, other)
    found = explore(setting, processes=1)
    assert found.broken is not None
    assert found.broken.promise == promise


def test_a_planted_bug_is_gone_afterwards() -> None:
    with bug("5b"):
        pass
    assert explore(BUGS["5b"], processes=1).broken is None


def test_an_engine_that_forgets_what_runs_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.plan

    def plan(self: Scheduler, now: float) -> Batch:
        return Batch() if self.running_set.running else real(self, now)

    monkeypatch.setattr(Scheduler, "plan", plan)
    found = explore(replace(SMALLEST, kinds=kinds(["aa"])), processes=1)
    assert found.broken is not None
    assert (found.broken.promise, found.broken.how) == (
        "every request ends",
        "no step is planned or in flight, and r1 are live",
    )
    assert [event.what for event in found.story] == ["submit", "plan", "commit"]


def test_an_event_that_never_ends_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: Scheduler, now: float) -> Batch:
        while self.running_set.running or self.turns:
            pass
        return Batch()

    monkeypatch.setattr(Scheduler, "plan", plan)
    monkeypatch.setattr("phase5_continuous.lab.exploring.world.PATIENCE", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    found = explore(SMALLEST, processes=1)
    assert found.broken is not None
    assert found.broken.promise == "no error in the engine (TimeoutError)"
    told = list(tell(SMALLEST, found.story))
    assert told[:2] == ["r0 arrives with the prompt aa", "a step is planned"]
    assert signal.getsignal(signal.SIGVTALRM) is before


def test_an_engine_that_sleeps_takes_no_time_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.plan

    def plan(self: Scheduler, now: float) -> Batch:
        time.sleep(0.1)
        return real(self, now)

    monkeypatch.setattr(Scheduler, "plan", plan)
    monkeypatch.setattr("phase5_continuous.lab.exploring.world.PATIENCE", 0.08)
    assert explore(replace(SMALLEST, kinds=kinds(["a"], 1)), processes=1).broken is None


def test_without_its_clock_nothing_is_explored_and_no_engine_is_blamed() -> None:
    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="main thread"):
        threads.submit(explore, SMALLEST, processes=1).result()


def test_a_circle_of_states_is_no_way_to_the_end() -> None:
    """State 0 leads to 1 and 2, which ends; 1 leads to 2, and then back to itself by way of 0."""
    ways = Ways()
    for number, (ahead, steps) in enumerate([([1, 2], [1, 1]), ([2], [1]), ([], [])]):
        ways.parent = ways.parent if number == 0 else ways.parent + ways.parent[:1]
        ways.next.extend(ahead)
        ways.steps.extend(steps)
        ways.begin.append(len(ways.next))
    assert ways.longest() == (2, 0)
    ways.next[2] = 0
    assert ways.longest()[0] is None


def test_a_promise_of_ones_own_is_asked_in_every_state() -> None:
    asked = set[bytes]()

    def at_most_one_runs(world: World) -> str | None:
        asked.add(world.encode())
        running = len(world.scheduler.running_set.running)
        return f"{running} run" if running > 1 else None

    found = explore(SMALLEST, at_most_one_runs, processes=1)
    assert found.broken is not None
    assert (found.broken.promise, found.broken.how) == ("your own", "2 run")
    assert [event.what for event in found.story] == ["submit", "submit", "plan"]
    asked.clear()
    found = explore(SMALLEST, lambda world: asked.add(world.encode()), processes=1)  # type: ignore[func-returns-value]
    assert len(asked) >= found.states - 1


def test_the_command_prints_the_story_and_writes_its_film(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film, figures = tmp_path / "film.jsonl", tmp_path / "figures.json"
    options = ["--bug", "4b", "--processes", "1", "--film", str(film), "--json", str(figures)]
    assert command.main(options) == 0
    shown = capsys.readouterr().out
    assert "request r0 has published 6 tokens, and computed 4" in " ".join(shown.split())
    assert "3  a step is committed: no token yet" in shown
    first, *_, last = map(json.loads, film.read_text().splitlines())
    assert first["record"] == 1
    assert "request r0 has published 6 tokens, and computed 4" in last["broken"]
    assert json.loads(figures.read_text())["figures"]["world"]["states"] > 1


def test_the_command_fails_if_a_way_to_the_end_is_longer_than_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Setting, "bound", 2)
    assert command.main(["--world", "smallest", "--processes", "1"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Broken: every request ends in the steps that are promised" in shown
    assert "3 steps lead from this state to the end, and 2 are promised" in shown
    assert "All promises hold" not in shown


def test_the_command_plants_no_bug_that_a_scheduler_cannot_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(BUGS) <= set(bugs())
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["--bug", "2a"])
    assert "choose from" in (shown := capsys.readouterr().err)
    assert "5g" in shown


def test_a_text_that_changes_no_function_is_not_planted() -> None:
    file = "phase5_continuous/scheduler.py"
    text = (ROOT / file).read_text("utf-8")
    with pytest.raises(AssertionError, match="all is the same"), planted(file, f"# one line more\n{text}"):
        pass


def test_the_command_explores_the_world_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    world = ["aa", "zz", "--pages", "3", "--tenants", "x", "y", "--fair", "--tokens", "1", "--drafts", "1"]
    assert command.main([*world, "--processes", "1"]) == 0
    assert "All promises hold" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["aa", "zz", "--tenants", "x"])
    assert "--tenants must be 2, one for each prompt; got 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORLDS if name not in (*FAST, "standard")])
def test_every_state_of_a_larger_engine_keeps_its_promises(name: str) -> None:
    found = explore(WORLDS[name])
    assert found.broken is None
    assert found.whole
    assert found.longest is not None
    assert found.longest <= WORLDS[name].bound
