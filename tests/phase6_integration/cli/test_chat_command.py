"""`nanoserve chat`: what it sends, what it shows, and that Ctrl-C stops an answer and not the chat."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Generator
from contextlib import closing, suppress

import pytest
from rich.console import Console

from chapters.tiny_chat.corpus import read
from phase6_integration.cli.chat_command import Chat
from phase6_integration.cli.chat_models import AnswerError, ChatUsage, LocalModel, Messages, RemoteModel, Sampling
from phase6_integration.cli.common import http_settings
from phase6_integration.engine.options import EngineOptions
from tests.phase6_integration.scripted import Body, Heard, Said, said, scripted, stream

CHAT = [sys.executable, "-m", "phase6_integration.cli", "chat"]
USAGE: Body = {"prompt_tokens": 21, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
GREEDY: Sampling = {"temperature": 0, "max_tokens": 50}


def piece(text: str | None = None, reason: str | None = None) -> Body:
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}]}


def speech(*texts: str, reason: str = "stop") -> Said:
    head: Body = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    return stream([head, *map(piece, texts), ": keep-alive", piece(reason=reason), {"choices": [], "usage": USAGE}], 9)


# A server.


def answer_of(response: Said, sampling: Sampling = GREEDY) -> tuple[list[str | ChatUsage], Heard]:
    """What `RemoteModel` makes of a response, and what it sent."""
    with scripted(lambda heard: response if heard.method == "POST" else None) as server:
        settings = http_settings({"url": server.url + "/v1", "api_key": "key-1"})
        with closing(RemoteModel(settings, None)) as model:
            return list(model.answer([{"role": "user", "content": "hi"}], sampling)), server.asked[-1]


def test_a_server_gets_an_openai_request_and_its_stream_is_read_to_the_end() -> None:
    pieces, sent = answer_of(speech("caf\u00e9 ", "\u4e16\u754c"))
    assert pieces == ["caf\u00e9 ", "\u4e16\u754c", ChatUsage(21, 16, 2, truncated=False)]
    assert sent.path == "/v1/chat/completions"
    assert sent.headers["authorization"] == "Bearer key-1"
    assert sent.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces, sent = answer_of(speech("cut", reason="length"), {"seed": 7})
    assert pieces[-1] == ChatUsage(21, 16, 2, truncated=True)
    assert sent.body["seed"] == 7


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (said({"error": {"message": "a valid API key is needed"}}, 401), "401: a valid API key is needed"),
        (stream([piece("half"), {"error": {"message": "the engine died"}}]), "the engine died"),
        (Said(speech("half", "more").body, kind="text/event-stream", cut=250), "the connection was lost"),
        (Said(b'data: {"choices": []}\n\n', kind="text/event-stream"), "ended before the answer did"),
        (Said(b"data: {broken\n\n", kind="text/event-stream"), "no chat completion chunk"),
        (Said(b"data: 3\n\n", kind="text/event-stream"), "no chat completion chunk"),
        (stream([{"choices": [{"delta": 3}]}]), "no chat completion chunk"),
        (
            stream([{"choices": [], "usage": {"prompt_tokens": "x", "completion_tokens": 1}}]),
            "no chat completion chunk",
        ),
        (stream([{"error": 3}]), "no chat completion chunk"),
        (Said(b"data: " + b"[" * 200_000 + b"\n\n", kind="text/event-stream"), "no chat completion chunk"),
        (Said(b"<html>", 502, "text/html"), "502: a response that is no JSON error"),
    ],
)
def test_a_failed_answer_says_why(response: Said, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        answer_of(response)


# A local model.


def test_a_stopped_local_answer_is_aborted_and_the_next_one_is_right() -> None:
    """Ctrl-C in the middle of an answer, then a whole answer, then a prompt that is too long."""
    fact = next(fact for fact in read() if "What is a KV cache?" in fact.questions)
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    with closing(LocalModel(EngineOptions(kv_cache_pages=64, max_num_seqs=1))) as model:
        with closing(model.answer(messages, {"temperature": 0, "max_tokens": 900, "ignore_eos": True})) as pieces:
            assert isinstance(next(pieces), str)
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                list(pieces)
        assert not model.engine.has_work
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        *texts, usage = model.answer(messages, {"temperature": 0})
        assert "".join(map(str, texts)) == fact.answer
        assert isinstance(usage, ChatUsage)
        assert usage.output_tokens > 10
        assert not usage.truncated
        longer, one_token = [{"role": "user", "content": "page " * 40}], {"max_tokens": 1, "ignore_eos": True}
        _, (*_, again) = list(model.answer(longer, one_token)), model.answer(longer, one_token)
        assert isinstance(again, ChatUsage)
        assert 32 <= again.cached_tokens < again.prompt_tokens
        assert again.truncated
        with pytest.raises(ValueError, match="fit into the context"):
            next(model.answer([{"role": "user", "content": "word " * 3000}], GREEDY))


# The conversation.


class Parrot:
    """A model with scripted answers that records its messages."""

    name = "parrot"

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[Messages] = []

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str | ChatUsage]:
        self.asked.append([dict(message) for message in messages])
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        yield from re.findall(r"\S+\s*", answer.removesuffix("^C"))
        if answer.endswith("^C"):
            raise KeyboardInterrupt
        yield ChatUsage(30, 16, 5, truncated=False)

    def close(self) -> None:
        pass


def chatted(parrot: Parrot, *lines: str, system: str | None = None) -> tuple[Chat, str]:
    shown = io.StringIO()
    console = Console(file=shown, width=200, soft_wrap=True)
    chat = Chat(parrot, GREEDY, system, console)
    for line in lines:
        if line.startswith("/"):
            assert chat.command(line)
        else:
            chat.ask(line)
    return chat, shown.getvalue()


def test_each_turn_sends_the_whole_conversation() -> None:
    parrot = Parrot("one", "two words")
    chat, shown = chatted(parrot, "first", "second", system="be brief")
    system, first = {"role": "system", "content": "be brief"}, {"role": "user", "content": "first"}
    assert parrot.asked[0] == [system, first]
    assert parrot.asked[1] == [
        system, first, {"role": "assistant", "content": "one"}, {"role": "user", "content": "second"},
    ]  # fmt: skip
    assert shown == "one\ntwo words\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "two words"}


def test_reset_and_system_start_a_new_conversation() -> None:
    parrot = Parrot("a", "b", "c")
    chat, _ = chatted(parrot, "one", "/reset", "two", "/system be kind", "three", system="be brief")
    assert [len(asked) for asked in parrot.asked] == [2, 2, 2]
    assert [asked[0]["content"] for asked in parrot.asked] == ["be brief", "be brief", "be kind"]
    assert not chat.command("/quit")
    assert chat.command("/system")
    assert chat.messages == []


def test_a_failed_question_is_not_kept_in_the_conversation() -> None:
    parrot = Parrot("one", AnswerError("the queue is full"), "three")
    _, shown = chatted(parrot, "first", "second", "third")
    assert "error: the queue is full" in shown
    contents = [message["content"] for message in parrot.asked[-1]]
    assert contents == ["first", "one", "third"]


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    """What has been said of it stays; a question without any answer does not."""
    parrot = Parrot("it begins^C", KeyboardInterrupt(), "three")
    _, shown = chatted(parrot, "first", "second", "third")
    assert shown.count("stopped") == 2
    contents = [message["content"] for message in parrot.asked[-1]]
    assert contents == ["first", "it begins", "third"]


def test_model_output_cannot_control_the_terminal() -> None:
    _, shown = chatted(Parrot("\x1b[2J\x07[bold]x[/bold]\r \x9b31m\ttab"), "hi")
    assert shown == "\ufffd[2J\ufffd[bold]x[/bold]\ufffd \ufffd31m\ttab\n"
    _, shown = chatted(Parrot("a\u202eb\u2066c"), "hi")
    assert shown == "a\ufffdb\ufffdc\n"  # what reverses a line


# The command.


def chat_server(heard: Heard) -> Said | None:
    if heard.method != "POST":
        return None
    last = heard.body["messages"][-1]["content"]
    if last == "fail":
        return said({"error": {"message": "the queue is full"}}, 429)
    return speech(f"you said {last}, ", f"message {len(heard.body['messages'])}")


def test_piped_lines_are_messages_and_answers_are_plain_text() -> None:
    with scripted(chat_server) as server:
        lines = "hello\n\n again \n/reset\nanew\n/quit\nnever\n"
        command = [*CHAT, "--url", server.url, "--system", "s"]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        failing = subprocess.run(
            [*CHAT, "--url", server.url], input="fail\n", capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
    said_lines = "you said hello, message 2\nyou said again, message 4\na new conversation\n"
    assert done.stdout == said_lines + "you said anew, message 2\n"
    assert failing.returncode == 1
    assert "error: 429: the queue is full" in failing.stdout


def test_keys_typed_meanwhile_are_shown_at_the_next_prompt_and_not_before() -> None:
    """They are typed while the client waits for its model, with a spinner, and while it waits for an answer."""
    keys = {"GET": b"hello\n", "POST": b"/quit\n"}
    terminal, theirs = pty.openpty()

    def answer(heard: Heard) -> Said | None:
        os.write(terminal, keys[heard.method])
        return chat_server(heard)

    with scripted(answer) as server:
        environ = os.environ | {"TERM": "xterm"}
        command = [*CHAT, "--url", server.url]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while data := os.read(terminal, 4096):
                shown += data
        assert process.wait(60) == 0
    os.close(terminal)
    spinner, asked, end = shown.decode().split("> ")
    assert "connecting" in spinner
    assert "hello" not in spinner
    assert asked.startswith("hello")
    assert "you said hello, message 1" in asked
    assert "/quit" not in asked
    assert end.startswith("/quit")


def test_sigterm_during_an_answer_leaves_the_terminal_as_it_was() -> None:
    terminal, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)

    def answer(heard: Heard) -> Said | None:
        if heard.method == "POST":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(terminal, b"hello\n")
        return chat_server(heard)

    with scripted(answer) as server:
        process = subprocess.Popen([*CHAT, "--url", server.url], stdin=theirs, stdout=theirs, stderr=theirs)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert termios.tcgetattr(theirs) == before
    os.close(terminal)
    os.close(theirs)
