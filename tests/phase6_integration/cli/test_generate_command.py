"""`nanoserve generate`: prompts as arguments, lines or a pipe; text or JSON; a local model or a server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chapters.tiny_chat.corpus import read
from phase6_integration.cli.main import main
from tests.phase6_integration.scripted import Heard, Said, said, scripted

GENERATE = [sys.executable, "-m", "phase6_integration.cli", "generate"]
QUESTIONS = ("What is a KV cache?", "What is a token?", "What is the Sun?")


def run(*options: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GENERATE, *options], input=typed, capture_output=True, text=True, timeout=120)


def echo(heard: Heard) -> Said | None:
    """A server that answers with the prompt in capitals."""
    if heard.method != "POST":
        return None
    chat = heard.path == "/v1/chat/completions"
    prompt = heard.body["messages"][-1]["content"] if chat else heard.body["prompt"]
    if prompt == "fail":
        return said({"error": {"message": "the queue is full"}}, 429)
    if prompt == "cut":
        return Said(b"{", cut=0)
    if prompt == "odd":
        return Said(b"<html>", 502, "text/html")
    content: dict[str, Any] = {"message": {"content": prompt.upper()}} if chat else {"text": prompt.upper()}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    return said({"choices": [{"index": 0, "finish_reason": "stop", **content}], "usage": usage})


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


def test_a_server_gets_the_prompts_and_the_sampling_parameters() -> None:
    with scripted(echo) as server:
        done = run(
            "--url", server.url, "--json", "--api-key", "k", "--max-tokens", "7", "--stop", "!", typed="a b\nc d\n"
        )
        chatted = run("--url", server.url, "--chat", "--model", "other", "--seed", "3", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = {"finish_reason": "stop", "prompt_tokens": 9, "output_tokens": 3, "cached_tokens": 4, "error": None}
    assert found == [{"prompt": p, "text": p.upper(), **expected} for p in ("a b", "c d")]
    assert chatted.stdout == "HELLO\n"
    completion, chat = server.asked[0], server.asked[-1]
    assert completion.body == {"model": "tiny", "prompt": completion.body["prompt"], "max_tokens": 7,
                               "temperature": 0.0, "stop": ["!"]}  # fmt: skip
    assert completion.headers["authorization"] == "Bearer k"
    assert chat.body == {"model": "other", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 128,
                         "temperature": 0.0, "seed": 3}  # fmt: skip


def test_a_prompt_that_fails_does_not_fail_the_others() -> None:
    with scripted(echo) as server:
        done = run("--url", server.url, "--json", "good", "fail", "cut", "odd")
        shown = run("--url", server.url, "good", "fail")
    assert done.returncode == 1
    errors = [json.loads(line)["error"] for line in done.stdout.splitlines()]
    assert errors[:2] == [None, "429: the queue is full"]
    assert "the connection was lost" in errors[2]
    assert errors[3] == "the server answered 502 without a completion"
    assert shown.stdout == "> good\nGOOD\n\n> fail\nerror: 429: the queue is full\n\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--model", "./no-such-model"], "there is no directory ./no-such-model"),
    ],
)
def test_failures_are_one_line(options: list[str], words: str) -> None:
    done = run("a prompt of several words, more than fit into nine tokens at all", *options)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
