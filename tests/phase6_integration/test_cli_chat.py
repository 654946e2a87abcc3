"""The chat: what it tells a model, what it shows of it, and that a person can stop an answer and go on."""

import asyncio
import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from rich.console import Console

from phase0_request.lab.corpus.facts import read
from phase0_request.params import SamplingParams
from phase6_integration.cli.chat import Chat
from phase6_integration.cli.conversation import AnswerError, Facts, Local, Messages, Remote
from phase6_integration.http_client import Target
from phase6_integration.options import EngineOptions
from tests.phase6_integration.scripted import Body, Heard, Said, in_a_thread, said, scripted, stream

CHAT = [sys.executable, "-m", "phase6_integration.cli", "chat"]
USAGE: Body = {"prompt_tokens": 21, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
GREEDY = SamplingParams(temperature=0, max_tokens=50)


def piece(text: str | None = None, reason: str | None = None) -> Body:
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}]}


def speech(*texts: str, reason: str = "stop") -> Said:
    head: Body = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    return stream([head, *map(piece, texts), ": keep-alive", piece(reason=reason), {"choices": [], "usage": USAGE}], 9)


# A server as the one who speaks.


def heard_from(answer: Said, params: SamplingParams = GREEDY) -> tuple[list[str | Facts], Heard]:
    async def play() -> tuple[list[str | Facts], Heard]:
        async with scripted(lambda heard: answer if heard.method == "POST" else None) as server:
            speaker = await Remote.open(Target.of(server.url + "/v1", "key-1"), None)
            try:
                pieces = [one async for one in speaker.answer([{"role": "user", "content": "hi"}], params)]
            finally:
                await speaker.close()
                heard_from.last = server.asked[-1]  # type: ignore[attr-defined]
            return pieces, server.asked[-1]

    return asyncio.run(play())


def test_a_server_is_asked_as_it_expects_and_heard_to_its_end() -> None:
    pieces, asked = heard_from(speech("caf\u00e9 ", "\u4e16\u754c"))
    assert pieces == ["caf\u00e9 ", "\u4e16\u754c", Facts(21, 16, 2, cut=False)]
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer key-1"
    assert asked.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces, asked = heard_from(speech("cut", reason="length"), SamplingParams(seed=7))
    assert pieces[-1] == Facts(21, 16, 2, cut=True)
    assert asked.body["seed"] == 7


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said({"error": {"message": "a valid API key is needed"}}, 401), "401: a valid API key is needed"),
        (stream([piece("half"), {"error": {"message": "the engine died"}}]), "the engine died"),
        (Said(speech("half", "more").body, kind="text/event-stream", cut=250), "lost in the middle of the answer"),
        (Said(b"data: " + b'{"choices": []}\n\n', kind="text/event-stream"), "ended before the answer did"),
        (Said(b"<html>", 502, "text/html"), "answered 502 with something that is no event of a chat"),
    ],
)
def test_what_a_server_does_wrong_is_said(answer: Said, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        heard_from(answer)


def test_to_stop_an_answer_is_to_hang_up() -> None:
    async def play() -> bool:
        gone = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                body = b'data: {"choices": [{"delta": {"content": "first"}}]}\n\n'
                head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(head + f"{len(body):x}\r\n".encode() + body + b"\r\n")
                with contextlib.suppress(ConnectionResetError):  # one way of leaving; to end the line is the other
                    while await reader.read(1 << 16):
                        pass
            finally:
                gone.set()
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        speaker = await Remote.open(Target.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "m")
        async with aclosing(speaker.answer([{"role": "user", "content": "hi"}], GREEDY)) as pieces:
            assert await anext(pieces) == "first"
            assert not gone.is_set()
        await asyncio.wait_for(gone.wait(), 30)
        server.close()
        return gone.is_set()

    assert asyncio.run(play())


# The conversation.


class Parrot:
    """Says what it is told to, and keeps what it was asked."""

    name = "parrot"

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Messages] = []

    async def answer(self, messages: Messages, params: SamplingParams) -> AsyncGenerator[str | Facts]:
        self.asked.append([dict(message) for message in messages])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for word in re.findall(r"\S+\s*", answer):
            yield word
        yield Facts(30, 16, 5, cut=False)

    async def close(self) -> None:
        pass


