"""The load generator and `nanoserve bench` against a scripted server."""

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phase6_integration.cli.common import api_key, server_url
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.connection import Connection, ConnectionLostError, Pool, UnreachableError
from phase6_integration.load.report import Report
from phase6_integration.load.response import Response
from phase6_integration.load.workload import Workload
from tests.phase6_integration.load.load_parts import VLLM_NAMES, word
from tests.phase6_integration.scripted import Heard, Said, completion, said, scripted, stream

BENCH = [sys.executable, "-m", "phase6_integration.cli", "bench"]


def load(url: str, **options: object) -> LoadTest:
    workload = options.pop("workload", Workload(num_prompts=12, input_len=20, output_len=6, seed=0))
    return LoadTest(url=url, workload=workload, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("streamed", [True, False])
def test_requests_and_figures_are_those_of_the_workload(streamed: bool) -> None:
    async def play() -> Report:
        with scripted(lambda heard: completion(heard.body, cached=7) if heard.body else None) as server:
            done = await run(load(server.url, concurrency=3, stream=streamed))
            assert len(server.asked) == 13  # one warm-up, which tells nothing of what comes
            assert len({tuple(heard.body["prompt"][:2]) for heard in server.asked}) == 13
            for heard in server.asked:
                assert heard.path == "/v1/completions"
                expected = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
                if streamed:
                    expected |= {"stream": True, "stream_options": {"include_usage": True}}
                assert {**heard.body, "prompt": None} == {**expected, "prompt": None}
                assert len(heard.body["prompt"]) == 20
            assert server.connections <= 1 + 3  # /v1/models, and three that are reused
            return done

    done = asyncio.run(play())
    assert (done.completed, done.failed, done.total_input_tokens, done.total_output_tokens) == (12, 0, 240, 72)
    assert done.total_cached_tokens == 84
    assert done.model_id == "tiny"
    for name, value in done.latencies.items():
        assert (value is not None) == (streamed or "e2el" in name or "lateness" in name), name


def test_a_session_is_a_chat_that_repeats_what_was_said() -> None:
    """Also without token ids, which a chat does not take: a word for each."""

    def answer(heard: Heard) -> Said | None:
        if not heard.body:
            return None
        pieces = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in ("so", "it", "goes")]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
        return stream([{"choices": [{"delta": {"reasoning": "hm"}}]}, *pieces, end, usage])

    with scripted(answer) as server:
        workload = Workload(num_prompts=2, turns=3, input_len=4, seed=0)
        done = asyncio.run(run(load(server.url, workload=workload, concurrency=1, warmups=0, ignore_eos=False)))
        bodies = [heard.body for heard in server.asked]
        assert {heard.path for heard in server.asked} == {"/v1/chat/completions"}
        with pytest.raises(ValueError, match="need /v1/chat/completions"):
            asyncio.run(run(load(server.url, workload=workload, endpoint="/v1/completions")))
    assert (done.completed, done.total_output_tokens) == (6, 18)
    assert {len(outcome.deliveries) for outcome in done.outcomes} == {4}
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]] * 2
    assert bodies[2]["messages"][:3] == bodies[1]["messages"]
    assert {message["content"] for message in bodies[2]["messages"][1::2]} == {"so it goes "}
    assert {len(message["content"].split()) for message in bodies[2]["messages"][::2]} == {4}
    assert "ignore_eos" not in bodies[0]


def test_failures_are_counted_by_cause_and_the_run_goes_on() -> None:
    number = 0

    def answer(heard: Heard) -> Said | None:
        nonlocal number
        if not heard.body:
            return None
        number += 1
        whole = completion(heard.body)
        kinds = [
            whole,
            said({"error": {"message": "the\x1b[2Jqueue\nis full"}}, 429),
            Said(whole.body, kind=whole.kind, cut=80),
            replace(whole, close=True),
            Said(b"<html>", 502, "text/html"),
            Said(b'{"error": {"message": "\xff\xfe"}}', 500),
            stream([word("a"), {"error": {"message": "the engine died"}}]),
        ]
        return kinds[number % len(kinds)]

    async def play() -> Report:
        with scripted(answer) as server:
            return await run(load(server.url, concurrency=1, warmups=0))

    done = asyncio.run(play())
    assert (done.completed, done.failed) == (3, 9)
    assert done.errors == {
        "answered 429: the [2Jqueue is full": 2,  # no control characters
        "the connection was lost in the middle of the answer": 2,
        "answered 502: a body that is no JSON object of a completion, 6 bytes": 2,
        "answered 500: a body that is no JSON object of a completion, 28 bytes": 2,
        "the engine died": 1,
    }
    assert done.total_output_tokens == 3 * 6


