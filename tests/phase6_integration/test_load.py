"""The load generator against a server that says what it is told to, and against numpy."""

import asyncio
import json
import math
import random
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from phase6_integration import http_client
from phase6_integration.http_client import Connection, LostError, Pool, Target, UnreachableError
from phase6_integration.load.answer import Answer, Outcome
from phase6_integration.load.client import Load, RefusedError, made, run
from phase6_integration.load.report import LATENCIES, STATISTICS, Bounds, Report, report
from phase6_integration.load.workload import FIRST, KINDS, LAST, Work, Workload
from tests.phase6_integration.scripted import Heard, Said, completion, in_a_thread, said, scripted, stream

BENCH = [sys.executable, "-m", "phase6_integration.load"]
VLLM_NAMES = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "request_goodput",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p90", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# What is asked.


def test_the_same_seed_asks_the_same_at_the_same_moments() -> None:
    for kind in ("fixed", "long-tail", "shared-prefix"):
        one = Workload(kind=kind, num_prompts=20, request_rate=5, seed=3)
        assert list(one.works()) == list(one.works())
        assert list(one.works()) != list(replace(one, seed=4).works())


def test_fixed_lengths_are_exact_and_tokens_are_words() -> None:
    works = list(Workload(num_prompts=50, input_len=37, output_len=11).works())
    assert {(work.time, len(work.prompt), work.max_tokens) for work in works} == {(0.0, 37, 11)}
    tokens = {token for work in works for token in work.prompt}
    assert min(tokens) >= FIRST
    assert max(tokens) <= LAST
    assert len(tokens) > 1000


def test_a_long_tail_has_the_median_given_and_is_cut_where_said() -> None:
    works = list(Workload(kind="long-tail", num_prompts=2000, input_len=100, output_len=20, max_input_len=900).works())
    lengths = [len(work.prompt) for work in works]
    assert 90 < float(np.median(lengths)) < 110
    assert 700 < max(lengths) <= 900
    assert 0.9 < float(np.std(np.log([length for length in lengths if length < 900]))) < 1.05
    assert 18 <= float(np.median([work.max_tokens for work in works])) <= 22


def test_shared_prefixes_are_shared_by_turns_and_the_rest_is_not() -> None:
    works = list(Workload(kind="shared-prefix", num_prompts=9, prefix_len=64, num_prefixes=3, input_len=16).works())
    prefixes = [tuple(work.prompt[:64]) for work in works]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3
    assert len({tuple(work.prompt[64:]) for work in works}) == 9
    assert {len(work.prompt) for work in works} == {80}


def test_arrivals_at_a_rate_are_poisson() -> None:
    works = list(Workload(num_prompts=4000, request_rate=20, input_len=1).works())
    gaps = np.diff([work.time for work in works])
    assert abs(gaps.mean() * 20 - 1) < 0.05
    assert abs(gaps.std() / gaps.mean() - 1) < 0.06  # as an exponential has


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "random"}, "fixed, long-tail, shared-prefix, got 'random'"),
        ({"num_prompts": 0}, "num-prompts must be at least 1, got 0"),
        ({"request_rate": 0.0}, "request-rate must be above 0"),
        ({"request_rate": math.nan}, "request-rate must be above 0"),
        ({"spread": math.inf}, "spread must be at least 0 and finite"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**options)  # type: ignore[arg-type]


# When it is asked.


