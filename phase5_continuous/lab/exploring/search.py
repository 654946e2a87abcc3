"""Search: every state of a world, breadth first, by two processes; then the longest way from each to its end.

A state is expanded by the process that has it in its batch. The states themselves are forgotten: of each, its hash, the
state that it was found from and the number of the event are kept, so that the shortest way to any of them can be run
again. A story that breaks a promise is the shortest there is, since all with fewer events have been tried.
"""

import marshal
import multiprocessing
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from phase5_continuous.extras.invariants import SchedulerError, check
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.extras.record.replay import Replay
from phase5_continuous.lab.exploring.promises import BrokenError, Own, follow
from phase5_continuous.lab.exploring.setting import Setting
from phase5_continuous.lab.exploring.world import Happening, World, clock

BATCH = 256  # states that a process expands at once

Edge = tuple[int, int, bytes | None]  # the number of the event, the hash of the state, and the state if it is new


@dataclass
class Found:
    """What a search has found."""

    states: int = 1
    edges: int = 0
    depth: int = 0  # of the state that is farthest from the beginning
    seconds: float = 0.0
    peak_megabytes: float = 0.0  # of this process in its life and the largest that has ended: more than the states
    bytes: int = 0  # of all states in canonical form
    longest: int | None = None  # steps on the longest way to the end, with nothing new arriving
    broken: BrokenError | None = None
    story: list[Happening] = field(default_factory=list)  # the shortest way there
    whole: bool = True  # every state was reached


class Ways:
    """The graph of states: how each was found, and where its requests go with nothing new arriving."""

    def __init__(self) -> None:
        self.number: dict[int, int] = {}  # of a state, by its hash
        self.parent, self.event = array("l", [-1]), array("H", [0])
        self.next, self.begin = array("l"), array("l", [0])  # the successors of state n: next[begin[n]:begin[n + 1]]
        self.steps = array("b")  # whether that successor is a committed step away

    def story(self, number: int) -> list[int]:
        """The numbers of the events that lead to a state."""
        events: list[int] = []
        while number:
            events.append(self.event[number])
            number = self.parent[number]
        return events[::-1]

    def longest(self) -> tuple[int | None, int]:
        """The most steps from any state to the end, and that state; or None, and a state on a circle."""
        steps, todo = array("l", [-1]) * len(self.parent), [0]  # -1: not seen, -2: on the way to it
        for start in range(len(steps)):
            todo = [start] if steps[start] == -1 else []
            while todo:
                state = todo[-1]
                places = range(self.begin[state], self.begin[state + 1])
                if steps[state] == -1:
                    steps[state] = -2
                    for place in places:
                        if steps[self.next[place]] == -2:
                            return None, state
                        if steps[self.next[place]] == -1:
                            todo.append(self.next[place])
                else:
                    if steps[state] == -2:
                        ahead = (steps[self.next[place]] + self.steps[place] for place in places)
                        steps[state] = max(ahead, default=0)
                    todo.pop()
        most = max(steps)
        return most, steps.index(most)


@clock()
def explore(
    setting: Setting, own: Own | None = None, processes: int = 2, most: int = 1 << 40, again: bool = False
) -> Found:
    """Reach every state of a world, or the first `most`, and check each: with `again`, also on the shortest way to it,
    run in one piece."""
    began, found, ways = time.perf_counter(), Found(), Ways()
    world = World(setting)
    start = world.encode()
    ways.number[hash(start)] = 0
    frontier = [start]
    with expanding(setting, own, processes) as expand:
        number = 0
        while frontier and found.broken is None:
            new: list[bytes] = []
            for edges, drain, broken in expand(frontier):
                if broken is not None:
                    event, promise, how = broken
                    found.broken = BrokenError(promise, how)
                    numbers = [*ways.story(number), *([event] if event is not None else [])]
                    found.story = named(setting, numbers)
                    break
                for event, hashed, state in edges:
                    if hashed not in ways.number:
                        assert state is not None
                        ways.number[hashed] = len(ways.parent)
                        ways.parent.append(number)
                        ways.event.append(event)
                        new.append(state)
                        found.bytes += len(state)
                found.edges += len(edges)
                for hashed, step in drain:
                    ways.next.append(ways.number[hashed])
                    ways.steps.append(step)
                ways.begin.append(len(ways.next))
                number += 1
            found.depth += bool(new)
            frontier = new
            if len(ways.parent) >= most:
                found.whole = not frontier
                break
    found.states = len(ways.parent)
    if found.broken is None and found.whole:
        found.longest, state = ways.longest()
        how = "with nothing new arriving, "
        if found.longest is None:
            found.broken = BrokenError("every request ends", f"{how}the engine comes back to this state")
        elif found.longest > setting.bound:
            how += f"{found.longest} steps lead from this state to the end, and {setting.bound} are promised"
            found.broken = BrokenError("every request ends in the steps that are promised", how)
        if found.broken is not None:
            found.story = named(setting, ways.story(state))
    if again and found.broken is None:
        run_again(setting, ways, found)
    found.seconds = time.perf_counter() - began
    found.peak_megabytes = (getrusage(RUSAGE_SELF).ru_maxrss + getrusage(RUSAGE_CHILDREN).ru_maxrss) / 1024
    return found