def test_a_closed_idle_connection_is_replaced_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the request is written before the end of the connection is seen."""

    async def play() -> int:
        with scripted(lambda heard: completion(heard.body)) as server:
            pool = Pool(server.url, None, lambda: 0.0)
            request = pool.request("POST", "/v1/completions", b'{"prompt": [5], "max_tokens": 1}')
            await pool.exchange(request, Response(0.0, False))
            lost: list[Connection] = []

            async def vanish(self: Connection, request: bytes, answer: Response) -> None:
                if not lost:
                    lost.append(self)
                    self.close()
                    raise ConnectionLostError(begun=False)
                await exchange(self, request, answer)

            exchange = Connection.exchange
            monkeypatch.setattr(Connection, "exchange", vanish)
            answer = Response(0.0, False)
            await pool.exchange(request, answer)
            await pool.close()
            assert answer.outcome(1.0).error is None
            return pool.opened

    assert asyncio.run(play()) == 2


def test_a_request_that_times_out_fails() -> None:
    with scripted(lambda heard: Said(b"", kind="text/event-stream", hang=True)) as server:
        workload = Workload(num_prompts=1)
        done = asyncio.run(run(load(server.url, workload=workload, timeout=0.05, warmups=0, model="m")))
    assert done.failed == 1
    assert list(done.errors) == ["no whole answer within 0.05 s"]


def test_a_refused_warm_up_ends_the_run() -> None:
    refusal = said({"error": {"message": "the API key is wrong"}}, 401)

    async def play(answer: Said | None) -> None:
        with scripted(lambda heard: refusal if heard.method == "POST" else answer) as server:
            await run(load(server.url))

    for answer in (None, refusal):
        with pytest.raises(ValueError, match="answered 401: the API key is wrong"):
            asyncio.run(play(answer))
    with pytest.raises(ValueError, match="no model is listed"):
        asyncio.run(play(said({"data": []})))


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://example.org/llm/v1", "https://example.org/llm"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
    ],
)
def test_a_url_may_end_in_v1_and_lack_the_scheme(url: str, origin: str) -> None:
    assert server_url(url) == origin


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:y", "http://x:99999", "http://x?a"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a server's URL looks like"):
        server_url(url)


def test_the_api_key_is_a_header_and_cannot_inject_one() -> None:
    written = Pool("http://x", "secret", lambda: 0.0).request("POST", "/a", b"{}").decode()
    assert "\r\nauthorization: Bearer secret\r\n" in written
    assert "authorization" not in Pool("http://x", None, lambda: 0.0).request("GET", "/a").decode()
    with pytest.raises(ValueError, match="printable ASCII"):
        api_key({"api_key": "a\r\nhost: y"})


# The command.


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_no_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run([*BENCH, "--url", url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"no server answers at {url}" in done.stderr
    with pytest.raises(UnreachableError):
        asyncio.run(run(load(url)))


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path: Path) -> None:
    with scripted(lambda heard: completion(heard.body) if heard.body else None) as server:
        file = tmp_path / "figures.json"
        options = ["--url", server.url + "/v1", "--num-prompts", "10", "--input-len", "5", "--output-len", "3"]
        options += ["--goodput", "ttft:60000", "itl:60000"]
        page = tmp_path / "page.html"
        command = [*BENCH, "serve", *options, "--json", str(file), "--html", str(page)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        piped = subprocess.run([*BENCH, *options, "--json", "-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    html = page.read_text("utf-8")
    ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    assert html.count("<figure>") == html.count("</figure>") == 6
    assert html.count("tokens in ") == 10  # a line for each request
    assert "http" not in html.replace(server.url, "")  # it needs nothing else
    for words in (
        "requests completed  ",
        "tokens out/s",
        "time to first token (ttft)",
        "goodput, requests/s",
        "--seed",
    ):
        assert words in done.stdout
    for text in (file.read_text(), piped.stdout):
        figures = json.loads(text)
        assert figures.keys() >= VLLM_NAMES
        assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (10, 50, 30)
        assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