class Sleeper:
    """Time passes only where somebody sleeps: the one who wakes first is woken first."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.asleep: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self.asleep.append((self.clock.now + seconds, future))
        await future

    async def pass_time(self, until: asyncio.Future[list[Outcome]]) -> list[Outcome]:
        while not until.done():
            for _ in range(5):
                await asyncio.sleep(0)
            if self.asleep:
                first = min(self.asleep, key=lambda one: one[0])
                self.asleep.remove(first)
                self.clock.now = first[0]
                first[1].set_result(None)
        return until.result()


def paced(times: Sequence[float], service: float, concurrency: int | None) -> list[Outcome]:
    """Requests that take `service` seconds each, in a time of their own."""

    async def play() -> list[Outcome]:
        sleeper = Sleeper()

        async def ask(written: bytes) -> Outcome:
            sent = sleeper.clock.now
            await sleeper.sleep(service)
            return Outcome(sent, sleeper.clock.now)

        requests = [(time, b"") for time in times]
        task = asyncio.ensure_future(made(requests, ask, concurrency, sleeper.clock, sleeper.sleep))
        return await sleeper.pass_time(task)

    return asyncio.run(play())


def test_an_open_loop_waits_for_nobody() -> None:
    times = [0.0, 0.5, 0.6, 7.0]
    assert [one.sent - 100 for one in paced(times, 3.0, None)] == pytest.approx(times)


def test_a_closed_loop_keeps_as_many_going_as_allowed() -> None:
    assert [one.sent - 100 for one in paced([0.0] * 5, 3.0, 2)] == [0, 0, 3, 3, 6]


def test_a_bound_delays_what_comes_too_fast_and_nothing_else() -> None:
    assert [one.sent - 100 for one in paced([0.0, 1.0, 20.0], 3.0, 1)] == pytest.approx([0, 3, 20])


# What is measured.


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        pass


def heard_at(script: list[tuple[float, bytes]], stream: bool = True) -> Outcome:
    """The outcome when these bytes come at these moments after the request was sent."""

    async def play() -> Outcome:
        clock = Clock()
        connection = Connection(clock)
        connection.connection_made(Wire())
        answer = Answer(clock(), stream)
        exchange = asyncio.ensure_future(connection.exchange(b"ask", answer))
        await asyncio.sleep(0)
        for moment, data in script:
            clock.now = 100 + moment
            connection.data_received(data)
        await exchange
        return answer.outcome(clock())

    return asyncio.run(play())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(event: object) -> bytes:
    text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
    return f"{len(text):x}\r\n{text}\r\n".encode()


def word(text: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


def test_latencies_are_from_the_moments_at_which_text_came() -> None:
    whole = chunk(word("three tokens"))
    outcome = heard_at(
        [
            (0.2, HEAD + chunk(word(""))),  # the head, and a piece without text, are not the first token
            (0.5, chunk(word("one"))),
            (0.6, chunk(": keep-alive\n\n")),
            (0.8, whole[:20]),
            (1.0, whole[20:]),  # an event is there when the last of it is
            (1.5, chunk(word("last", "length")) + chunk(USAGE)),
            (2.5, END),
        ]
    )
    assert outcome.error is None
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.itl == pytest.approx([0.5, 0.5])
    assert outcome.e2el == pytest.approx(2.5)
    assert outcome.tpot == pytest.approx(2.0 / 4)  # by the server's count of tokens, not by pieces
    assert (outcome.input_tokens, outcome.output_tokens) == (9, 5)


def test_any_cut_of_the_bytes_gives_the_same_outcome() -> None:
    whole = HEAD + b"".join(map(chunk, (word("a"), word("\u00e9 \u4e16"), word("", "length"), USAGE))) + END
    reference = heard_at([(1.0, whole)])
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted({0, *(rng.randrange(1, len(whole)) for _ in range(rng.randint(1, 12))), len(whole)})
        pieces = [(1.0, whole[start:stop]) for start, stop in pairwise(cuts)]
        assert heard_at(pieces) == reference
    assert reference.error is None
    assert len(reference.deliveries) == 2


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    outcome = heard_at([(0.7, HEAD + chunk(word("", "length")) + chunk(USAGE) + END)])
    assert outcome.error is None
    assert outcome.ttft == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([word("a"), {"error": {"message": "the engine died"}}], "the engine died"),
        ([word("a", "length")], "the server sent no usage"),
        ([word("a"), USAGE], "the answer has no finish_reason"),
        (["data: {broken\n\n"], "an event of the stream is not what it should be"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure_that_says_why(events: list[object], why: str) -> None:
    outcome = heard_at([(1.0, HEAD + b"".join(map(chunk, events)) + END)])
    assert outcome.error is not None
    assert why in outcome.error


def test_a_stream_without_done_is_a_failure() -> None:
    outcome = heard_at([(1.0, HEAD + chunk(word("a", "length")) + chunk(USAGE) + b"0\r\n\r\n")])
    assert outcome.error == "the stream ended without [DONE]"


def test_the_figures_are_those_of_numpy() -> None:
    rng = random.Random(5)
    outcomes = []
    for _ in range(137):
        times = np.cumsum([rng.expovariate(3) for _ in range(rng.randint(1, 30))]).tolist()
        outcomes.append(Outcome(0.0, times[-1] + 0.01, times, rng.randint(1, 50), len(times) * 2, 3))
    outcomes.append(Outcome(0.0, 1e6, error="lost"))
    got = report(outcomes, 20.0, Bounds(), "m", Workload(num_prompts=138), 8).as_json()
    whole = outcomes[:-1]
    oracle = {
        "ttft": [o.deliveries[0] for o in whole],
        "tpot": [(o.ended - o.deliveries[0]) / (o.output_tokens - 1) for o in whole],
        "itl": np.concatenate([np.diff(o.deliveries) for o in whole]),
        "e2el": [o.ended for o in whole],
    }
    for name, seconds in oracle.items():
        values = np.asarray(seconds) * 1e3
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        for statistic, value in zip(
            STATISTICS, (values.mean(), np.median(values), values.std(), p50, p90, p99), strict=True
        ):
            assert got[f"{statistic}_{name}_ms"] == pytest.approx(value)
    assert (got["completed"], got["failed"]) == (137, 1)
    assert got["request_throughput"] == pytest.approx(137 / 20)
    assert got["output_throughput"] == pytest.approx(sum(o.output_tokens for o in whole) / 20)
    tokens = sum(o.output_tokens + o.input_tokens for o in whole)
    assert got["total_token_throughput"] == pytest.approx(tokens / 20)
    assert got["request_goodput"] is None
    assert got["total_cached_tokens"] == 3 * 137


def test_the_names_are_those_of_vllm() -> None:
    got = report([], 1.0, Bounds(), "m", Workload(), None).as_json()
    assert got.keys() >= VLLM_NAMES
    assert got.keys() - VLLM_NAMES == {
        "model_id", "num_prompts", "request_rate", "max_concurrency", "total_cached_tokens",
    }  # fmt: skip
    assert got["request_rate"] == "inf"
    assert {f"{s}_{name}_ms" for s in STATISTICS for name in LATENCIES} <= got.keys()


def test_a_good_request_keeps_every_bound() -> None:
    def goodput(*bounds: str) -> float | None:
        outcomes = [
            Outcome(0, 1.0, [0.1, 0.4, 1.0], output_tokens=3),
            Outcome(0, 0.5, [0.3, 0.5], output_tokens=2),
            Outcome(0, 0.2, [0.2], output_tokens=1),
            Outcome(0, 0.1, error="lost"),
        ]
        return report(outcomes, 2.0, Bounds.of(bounds), "m", Workload(), None).request_goodput

    assert goodput() is None
    assert goodput("ttft:1000") == 1.5
    assert goodput("ttft:250") == 1.0
    assert goodput("ttft:250", "itl:300") == 0.5
    assert goodput("tpot:210") == 1.0
    assert goodput("e2el:500") == 1.0
    assert goodput("e2el:0.1") == 0.0


@pytest.mark.parametrize("bound", ["ttft", "ttft:", "ttft:fast", "speed:5", "itl:0", "itl:-1", "itl:nan", "itl:inf"])
def test_a_bound_that_is_none_is_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=r"a bound is ttft, tpot, itl, e2el"):
        Bounds.of([bound])


# Against a server.


def loaded(server_url: str, **options: object) -> Load:
    workload = options.pop("workload", Workload(num_prompts=12, input_len=20, output_len=6))
    return Load(target=Target.of(server_url), workload=workload, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("streamed", [True, False])
def test_what_is_asked_is_what_was_meant(streamed: bool) -> None:
    async def play() -> Report:
        async with scripted(lambda heard: completion(heard.body, cached=7) if heard.body else None) as server:
            done = await run(loaded(server.url, concurrency=3, stream=streamed))
            assert len(server.asked) == 13  # one warm-up, which tells nothing of what comes
            assert len({tuple(heard.body["prompt"][:2]) for heard in server.asked}) == 13
            for heard in server.asked:
                assert heard.path == "/v1/completions"
                expected = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
                if streamed:
                    expected |= {"stream": True, "stream_options": {"include_usage": True}}
                assert {**heard.body, "prompt": None} == {**expected, "prompt": None}
                assert len(heard.body["prompt"]) == 20
            assert server.connections <= 3  # kept alive, and used again
            return done

    done = asyncio.run(play())
    assert (done.completed, done.failed, done.total_input_tokens, done.total_output_tokens) == (12, 0, 240, 72)
    assert done.total_cached_tokens == 84
    assert done.model_id == "tiny"
    for name, value in done.latencies.items():
        assert (value is not None) == (streamed or "e2el" in name), name


def test_failures_are_counted_and_named_and_the_others_go_on() -> None:
    number = 0

    def answer(heard: Heard) -> Said | None:
        nonlocal number
        if not heard.body:
            return None
        number += 1
        whole = completion(heard.body)
        kinds = [
            whole,
            said({"error": {"message": "the queue is full"}}, 429),
            Said(whole.body, kind=whole.kind, cut=80),
            replace(whole, close=True),
            Said(b"<html>", 502, "text/html"),
            stream([word("a"), {"error": {"message": "the engine died"}}]),
        ]
        return kinds[number % len(kinds)]

    async def play() -> Report:
        async with scripted(answer) as server:
            return await run(loaded(server.url, concurrency=1, warmups=0))

    done = asyncio.run(play())
    assert (done.completed, done.failed) == (4, 8)
    assert done.errors == {
        "answered 429: the queue is full": 2,
        "the connection was lost in the middle of the answer": 2,
        "answered 502: a body that is no JSON object of a completion, 6 bytes": 2,
        "the engine died": 2,
    }
    assert done.total_output_tokens == 4 * 6


def test_a_kept_connection_that_the_server_has_closed_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its end has not been seen yet as the next request is written."""

    async def play() -> int:
        async with scripted(lambda heard: completion(heard.body)) as server:
            pool = Pool(Target.of(server.url), lambda: 0.0)
            request = pool.target.request("POST", "/v1/completions", b'{"prompt": [5], "max_tokens": 1}')
            await pool.exchange(request, Answer(0.0, False))
            lost: list[Connection] = []

            async def vanish(self: Connection, request: bytes, answer: Answer) -> None:
                if not lost:
                    lost.append(self)
                    raise LostError(begun=False)
                await exchange(self, request, answer)

            exchange = Connection.exchange
            monkeypatch.setattr(http_client.Connection, "exchange", vanish)
            answer = Answer(0.0, False)
            await pool.exchange(request, answer)
            pool.close()
            assert answer.outcome(1.0).error is None
            return pool.opened

    assert asyncio.run(play()) == 2


