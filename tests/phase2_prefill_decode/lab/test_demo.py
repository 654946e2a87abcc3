"""The demo command: on a terminal, in a pipe, in a narrow window, with a broken model."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode import threads
from phase2_prefill_decode.lab.demo import main, picture
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.lab.word_wrap import WordWrap
from phase2_prefill_decode.loading.config import ModelConfig
from tests.terminal import on_a_terminal

DEMO = [sys.executable, "-m", "phase2_prefill_decode"]
BUNDLED_CONFIG = ModelConfig.from_pretrained(BUNDLED)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the numbers of threads that torch is set to, without setting them."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(threads, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return numbers


def served(answer: int, prefill: float = 0.0123, step: float = 0.004) -> Request:
    """A request with twelve prompt tokens and so many output tokens."""
    request = Request("r", tuple(range(12)), SamplingParams(max_tokens=answer), arrival=0.0)
    request.admit(0.0)
    request.advance(0, 12)
    for token in range(answer):
        if token:
            request.advance(11 + token, 1)
        request.append(7, prefill + token * step)
    request.finish(FinishReason.LENGTH, prefill + answer * step)
    return request


def drawn(request: Request, width: int, ascii_only: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(picture(request, width, ascii_only), crop=False)
    return out.getvalue().splitlines()


def test_the_command_answers_and_shows_where_the_time_went(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its output is not a terminal."""
    assert main(["What is a page?", "--max-tokens", "9"]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    assert done.out.startswith("A page is ")
    assert "\x1b" not in done.out
    assert re.search(r"^prefill +1 +13 +[\d.,]+ ms +[\d.,]+ ms ", done.out, re.MULTILINE)
    assert re.search(r"^decode +8 +8 +[\d.,]+ ms +[\d.,]+ ms ", done.out, re.MULTILINE)
    assert max(map(len, done.out.splitlines())) <= 80


def test_an_ascii_terminal_shows_the_answer(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["--raw", "Das Gerät heißt", "--max-tokens", "3"]) == 0
    out.seek(0)
    assert re.search(r"^decode .* ms +#+$", out.read(), re.MULTILINE)


def test_ctrl_c_while_the_model_loads() -> None:
    status, seen = on_a_terminal(*DEMO, "--raw", "A page", "--max-tokens", "2000", until=b"Loading")
    assert status == 130
    assert b"Traceback" not in seen


@pytest.mark.parametrize("width", [120, 80, 60, 59, 44, 40, 20])
def test_no_number_is_cut_however_narrow_the_terminal(width: int) -> None:
    lines = drawn(served(30), width)
    for name, numbers in (("prefill", "1 12 12.3 ms 1.03 ms"), ("decode", "29 29 116.0 ms 4.00 ms")):
        row = next(line for line in lines if line.startswith(name))
        assert " ".join(row.split()[1:7]) == numbers
        assert ("█" in row) == (width >= 60)
        assert len(row) <= max(width, 40)


def test_the_bars_share_the_axis_as_the_phases_share_the_time() -> None:
    for width in (60, 70, 120):
        columns = min(width - 50, 28)
        first, second = (line[-columns:] for line in drawn(served(4, 0.03, 0.01), width, True)[2:4])
        assert (len(first.rstrip()), len(first.strip())) == (columns // 2, columns // 2)
        assert (len(second.rstrip()), len(second.strip())) == (columns, columns // 2)


def test_an_answer_of_one_token() -> None:
    lines = drawn(served(1), 80)
    assert "One token: the prompt's own step made it." in lines
    assert next(line for line in lines if line.startswith("decode")).split()[1:3] == ["0", "0"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-tokens=0", "max_tokens must be"),
        ("--temperature=-1", "temperature must be"),
        ("--top-p=2", "top_p must be"),
    ],
)
def test_bad_options_are_named_before_anything_is_loaded(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option, "--model", "nowhere"])
    assert words in capsys.readouterr().err


def test_an_error_of_the_model_is_printed_in_one_line(capsys: pytest.CaptureFixture[str], asked: list[int]) -> None:
    assert main(["--model", "nowhere"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m phase2_prefill_decode: nowhere/config.json cannot be read: No such file")
    assert printed.err.count("\n") == 1


def test_the_error_of_a_failed_request_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[int]
) -> None:
    for file in BUNDLED.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(BUNDLED / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors")
    assert main(["--model", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "prefill" not in printed.out
    assert re.fullmatch(r"python -m phase2_prefill_decode: .*NaN.*\n", printed.err)


def test_a_small_model_computes_on_one_thread_and_a_large_one_on_all(asked: list[int]) -> None:
    """Waiting threads spin. On cores that are shared, a step of a small model then takes many times as long."""
    assert main(["Hello!", "--max-tokens", "2"]) == 0
    assert asked == [1]
    threads.use_threads_for(SHAPES["596m"])
    assert asked == [1, 6]
    assert BUNDLED_CONFIG.bytes < threads.SMALL < SHAPES["17m"].bytes


def test_omp_num_threads_overrides_the_choice(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.use_threads_for(BUNDLED_CONFIG)
    assert asked == []


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_a_streamed_answer_is_broken_between_words(pieces: int) -> None:
    """However the text arrives. Only a word that is longer than a line is left to the terminal."""
    text = "A page holds the keys\nand values of sixteen consecutive tokens.  Antidisestablishmentarianism "
    text += "漢字" * 5
    wrap = WordWrap(20)
    shown = "".join(wrap.push(text[at : at + pieces]) for at in range(0, len(text), pieces)) + wrap.end()
    assert [line.rstrip() for line in shown.split("\n")] == [
        "A page holds the",
        "keys",
        "and values of",
        "sixteen consecutive",
        "tokens.",
        "Antidisestablishmentarianism",
        "漢字" * 5,
    ]


def test_on_a_terminal_the_answer_is_broken_between_words(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for variables in ({}, {"FORCE_COLOR": "1", "COLUMNS": "40"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["What is a KV cache?", "--max-tokens", "30"]) == 0
        answers.append(capsys.readouterr().out.partition("\n\n")[0])
    piped, shown = answers
    assert "\n" not in piped, "a pipe has the text as it is"
    assert max(map(len, shown.split("\n"))) <= 40
    assert shown.split() == piped.split()
