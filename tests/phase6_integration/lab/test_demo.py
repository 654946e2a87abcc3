"""The demo shows what the engine did."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from phase0_request.lab.corpus.facts import read
from phase6_integration.lab import view
from phase6_integration.lab.demo import main
from phase6_integration.lab.show import Show
from phase6_integration.lab.world import INSTRUCTIONS, World, open_engine, questions
from tests.terminal import after_the_view, on_a_terminal

DEMO = [sys.executable, "-m", "phase6_integration"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which the demo sets to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world() -> Iterator[World]:
    show = Show(requests=10)
    with open_engine(show) as engine:
        yield World.of(show, engine)


def drawn(picture: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as captured:
        console.print(picture)
    return captured.get().splitlines()


def test_the_record_of_steps_agrees_with_the_requests_and_the_statistics(world: World) -> None:
    prefill = decode = 0
    while world.engine.has_work:
        steps = world.steps
        world.step()
        if world.steps == steps:
            continue
        row = world.rows[-1]
        assert row.number == world.steps
        assert 0 < row.prefill_tokens + row.decode_tokens <= world.show.budget
        assert row.after.running <= world.show.max_running
        assert row.requests <= world.show.max_running
        assert row.after.pages_used + row.after.pages_cached + row.after.pages_free == world.show.pages
        assert row.after.running + row.after.waiting + world.finished == 10
        prefill, decode = prefill + row.prefill_tokens, decode + row.decode_tokens
    prompts = sum(len(client.request.prompt_tokens) for client in world.clients)
    found = sum(client.cached or 0 for client in world.clients)
    assert prefill == prompts - found
    vain = world.engine.parts.scheduler.ahead * len(world.clients)  # each ends by EOS, known one step later
    assert decode == sum(len(client.request.output_tokens) - 1 for client in world.clients) + vain
    figures = world.engine.get_stats()
    assert (figures["prefill_tokens"], figures["decode_tokens"]) == (prefill, decode)
    assert figures["cache_hit_rate"] == pytest.approx(found / prompts)
    assert world.tokens == figures["generated_tokens"] == sum(len(c.request.output_tokens) for c in world.clients)
    assert world.seconds >= world.tokens / figures["throughput"] > 0, "time in steps"
    assert found > prompts / 3  # the system message is shared
    taught = {question: fact.answer for fact in read() for question in fact.questions}
    right = [client.answer == taught[client.question] for client in world.clients]
    assert sum(right) >= 9


def test_the_seed_determines_the_questions() -> None:
    assert questions(Show(seed=1)) == questions(Show(seed=1))
    assert questions(Show(seed=1)) != questions(Show(seed=2))
    many = questions(Show(requests=300))
    assert len(many) == 300
    assert len({question for _, question in many}) > 150
    assert {instruction for instruction, _ in many} == set(INSTRUCTIONS)


def test_the_picture_shows_the_current_state(world: World) -> None:
    while world.finished < 3:
        world.step()
    lines = drawn(view.picture(world, 100), 100)
    now = world.rows[-1].after
    counts = f"{now.running} running  {now.waiting} waiting   {world.finished} of 10 finished"
    assert lines[0].startswith(f"step {world.steps}   {counts}   hit rate ")
    assert f"{now.pages_used} used, {now.pages_cached} cached, {now.pages_free} free" in lines[1]
    rows = [line.split() for line in lines if re.match(r" *\d+  (waiting|prefill|decode|stop)", line)]
    assert len(rows) == 10
    assert [row[1] for row in rows].count("stop") == world.finished
    assert [row[1] for row in rows] == [client.state for client in world.clients]
    assert lines[-1].split()[:2] == [str(world.steps), str(world.rows[-1].prefill_tokens)]


def test_a_picture_is_no_larger_than_its_terminal(world: World) -> None:
    while world.engine.has_work:
        world.step()
        if world.steps % 4 != 1:
            continue
        for width, height in ((40, 12), (80, 23), (120, 50)):
            lines = drawn(view.picture(world, width, height), width)
            assert len(lines) <= height
            assert max(map(len, lines)) <= width


def test_preempted_requests_are_shown_as_preempted() -> None:
    """With a pool too small for all running requests."""
    show, states = Show(requests=8, pages=14, max_running=6), set[str]()
    with open_engine(show) as engine:
        world = World.of(show, engine)
        while world.engine.has_work:
            world.step()
            states |= {client.state for client in world.clients}
        assert engine.get_stats()["preemptions"] > 0
    assert states == {"waiting", "prefill", "decode", "preempted", "stop"}


def test_invalid_flags_are_named() -> None:
    done = subprocess.run([*DEMO, "--requests=0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith(": requests must be an integer from 1 to 1073741824, got 0\n")


def test_the_command_prints_snapshots_answers_and_figures_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "8"]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    assert "\x1b" not in done.out
    heads = re.findall(r"^step \d+ .* (\d+) of 8 finished", done.out, re.MULTILINE)
    assert 1 <= len(heads) <= 3
    assert "question and answer" in done.out
    assert re.search(r"^cache hit rate +\d\d\.\d%", done.out, re.MULTILINE)
    assert re.search(r"^finished +stop \d", done.out, re.MULTILINE)


def test_ctrl_c_in_the_middle_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(*DEMO, "--requests", "200", until=b"running")
    assert status == 130
    assert re.search(rb"Stopped at step \d+\.\r\n$", after_the_view(seen))
    assert b"Traceback" not in seen