def chatted(parrot: Parrot, *lines: str, system: str | None = None) -> tuple[Chat, str]:
    shown = io.StringIO()
    console = Console(file=shown, width=200, soft_wrap=True)
    chat = Chat(parrot, GREEDY, system, console)
    with asyncio.Runner() as runner:
        for line in lines:
            if line.startswith("/"):
                assert chat.command(line)
            else:
                chat.ask(runner, line)
    return chat, shown.getvalue()


def test_each_turn_tells_all_that_was_said() -> None:
    parrot = Parrot("one", "two words")
    chat, shown = chatted(parrot, "first", "second", system="be brief")
    system, first = {"role": "system", "content": "be brief"}, {"role": "user", "content": "first"}
    assert parrot.asked[0] == [system, first]
    assert parrot.asked[1] == [
        system, first, {"role": "assistant", "content": "one"}, {"role": "user", "content": "second"},
    ]  # fmt: skip
    assert shown == "one\ntwo words\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "two words"}


def test_reset_and_system_begin_anew() -> None:
    parrot = Parrot("a", "b", "c")
    chat, _ = chatted(parrot, "one", "/reset", "two", "/system be kind", "three", system="be brief")
    assert [len(asked) for asked in parrot.asked] == [2, 2, 2]
    assert [asked[0]["content"] for asked in parrot.asked] == ["be brief", "be brief", "be kind"]
    assert not chat.command("/quit")
    assert chat.command("/system")
    assert chat.messages == []


def test_a_question_that_was_not_answered_is_not_part_of_the_conversation() -> None:
    parrot = Parrot("one", AnswerError("the queue is full"), "three")
    _, shown = chatted(parrot, "first", "second", "third")
    assert "error: the queue is full" in shown
    contents = [message["content"] for message in parrot.asked[-1]]
    assert contents == ["first", "one", "third"]


def test_an_unknown_command_is_no_message() -> None:
    parrot = Parrot()
    _, shown = chatted(parrot, "/restart now")
    assert shown.startswith("there is no /restart: /reset forgets")
    assert parrot.asked == []


def test_what_a_model_says_cannot_steer_the_terminal_or_be_taken_for_markup() -> None:
    _, shown = chatted(Parrot("\x1b[2J\x07[bold]x[/bold]\r \x9b31m\ttab"), "hi")
    assert shown == "\ufffd[2J\ufffd[bold]x[/bold]\ufffd \ufffd31m\ttab\n"


# The command.


def chat_server(heard: Heard) -> Said | None:
    if heard.method != "POST":
        return None
    last = heard.body["messages"][-1]["content"]
    if last == "fail":
        return said({"error": {"message": "the queue is full"}}, 429)
    return speech(f"you said {last}, ", f"message {len(heard.body['messages'])}")