def test_a_request_that_takes_too_long_is_a_failure_and_gives_its_connection_up() -> None:
    async def play() -> tuple[Report, int]:
        hang = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(HEAD)
                await reader.read()  # until the client has gone
                hang.set()
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        one = Workload(num_prompts=1)
        done = await run(loaded(url, workload=one, timeout=0.05, warmups=0, model="m"))
        await asyncio.wait_for(hang.wait(), 30)
        server.close()
        return done, done.failed

    done, failed = asyncio.run(play())
    assert failed == 1
    assert list(done.errors) == ["no whole answer within 0.05 s"]


def test_a_server_that_refuses_the_first_request_ends_the_run() -> None:
    refusal = said({"error": {"message": "the API key is wrong"}}, 401)

    async def play(answer: Said | None) -> None:
        async with scripted(lambda heard: refusal if heard.method == "POST" else answer) as server:
            await run(loaded(server.url))

    for answer in (None, refusal):
        with pytest.raises(RefusedError, match="answered 401: the API key is wrong"):
            asyncio.run(play(answer))
    with pytest.raises(RefusedError, match="names no model"):
        asyncio.run(play(said({"data": []})))


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://example.org/llm/v1", "https://example.org:443/llm"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_a_url_is_read_as_clients_write_it(url: str, origin: str) -> None:
    assert Target.of(url).origin == origin


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:y", "http://x:99999", "http://x?a"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a server's URL is such as"):
        Target.of(url)


