import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from phase0_request.core import Step
from phase3_chunked_prefill.lab import demo, view
from phase3_chunked_prefill.lab.demo import main
from phase3_chunked_prefill.lab.stall import Outcome, Played, Scene
from tests.terminal import on_a_terminal

DEMO = [sys.executable, "-m", "phase3_chunked_prefill"]


def step_of(prefill: int, decode: int, seconds: float) -> Step:
    return Step(prefill_tokens=prefill, decode_tokens=decode, seconds=seconds)


CALM = step_of(0, 8, 0.002)


def bar(step: Step, width: int, coloured: bool, longest: float = 1.0) -> str:
    return view.bar(step, longest, width, coloured).plain


def test_a_bar_has_the_length_of_its_step_and_the_shares_of_its_tokens() -> None:
    assert bar(step_of(30, 10, 1.0), 40, False) == "#" * 30 + "=" * 10
    assert bar(step_of(30, 10, 0.5), 40, False) == "#" * 15 + "=" * 5
    assert bar(step_of(30, 10, 1.0), 40, True) == "█" * 40
    assert bar(step_of(10, 0, 0.5), 40, False) == "#" * 20
    assert bar(step_of(0, 8, 0.5), 41, True) == "█" * 20 + "▌"
    assert view.bar(step_of(30, 10, 1.0), 1.0, 40, True).spans[0].end == 30


def test_the_shortest_step_is_visible_and_the_longest_fits() -> None:
    assert bar(step_of(128, 8, 1e-6), 40, True) == "█▏"
    assert bar(step_of(128, 8, 1e-6), 40, False) == "#="
    assert bar(step_of(0, 8, 1e-6), 40, True) == "▏"
    assert bar(step_of(0, 8, 1e-6), 40, False) == "="
    for step in (step_of(2016, 8, 1.0), step_of(8, 2016, 1.0), step_of(1, 1, 2.0)):
        for width in (2, 39, 40, 87):
            for coloured in (True, False):
                assert len(bar(step, width, coloured)) == width


def test_the_demo_shows_the_steps_around_the_long_prompt_counted_from_its_arrival() -> None:
    chunk = step_of(64, 8, 0.01)
    played = Played([CALM] * 9 + [chunk] * 4 + [CALM] * 20, [], None)  # type: ignore[arg-type]
    shown = list(view.shown(played))
    assert [number for number, _ in shown] == list(range(-3, 7))
    assert [number for number, step in shown if step is chunk] == [0, 1, 2, 3]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("coloured", [True, False])
def test_every_line_fits_its_terminal(width: int, coloured: bool) -> None:
    whole = Outcome(0, 3.8, 31_234.5, 31_234.5, 31_234.5, 31_234.4, 31_999.9)
    cut = Outcome(128, 3.8, 1_234.5, 2_345.6, 2_345.6, 33_234.4, 34_999.9)
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=not coloured, color_system="truecolor" if coloured else None)
    console.print(view.key(coloured))
    console.print(view.HEAD)
    for number, step in ((-3, CALM), (0, step_of(8191, 128, 31.234)), (128, step_of(128, 8, 0.4))):
        console.print(view.line(number, step, 31.234, width, coloured), no_wrap=True)
    bars = out.getvalue().splitlines()
    assert len(bars) == 5
    console.print(view.summary([whole, cut]))
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(len(line) for line in plain) <= width
    text = " ".join(" ".join(plain).split())
    assert "in chunks of 128 2,345.6 ms 1,234.5 ms 33,234.4 ms 34,999.9 ms" in text
    assert "13.3 times shorter, and everything takes 9% longer" in text


@pytest.mark.parametrize(
    ("worst", "total", "words"),
    [
        (4.0, 105.0, "worst gap is 2.5 times shorter, and everything takes 5% longer."),
        (25.0, 80.0, "worst gap is 2.5 times longer, and everything takes 20% less."),
        (10.2, 100.4, "worst gap is as long, and everything takes as long."),
        (9.8, 99.6, "worst gap is as long, and everything takes as long."),
        (101.0, 1100.0, "worst gap is 10.1 times longer, and everything takes 1000% longer."),
    ],
)
def test_the_conclusion_compares_gaps_and_total_time(worst: float, total: float, words: str) -> None:
    whole, cut = Outcome(0, 1.0, 10.0, 10.0, 10.0, 10.0, 100.0), Outcome(128, 1.0, worst, worst, worst, 10.0, total)
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as captured:
        console.print(view.summary([whole, cut]))
    assert captured.get().rstrip().endswith(words)


def test_a_narrow_terminal_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "59")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "at least 60 columns to draw on, this one has 59" in " ".join(capsys.readouterr().err.split())


def test_numbers_are_aligned_under_their_headings() -> None:
    line = view.line(7, step_of(2016, 8, 0.1234), 1.0, 80, False).plain
    for name, value in (("step", "+7"), ("prefill", "2016"), ("decode", "8"), ("ms", "123.4")):
        end = view.HEAD.index(name) + len(name)
        assert line[:end].endswith(value)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--prompt=0", "prompt must be at least 1, got 0"),
        ("--prompt=2048", "prompt makes 2049 tokens, and the context of the model has 2048"),
        ("--decodes=0", "decodes must be at least 1, got 0"),
        ("--chunk=15", "chunk must be at least a page of 16 tokens, got 15"),
        ("--seconds=-1", "seconds must be at least 0 and finite, got -1.0"),
        ("--seconds=nan", "seconds must be at least 0 and finite, got nan"),
        ("--chunk=some", "invalid int value: 'some'"),
    ],
)
def test_bad_options_are_named(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])
    assert words in capsys.readouterr().err


def test_the_command_shows_both_ways_when_piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without pauses: on a terminal the stall would take an hour."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert main(["--prompt", "300", "--chunk", "64", "--seconds", "3600"]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    assert "\x1b" not in done.out
    whole, cut = done.out.split("A prompt of 300 tokens arrives, ")[1:]
    assert re.findall(r"^ +\+\d+ +(\d+) +8 ", whole, re.MULTILINE) == ["300"]
    assert re.findall(r"^ +\+\d+ +(\d+) +8 ", cut, re.MULTILINE) == ["64", "64", "64", "64", "44"]
    assert re.search(r"^in chunks of 64( +[\d,.]+ ms){4}$", cut, re.MULTILINE)
    assert max(len(line) for line in done.out.splitlines()) <= 80


def test_ctrl_c_in_the_middle_of_the_stall() -> None:
    status, seen = on_a_terminal(*DEMO, "--prompt", "300", "--seconds", "600", until=b"step prefill decode")
    assert status == 130
    assert seen.removesuffix(b"\x1b[0m").endswith(b"Stopped.\r\n")
    assert b"Traceback" not in seen


@pytest.mark.parametrize(("milliseconds", "tokens"), [(25.6, 2016), (512.0, 992), (5120.0, 256)])
def test_a_slow_machine_gets_a_shorter_prompt(
    milliseconds: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which 256 tokens take so long."""
    stage = SimpleNamespace(scene=Scene(prompt=demo.LONGEST), play=lambda chunk, prompt: prompt)
    outcome = Outcome(0, 1.0, 1.0, 1.0, 1.0, milliseconds, 1.0)
    monkeypatch.setattr("phase3_chunked_prefill.lab.stall.judge", lambda chunk, played: outcome)
    demo.shorten(stage)  # type: ignore[arg-type]
    assert stage.scene.prompt == tokens