def test_piped_lines_are_messages_and_answers_are_plain_text() -> None:
    with in_a_thread(chat_server) as server:
        lines = "hello\n\n again \n/reset\nanew\n/quit\nnever\n"
        command = [*CHAT, "--url", server.url, "--system", "s"]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        failing = subprocess.run(
            [*CHAT, "--url", server.url], input="fail\n", capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
    said_lines = "you said hello, message 2\nyou said again, message 4\nthe conversation is forgotten\n"
    assert done.stdout == said_lines + "you said anew, message 2\n"
    assert failing.returncode == 1
    assert "error: 429: the queue is full" in failing.stdout


def test_bytes_that_are_no_text_are_one_clear_line() -> None:
    with in_a_thread(chat_server) as server:
        command = [*CHAT, "--url", server.url]
        environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, input=b"\xff\n", capture_output=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(rb"nanoserve chat: .*0xff.*\n", done.stderr)


def at_a_terminal(command: list[str], *script: tuple[bytes, bytes | signal.Signals]) -> tuple[int, bytes]:
    """Wait for each text in turn, and then type, or send a signal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "24"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen, looked, left = b"", 0, list(script)
    while True:
        if not select.select([ours], [], [], 60)[0]:
            process.kill()
            break
        try:
            got = os.read(ours, 4096)
        except OSError:
            break
        if not got:
            break
        seen += got
        while left and left[0][0] in seen[looked:]:
            looked = seen.index(left[0][0], looked) + len(left[0][0])
            _, action = left.pop(0)
            if isinstance(action, bytes):
                os.write(ours, action)
            else:
                process.send_signal(action)
    os.close(ours)
    assert left == [], f"never seen: {left[0][0]!r}; seen: {seen[-500:]!r}"
    return process.wait(30), seen


def test_a_person_sees_what_an_answer_took_and_leaves_with_quit() -> None:
    with in_a_thread(chat_server) as server:
        status, seen = at_a_terminal(
            [*CHAT, "--url", server.url], (b"> ", b"hello\n"), (b"tokens cached", b""), (b"> ", b"/quit\n")
        )
    assert status == 0
    assert b"you said hello, message 1" in seen
    assert b"16 of 21 prompt tokens cached" in seen
    assert b"tiny" in seen


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    """The server says the beginning of an answer, and never the rest."""

    def answer(heard: Heard) -> Said | None:
        if heard.method == "POST" and heard.body["messages"][-1]["content"] == "long":
            return Said(
                stream([piece("it begins")]).body.split(b"data: [DONE]")[0], kind="text/event-stream", hang=True
            )
        return chat_server(heard)

    with in_a_thread(answer) as server:
        status, seen = at_a_terminal(
            [*CHAT, "--url", server.url],
            (b"> ", b"long\n"),
            (b"it begins", signal.SIGINT),
            (b"stopped", b""),
            (b"> ", b"next\n"),
            (b"message 3", b""),  # the stopped answer is part of the conversation
            (b"> ", b"\x04"),
        )
    assert status == 0
    assert b"Traceback" not in seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
        (["--url", "nowhere"], "a server's URL is such as"),
        (["--api-key", "secret-1"], "--api-key is for a server; say which with --url"),
        (["--url", "http://127.0.0.1:1", "--device", "cpu"], "--device is for a model that is run here"),
        (["--max-length", "5"], "no such flag: --max-length"),
    ],
)
def test_bad_options_are_named(options: list[str], words: str) -> None:
    done = subprocess.run([*CHAT, *options], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


def test_a_model_that_cannot_chat_is_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run([*CHAT, str(tmp_path / "none")], input="hi\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "there is no directory" in done.stderr


def test_the_bundled_model_answers_here() -> None:
    fact = next(fact for fact in read() if "What is a KV cache?" in fact.questions)
    lines = f"What is a KV cache?\n/reset\n{fact.questions[0]}\n"
    done = subprocess.run([*CHAT, "--temperature", "0"], input=lines, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{fact.answer}\nthe conversation is forgotten\n{fact.answer}\n"


def test_an_answer_stopped_here_is_let_go_of_and_the_next_one_is_right() -> None:
    fact = next(fact for fact in read() if "What is a KV cache?" in fact.questions)
    message = [{"role": "user", "content": "What is a KV cache?"}]

    async def play() -> tuple[str, Facts]:
        speaker = await Local.open(EngineOptions(kv_cache_pages=64, max_num_seqs=1))
        try:
            endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
            async with aclosing(speaker.answer(message, endless)) as pieces:
                assert isinstance(await anext(pieces), str)
            *texts, facts = [one async for one in speaker.answer(message, SamplingParams(temperature=0))]
            with pytest.raises(AnswerError, match="the context ends at"):
                await anext(speaker.answer([{"role": "user", "content": "word " * 3000}], GREEDY))
            assert isinstance(facts, Facts)
            return "".join(map(str, texts)), facts
        finally:
            await speaker.close()

    text, facts = asyncio.run(play())
    assert text == fact.answer
    assert facts.output_tokens > 10
    assert not facts.cut
