"""`nanoserve generate`: prompts as arguments, lines or a pipe; text or JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chapters.tiny_chat.corpus import read
from phase2_prefill_decode.extras.parallel.ranks import RankError
from phase6_integration.cli import generate_command
from phase6_integration.cli.main import main

GENERATE = [sys.executable, "-m", "phase6_integration.cli", "generate"]
QUESTIONS = ("What is a KV cache?", "What is a token?", "What is the Sun?")


def run(*options: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GENERATE, *options], input=typed, capture_output=True, text=True, timeout=120)


def test_a_rank_that_is_lost_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(*_: object) -> None:
        raise RankError("rank 1 of 2 was killed by SIGKILL")

    monkeypatch.setattr(generate_command, "complete", complete)
    assert main(["generate", "Hello"]) == 1
    assert capsys.readouterr().err == "nanoserve generate: rank 1 of 2 was killed by SIGKILL\n"


def test_a_local_model_answers_prompts_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    answers = {question: fact.answer for fact in read() for question in fact.questions}
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(QUESTIONS) + "\n\n")
    assert main(["generate", "--chat", "--json", "--file", str(file)]) == 0
    shown, errors = capsys.readouterr()
    assert all(line.startswith("compiling") for line in errors.splitlines())
    found = [json.loads(line) for line in shown.splitlines()]
    assert [one["prompt"] for one in found] == list(QUESTIONS)
    for one in found:
        assert one["text"] == answers[one["prompt"]]
        assert (one["finish_reason"], one["error"]) == ("stop", None)
        assert one["prompt_tokens"] > 5
        assert one["output_tokens"] > 5


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = run("a prompt of several words, more than fit into nine tokens at all", "--model", "./no-such-model")
    assert done.returncode == 1
    assert "there is no directory ./no-such-model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_text_that_the_model_ends_at_once_is_no_empty_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = generate_command.Result(prompt="a", text="", finish_reason="stop", prompt_tokens=1, output_tokens=1)
    monkeypatch.setattr(generate_command, "complete", lambda *_: [nothing])
    assert main(["generate", "a"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, "ended its answer at once" in shown.err) == ("", True)
