import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from phase5_continuous import view
from phase5_continuous.demo import DECODE, LEFT_OUT, PREEMPTED, PREFILL, WAITING, Show, World
from tests.terminal import after_the_view, on_a_terminal

DEMO = [sys.executable, "-m", "phase5_continuous"]


def drawn(world: World, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as captured:
        console.print(view.picture(world, width, height))
    return captured.get().splitlines()


def test_a_strip_is_what_a_request_did() -> None:
    """As many decodes as tokens after the first, whatever came between; and it waits before, and never after."""
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
    assert world.scheduler.residents.preemptions > 0


def test_who_runs_and_has_no_tokens_of_a_step_is_left_out() -> None:
    """A budget of four tokens a step, with more than four who could have one."""
    world, seen = World(Show(budget=4, chunk=4, pages=400, requests=20)), set[str]()
    while world.going:
        world.step()
        seen |= {strip.signs[-1] for strip in world.strips.values()}
        assert sum(world.tokens) <= 4 * len(world.tokens)
    assert LEFT_OUT in seen
    assert PREEMPTED not in seen


def test_the_picture_shows_the_moment() -> None:
    world = World(Show())
    while world.simulation.preemptions == 0:
        world.step()
    lines = drawn(world)
    residents = world.scheduler.residents
    assert re.match(rf"step {world.steps} +[\d.]+ s +{len(residents.running)} running", lines[0])
    assert f"{len(residents.preempted)} preempted" in lines[0]
    strips = [line for line in lines if re.match(r"r\d+ ", line)]
    assert len(strips) == sum(s.first + len(s.signs) > max(world.steps - 73, 0) for s in world.strips.values())
    assert any(line.endswith(PREEMPTED) for line in strips)
    usage = world.scheduler.cache.usage
    assert f"{usage.referenced} pages in use, {usage.cached} kept, {usage.free} free" in lines[-1]
    assert lines[-3].startswith("pages ")
    assert lines[-2].startswith("tokens ")


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
def test_bad_options_are_named(option: str, words: str) -> None:
    done = subprocess.run([*DEMO, option], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix"])
def test_the_command_prints_snapshots_when_piped(policy: str) -> None:
    """And waits for nothing: at this rate a terminal would show it for hours."""
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
