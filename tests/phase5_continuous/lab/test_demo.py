import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from phase0_request.request import RequestState
from phase5_continuous.lab import view
from phase5_continuous.lab.demo import main
from phase5_continuous.lab.world import DECODE, LEFT_OUT, PREEMPTED, PREFILL, WAITING, WINDOW, Show, World
from tests.terminal import after_the_view, on_a_terminal

DEMO = [sys.executable, "-m", "phase5_continuous"]


def drawn(world: World, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as captured:
        console.print(view.picture(world, width, height))
    return captured.get().splitlines()


def test_a_strip_shows_the_steps_of_a_request() -> None:
    """It has one decode for each token after the first, and waits only before its first step."""
    world, lives = World(Show()), dict[str, str]()
    seen = set[str]()
    while world.going:
        world.step()
        for name, strip in world.strips.items():
            lives[name] = "".join(strip.signs)
    answers = {f"r{number}": one.answer for number, one in enumerate(Show().trace().arrivals())}
    assert len(lives) == 60
    for name, life in lives.items():
        seen |= set(life)
        assert re.fullmatch(f"{WAITING}*[{PREFILL}{DECODE}{PREEMPTED}{LEFT_OUT}]+", life)
        if PREEMPTED not in life:
            assert life.count(DECODE) == answers[name] - 1
    assert seen >= {WAITING, PREFILL, DECODE, PREEMPTED}
    assert world.scheduler.running_set.num_preemptions > 0


def test_a_running_request_without_tokens_in_a_step_is_shown_as_left_out() -> None:
    """A budget of four tokens a step, and more than four requests that could have one."""
    world, seen = World(Show(budget=4, chunk=4, pages=400, requests=20)), set[str]()
    while world.going:
        world.step()
        seen |= {strip.signs[-1] for strip in world.strips.values()}
        assert sum(world.tokens) <= 4 * len(world.tokens)
    assert LEFT_OUT in seen
    assert PREEMPTED not in seen


def test_the_picture_shows_the_current_step() -> None:
    world = World(Show())
    while world.simulation.preemptions == 0:
        world.step()
    lines = drawn(world)
    running_set = world.scheduler.running_set
    assert re.match(rf"step {world.steps} +[\d.]+ s +{len(running_set.running)} running", lines[0])
    assert f"{len(running_set.preempted)} preempted" in lines[0]
    strips = [line for line in lines if re.match(r"r\d+ ", line)]
    assert len(strips) == sum(s.first + len(s.signs) > max(world.steps - 73, 0) for s in world.strips.values())
    assert any(line.endswith(PREEMPTED) for line in strips)
    usage = world.scheduler.cache.usage
    assert f"{usage.referenced} pages in use, {usage.cached} cached, {usage.free} free" in lines[-1]
    assert lines[-3].startswith("pages ")
    assert lines[-2].startswith("tokens ")


@pytest.mark.parametrize("options", [{}, {"pages": 200, "requests": 120, "rate": 100.0}, {"policy": "priority"}])
def test_every_running_request_has_a_strip_in_80_columns_by_23_lines(options: dict[str, Any]) -> None:
    """However many wait or have ended. Requests without a strip are counted."""
    world, crowded = World(Show(**options)), 0
    while world.going:
        world.step()
        if world.steps % 5:
            continue
        lines = drawn(world, 80, 23)
        names = {line.split()[0] for line in lines if re.match(r"r\d+ ", line)}
        states = {sequence.request.id: sequence.request.state for sequence in world.scheduler.sequences}
        assert {name for name, state in states.items() if state is RequestState.RUNNING} <= names
        if set(states) - names:
            assert names <= set(states)  # no ended request is shown while a live one is hidden
        recent = sum(strip.first + len(strip.signs) > max(world.steps - 73, 0) for strip in world.strips.values())
        more = [int(line.split()[0]) for line in lines if line.endswith(" more")]
        assert more == ([recent - len(names)] if recent > 17 else [])
        crowded += bool(more)
    assert crowded > 20


def test_strips_are_in_the_order_of_arrival() -> None:
    world = World(Show(requests=200, rate=100.0, policy="priority"))
    while world.steps < 300:
        world.step()
    numbers = [int(line.split()[0][1:]) for line in drawn(world, 80, 23) if re.match(r"r\d+ ", line)]
    assert len(numbers) == 16
    assert numbers == sorted(numbers)


def test_strips_of_requests_that_ended_long_ago_are_dropped() -> None:
    world = World(Show(requests=150))
    while world.going:
        world.step()
    assert world.steps > 2 * WINDOW
    assert 0 < len(world.strips) < 120
    assert all(strip.first + len(strip.signs) >= world.steps - WINDOW for strip in world.strips.values())


def test_throughput_is_that_of_the_last_second_or_of_the_time_so_far() -> None:
    world, tokens = World(Show()), list[tuple[float, int]]()
    assert world.throughput() == 0
    while world.going:
        world.step()
        assert world.last is not None
        now = world.simulation.clock.now
        tokens.append((now, sum(event.token is not None for event in world.last.events)))
        lately = sum(count for time, count in tokens if time > now - 1)
        assert world.throughput() == pytest.approx(lately / min(now, 1))
    assert now > 2


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_cuts_no_word(width: int) -> None:
    """The lines around the strips leave out what does not fit, but never tokens/s."""
    world = World(Show(pages=200, requests=200, rate=100.0))
    while world.steps < 300:
        world.step()
    (*_, wide), lines = drawn(world, 200), drawn(world, width, 12)
    assert lines[-1] == wide[: len(lines[-1])]
    for line, whole in zip((*lines[:2], lines[-1]), (*drawn(world, 200)[:2], wide), strict=True):
        assert whole == line or whole.startswith(f"{line}  ")
    assert lines[-1].split()[1] == "tokens/s"


def test_the_summary_counts_refused_and_failed_requests() -> None:
    done = subprocess.run([*DEMO, "--pages", "2"], capture_output=True, text=True, timeout=60)
    names, figures = (line.split() for line in done.stdout.splitlines()[-2:])
    assert names[-2:] == ["refused", "failed"]
    ended, refused, failed = int(figures[0]), int(figures[-2]), int(figures[-1])
    assert ended + refused == 60
    assert 0 < failed < ended
    assert refused > 0


def test_a_terminal_without_the_characters_gets_an_error_that_names_the_remedy() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "characters that ascii lacks: set PYTHONIOENCODING=utf-8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 23), (200, 60)])
def test_a_picture_is_no_larger_than_its_terminal(width: int, height: int) -> None:
    world = World(Show())
    while world.going:
        world.step()
        if world.steps % 40 == 0:
            lines = drawn(world, width, height)
            assert len(lines) <= height
            assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--pages=0", "num_pages must be an integer from 1, got 0"),
        ("--rate=0", "rate must be above 0 and finite, got 0.0"),
        ("--steps-per-second=nan", "steps-per-second must be above 0 and finite, got nan"),
        ("--policy=best", "invalid choice: 'best'"),
        ("--budget=1", "max_batched_tokens must be at least 2"),
    ],
)
def test_bad_options_are_named(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])
    done = capsys.readouterr()
    assert done.out == ""
    assert words in done.err.splitlines()[-1]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix"])
def test_the_command_prints_snapshots_when_piped(policy: str) -> None:
    """Without pauses: at this rate a terminal would show it for hours."""
    command = [*DEMO, "--steps-per-second", "0.1", "--policy", policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert len(re.findall(r"^step \d+ ", done.stdout, re.MULTILINE)) == 3
    assert re.search(r"^ +60 .* ms +\d+ *$", done.stdout.splitlines()[-1])


def test_ctrl_c_in_the_middle_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(*DEMO, until=b"running")
    assert status == 130
    assert re.search(rb"Stopped at step \d+\.\r\n$", after_the_view(seen))
    assert b"Traceback" not in seen


def test_a_run_on_a_terminal_ends_by_itself_with_the_figures() -> None:
    status, seen = on_a_terminal(*DEMO, "--steps-per-second", "10000")
    assert status == 0
    assert b"preempted" in after_the_view(seen)
