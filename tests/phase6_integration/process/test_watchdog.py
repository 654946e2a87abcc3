"""The watchdog, on the event loop of the standard library and on uvloop, by a clock that the test turns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from phase6_integration.process import watchdog
from phase6_integration.process.watchdog import Watchdog

LIMIT, IDLE = 100.0, 10.0


@dataclass
class Scene:
    """A watchdog, the clock it reads, and the timers that it asks for: when they are due, and what they call."""

    now: float = 1000.0
    works: bool = True
    barks: int = 0
    pings: int = 0
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dog = Watchdog(LIMIT, IDLE, has_work=lambda: self.works, ping=self.ping, on_hang=self.bark)

    def bark(self) -> None:
        self.barks += 1

    def ping(self) -> None:
        self.pings += 1

    def call_later(self, wait: float, look: Callable[[], None]) -> None:
        self.timers.append((self.now + wait, look))

    def until_it_looks(self, late: float = 0.0) -> None:
        due, look = self.timers.pop()
        self.now = due + late
        look()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(watchdog, "asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


def over(self: Scene, seconds: float) -> None:
    """Let the timers fire that are due in this time."""
    end = self.now + seconds
    while self.timers and self.timers[0][0] <= end:
        self.until_it_looks()
    self.now = end


def test_silence_with_work_is_reported_once(scene: Scene) -> None:
    scene.dog.start()
    over(scene, LIMIT - 1)
    got = scene.barks, scene.pings
    assert got == (0, 0), f"busy, one second before the limit: reports and pings are {got}"
    over(scene, 1)
    assert (scene.barks, scene.timers) == (1, []), (
        f"at the limit: reported {scene.barks} times, {len(scene.timers)} timers"
    )


def test_every_message_delays_it_and_none_sets_a_timer(scene: Scene) -> None:
    scene.dog.start()
    for _ in range(60):
        scene.now += 1
        scene.dog.heard()
    assert len(scene.timers) == 1, "a message has set a timer"
    over(scene, LIMIT - 1)
    assert scene.barks == 0, "reported before a whole limit has passed since the last message"
    over(scene, 1)
    assert scene.barks == 1, "not reported a whole limit after the last message"


def test_an_idle_engine_that_answers_pings_is_well(scene: Scene) -> None:
    scene.works = False
    scene.dog.start()
    for n in range(1, 6):
        assert scene.pings == n, f"{n - 1} pings were answered: {n} should be sent, {scene.pings} were"
        scene.dog.heard()
        over(scene, IDLE)
    assert scene.barks == 0, "an engine that answers every ping was reported"


@pytest.mark.parametrize("work_comes", [False, True])
def test_a_ping_without_an_answer_is_reported_also_if_work_comes(scene: Scene, work_comes: bool) -> None:
    scene.works = False
    scene.dog.start()
    scene.now += 1
    if work_comes:
        scene.works = True
        scene.dog.work_begins()
    over(scene, IDLE - 1)
    assert (scene.pings, scene.barks) == (1, 1), "not after the whole limit of a busy engine"


def test_an_engine_that_becomes_idle_is_pinged_within_the_limit_for_idle_ones(scene: Scene) -> None:
    scene.dog.start()
    scene.works = False
    over(scene, IDLE)
    assert scene.pings == 1, f"{IDLE:g} seconds later it was not pinged: the timer waits for the limit of a busy engine"


def test_idle_time_does_not_count_as_silence(scene: Scene) -> None:
    scene.works = False
    scene.dog.start()
    scene.dog.heard()
    scene.now += IDLE - 1
    scene.works = True
    scene.dog.work_begins()
    over(scene, LIMIT - 1)
    assert scene.barks == 0, "idle time was counted as silence"
    over(scene, 1)
    assert scene.barks == 1, "the silence counts from the first request after the idle time"


@pytest.mark.parametrize(("late", "barks"), [(0.9, 1), (30.0, 0)])
def test_a_pause_of_this_process_does_not_count_as_silence(scene: Scene, late: float, barks: int) -> None:
    """As in a container that was paused: the engine's words lie in the socket, and the timer is long due."""
    scene.dog.start()
    over(scene, LIMIT - 1)
    scene.until_it_looks(late=late)
    assert scene.barks == barks, f"the timer fired {late:g} seconds late"
    if not barks:
        over(scene, LIMIT)
        assert scene.barks == 1, "a whole limit later it is the engine's silence"