def test_a_key_goes_with_every_request_and_cannot_end_a_header() -> None:
    written = Target.of("http://x", "secret").request("POST", "/a", b"{}").decode()
    assert "\r\nauthorization: Bearer secret\r\n" in written
    assert "authorization" not in Target.of("http://x").request("GET", "/a").decode()
    with pytest.raises(ValueError, match="printable ASCII"):
        Target.of("http://x", "a\r\nhost: y")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_no_server_is_one_clear_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run([*BENCH, "--url", url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"no server answers at {url}" in done.stderr
    with pytest.raises(UnreachableError):
        asyncio.run(run(loaded(url)))


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path: Path) -> None:
    with in_a_thread(lambda heard: completion(heard.body) if heard.body else None) as server:
        file = tmp_path / "figures.json"
        options = ["--url", server.url + "/v1", "--num-prompts", "10", "--input-len", "5", "--output-len", "3"]
        options += ["--goodput", "ttft:60000", "itl:60000"]
        done = subprocess.run([*BENCH, *options, "--json", str(file)], capture_output=True, text=True, timeout=60)
        piped = subprocess.run([*BENCH, *options, "--json", "-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for words in ("requests completed  ", "tokens out/s", "time to first token (ttft)", "good requests/s"):
        assert words in done.stdout
    for text in (file.read_text(), piped.stdout):
        figures = json.loads(text)
        assert figures.keys() >= VLLM_NAMES
        assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (10, 50, 30)
        assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "nowhere"], "a server's URL is such as http://127.0.0.1:8000, got 'nowhere'"),
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--goodput", "fast:1"], "a bound is ttft, tpot, itl, e2el"),
        (["--no-stream", "--goodput", "ttft:1"], "without streaming there is no TTFT"),
        (["--workload", "random"], "invalid choice: 'random'"),
        (["--input-length", "5"], "input-length"),
    ],
)
def test_bad_options_are_named(options: list[str], words: str) -> None:
    done = subprocess.run([*BENCH, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_work_is_what_the_body_says() -> None:
    body = json.loads(Load(target=Target.of("http://x"), temperature=0.5).body("m", Work(0.0, [7, 8], 3)))
    assert body["prompt"] == [7, 8]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0.5, True)


def test_the_help_tells_the_defaults_that_hold() -> None:
    shown = re.sub(r"\s+", " ", subprocess.run([*BENCH, "--help"], capture_output=True, text=True, timeout=60).stdout)
    assert re.findall(r"--workload \{(.*?)\}", shown)[0].split(",") == list(KINDS)
    defaults = {field.name: field.default for kind in (Workload, Load) for field in fields(kind)}
    flags = re.findall(r"--([a-z-]+) [A-Z]+ (?:(?!--)[^()])*\(([^()]*)\)", shown)
    told = {flag.replace("-", "_"): default for flag, default in flags}
    assert len(told) >= 13
    assert told.pop("url") == "http://127.0.0.1:8000"
    assert told.pop("max_concurrency") == "any number"
    assert told.pop("model") == "the first that the server names"
    for name, default in told.items():
        assert str(defaults[name]) == default, name