def run_again(setting: Setting, ways: Ways, found: Found) -> None:
    """Run the shortest way to each state in one piece, with a record. What the form of a state leaves out, such as the
    entries of a heap that no longer count, is there too; the state must be the one that was found, and that of the
    record."""
    hashes = {number: hashed for hashed, number in ways.number.items()}
    for end in sorted({*hashes} - {*ways.parent}):
        numbers, world = ways.story(end), World(setting)
        replay = Replay()
        recorder = Recorder(world.core, replay.apply)
        for place, number in enumerate(numbers, 1):
            world.happen([*world.events()][number])
            recorder.flush()
            try:
                check(world.scheduler)
                compare(replay, world)
            except Exception as error:
                found.broken = BrokenError(f"the engine's invariants ({type(error).__name__})", str(error))
                found.story = named(setting, numbers[:place])
                return
        assert hash(world.encode()) == hashes[end], named(setting, numbers)


def compare(replay: Replay, world: World) -> None:
    """SchedulerError unless a record has the state of the engine."""
    cache, live = world.cache, [sequence.request for sequence in world.ordered()]
    tables = {replay.requests[number].id: pages for number, pages in replay.tables.items()}
    latest = {each.id: each for each in replay.requests.values()}
    told = {request.id: latest[request.id].state for request in live if not request.finished}
    counts = [replay.counts()[page] for page in range(cache.usage.total)]
    if tables != cache.tables or counts != cache.allocator.counts:
        raise SchedulerError(f"the record has the page tables {tables}, and the engine {cache.tables}")
    if told != {request.id: request.state.value for request in live if not request.finished}:
        raise SchedulerError(f"the record has the states {told}")


def named(setting: Setting, numbers: Sequence[int]) -> list[Happening]:
    """The events of these numbers, each among those that may happen in its state. The last one does not happen."""
    world, events = World(setting), list[Happening]()
    for number in numbers:
        if events:
            world.happen(events[-1])
        world.decode(marshal.loads(world.encode()))
        events.append([*world.events()][number])
    return events


# Each process has a world of its own.

Expanded = tuple[list[Edge], list[tuple[int, bool]], tuple[int | None, str, str] | None]


@contextmanager
def expanding(setting: Setting, own: Own | None, processes: int) -> Iterator[Any]:
    """A function that expands the states of a list, in their order."""
    if processes == 1:
        expander = Expander(setting, own)
        yield lambda frontier: map(expander.expand, frontier)
        return
    Expander.shared = Expander(setting, own)  # the processes are forks: they hash alike, and have planted bugs too
    with multiprocessing.get_context("fork").Pool(processes) as pool:

        def expand(frontier: list[bytes]) -> Iterator[Expanded]:
            parts = [frontier[at : at + BATCH] for at in range(0, len(frontier), BATCH)]
            for part in pool.imap(_expand_all, parts):
                yield from marshal.loads(part)

        yield expand


def _expand_all(states: list[bytes]) -> bytes:
    assert Expander.shared is not None
    return marshal.dumps([Expander.shared.expand(state) for state in states])


class Expander:
    """Finds what follows a state."""

    shared: "Expander | None" = None

    def __init__(self, setting: Setting, own: Own | None) -> None:
        self.world = World(setting)
        self.own = own
        self.seen = set[int]()  # the states that it has sent

    def expand(self, state: bytes) -> Expanded:
        """Where each event leads, and which of these states are next if nothing new arrives; or what is broken."""
        world, edges, before = self.world, list[Edge](), marshal.loads(state)
        world.decode(before)
        events = [*world.events()]
        plans, commits, masks = [], [], []
        for number, event in enumerate(events):
            if number:
                world.decode(before)
            in_time = event.what == "commit" and world.is_in_time(event)
            try:
                after = follow(world, before, event, self.seen, self.own)
            except BrokenError as broken:
                return [], [], (number, broken.promise, broken.how)
            hashed = hash(after)
            edges.append((number, hashed, None if hashed in self.seen else after))
            self.seen.add(hashed)
            if event.what == "plan" and after != state:
                plans.append((hashed, False))
            elif in_time:
                commits.append((hashed, True))
            elif event.what == "mask":
                masks.append((hashed, False))
        drain = plans or commits or masks
        return edges, drain, self.end(state) if not drain else None

    def end(self, state: bytes) -> tuple[None, str, str] | None:
        """What is wrong with a state from which no step leads on: all must have ended, and each page be free."""
        world = self.world
        world.decode(marshal.loads(state))
        if here := [sequence.request.id for sequence in world.ordered()]:
            return None, "every request ends", f"no step is planned or in flight, and {', '.join(here)} are live"
        world.cache.reset() if hasattr(world.cache, "reset") else None
        usage = world.cache.usage
        return None if usage.free == usage.total else (None, "every page comes back", f"all have ended: {usage}")
