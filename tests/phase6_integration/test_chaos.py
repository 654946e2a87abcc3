"""Thousands of short requests, among them every kind of client that there is. The orderly ones notice nothing; if the
engine fails meanwhile, they get the right answer or an orderly refusal. Right is what transformers generates, token for
token."""

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from phase6_integration.server.serve import ENGINE_FAILED
from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.life import PATIENCE, Life, Supervisor
from tests.phase6_integration.running import (
    Answer,
    Oracle,
    answer,
    ask,
    get,
    idle,
    line,
    parsed,
    request,
    run,
    serving,
)

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 60, 64)
OUTPUT = 12
CROWD = 48  # clients at a time
FLAT = 1.05  # how much of the memory after the first tenth there may be at the end
FEW = 80  # pages: for a few requests


@dataclass(frozen=True)
class Served:
    """A server, its address, its model, and the folder that the model is saved in."""

    server: Life
    url: str
    oracle: Oracle
    folder: str


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with few pages: requests are preempted and computed again, without a trace in their answers."""
    folder = tmp_path_factory.mktemp("model")
    oracle = Oracle.saved(folder)
    with serving(str(folder), "--dtype", "float32", "--kv-cache-pages", f"{FEW}") as (server, url):
        yield Served(server, url, oracle, str(folder))


# Equal requests of many clients at once, while others hang up.

STAY, LEAVE = 64, 32


@pytest.mark.parametrize(
    "pages",
    [pytest.param(FEW, id="pages for a few"), pytest.param(1000, id="pages for all", marks=pytest.mark.slow)],
)
def test_greedy_float32_over_http_is_what_transformers_generates(small: Served, pages: int) -> None:
    output = 48
    given = prompts(small.oracle.model.config.vocab_size, (1, 2, 15, 16, 17, 31, 40, 50, 64, 90))
    wanted = small.oracle.answers(given, output)

    def body(number: int) -> dict[str, object]:
        prompt = given[number % len(given)]
        stream = bool(number % 2)
        return {"prompt": prompt, "max_tokens": output, "temperature": 0, "logprobs": 0, "stream": stream}

    async def leaves(url: str, number: int, after: int) -> None:
        async with line(url, request(body(number))) as reader:
            for _ in range(after):
                await reader.readline()

    async def test(url: str) -> None:
        before = (await idle(url))["requests"]
        draw = random.Random(0)
        staying = [ask(url, body(number)) for number in range(STAY)]
        leaving = [leaves(url, 2 * number + 1, draw.randrange(120)) for number in range(LEAVE)]
        answers, _ = await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))
        for number, response in enumerate(answers):
            assert answer(response) == wanted[number % len(given)]
        after = (await idle(url))["requests"]
        assert after["finished"]["length"] - before["finished"]["length"] >= STAY
        assert (after["preemptions"] > before["preemptions"]) == (pages == FEW)

    if pages == FEW:
        run(test(small.url))
    else:
        with serving(small.folder, "--dtype", "float32", "--kv-cache-pages", f"{pages}") as (_, url):
            run(test(url))


# Short requests of all kinds.

INVALID: Sequence[object] = [
    b"",
    b"{",
    b"null",
    b'{"prompt": "a", "temperature": NaN}',
    b"\xff\xfe\x00" * 50,
    b"[" * 20_000,
    {},
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [4096]},
    {"prompt": [1], "max_tokens": 10**9},
    {"prompt": [1] * 300},
    {"prompt": [1], "n": 129},
    {"prompt": [[1]] * 129},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_p": 1e400},
    {"prompt": "a", "logit_bias": {"99999": 1}},
    {"prompt": "a", "stop": ["x"] * 17},
    {"prompt": "a", "frequency_penalty": "2"},
    {"prompt": "a", "nothing": "such"},
    {"prompt": "a", "tools": []},
    {"prompt": "a", "stream_options": {"include_usage": True}},
    {"model": "another", "prompt": "a"},
]


@dataclass(frozen=True)
class Chaos:
    """What the clients do. `draw` is the same on every run, though not the order in which they come to their turns."""

    url: str
    given: Sequence[list[int]]
    wanted: Sequence[Answer]
    done: Counter[str]

    def body(self, draw: random.Random, which: int) -> dict[str, Any]:
        return {
            "prompt": self.given[which],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "logprobs": draw.choice((0, 3)),
            "stream": draw.random() < 0.5,
        }

    async def orderly(self, draw: random.Random) -> None:
        which = draw.randrange(len(self.given))
        assert answer(await ask(self.url, self.body(draw, which))) == self.wanted[which]

    async def slow(self, draw: random.Random) -> None:
        """It reads a few bytes at a time, and asks for more than it can hold. It gets its answer all the same."""
        which = draw.randrange(len(self.given))
        said = request(self.body(draw, which) | {"logprobs": 20, "stream": True})
        async with line(self.url, said, buffer=2048) as reader:
            pieces = []
            while piece := await reader.read(512):
                pieces.append(piece)
                await asyncio.sleep(0.001)
        assert answer(parsed(b"".join(pieces))) == self.wanted[which]

    async def several(self, draw: random.Random) -> None:
        """Sampled, not greedy: the words are unknown, their number is not."""
        seeds = {"n": draw.randrange(1, 5), "temperature": 1.0, "seed": draw.randrange(1 << 32)}
        prompt = draw.choice(self.given)
        one = await ask(self.url, {"prompt": prompt, "max_tokens": OUTPUT, **seeds})
        again = await ask(self.url, {"prompt": prompt, "max_tokens": OUTPUT, **seeds})
        assert len(one.json["choices"]) == seeds["n"]
        assert one.json["choices"] == again.json["choices"], "a seed fixes the tokens in any batch"

    async def invalid(self, draw: random.Random) -> None:
        response = await ask(self.url, draw.choice(INVALID))
        assert response.status in (400, 404), response
        assert response.error["message"]

    async def leaves(self, draw: random.Random) -> None:
        """Somewhere in its own request, or somewhere in the response."""
        said = request(self.body(draw, draw.randrange(len(self.given))) | {"n": draw.choice((1, 3)), "max_tokens": 100})
        if draw.random() < 0.3:
            said = said[: draw.randrange(len(said))]
            async with line(self.url, said):
                return
        async with line(self.url, said) as reader:
            for _ in range(draw.randrange(40)):
                await reader.readline()

    async def looks(self, _: random.Random) -> None:
        for path in ("/metrics", "/stats", "/health", "/v1/models"):
            assert (await get(self.url, path)).status == 200

    async def reads_nothing(self, prompt: list[int], stream: bool, over: asyncio.Event) -> None:
        """It asks for a lot, reads none of it, and stays until all the others have left."""
        body = {"prompt": prompt, "max_tokens": 60, "n": 16, "logprobs": 20, "stream": stream}
        async with line(self.url, request(body), buffer=2048):
            await over.wait()

    async def rush(self, first: int, requests: int) -> None:
        """So many of them, `CROWD` at a time."""
        kinds: dict[Callable[[random.Random], Awaitable[None]], int] = {
            self.orderly: 60,
            self.slow: 5,
            self.several: 5,
            self.invalid: 12,
            self.leaves: 17,
            self.looks: 1,
        }
        turns = iter(range(first, first + requests))
        over = asyncio.Event()

        async def clients() -> None:
            for number in turns:
                draw = random.Random(number)
                (kind,) = draw.choices(list(kinds), list(kinds.values()))
                await kind(draw)
                self.done[kind.__name__] += 1

        deaf = [asyncio.create_task(self.reads_nothing(self.given[i], i % 2 > 0, over)) for i in range(4)]
        await asyncio.gather(*(clients() for _ in range(CROWD)))
        over.set()
        await asyncio.gather(*deaf)


def memory(server: Life) -> dict[str, int]:
    """Bytes that the front and the engine have in memory."""
    front = psutil.Process(server.process.pid)
    (engine,) = map(psutil.Process, server.engines())
    return {"front": front.memory_info().rss, "engine": engine.memory_info().rss}


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_orderly_clients_are_answered_right_among_hostile_ones(small: Served, requests: int) -> None:
    given = prompts(small.oracle.model.config.vocab_size, LENGTHS)
    # Half of them begin alike, so that pages are shared, and evicted, and found again.
    given = [prompt if i % 2 else given[-1][:32] + prompt for i, prompt in enumerate(given)]
    wanted = small.oracle.answers(given, OUTPUT)

    async def test(server: Life, url: str) -> None:
        chaos = Chaos(url, given, wanted, Counter())
        tenth = requests // 10
        await chaos.rush(0, tenth)
        await idle(url)
        early = memory(server)
        await chaos.rush(tenth, requests - tenth)
        stats = await idle(url)
        late = memory(server)
        assert chaos.done.total() == requests
        assert min(chaos.done.values()) > 0, chaos.done
        assert stats["requests"]["finished"]["error"] == 0
        for name, before in early.items():
            print(f"{name}: {before >> 10} KiB after {tenth} requests, {late[name] >> 10} KiB after {requests}")
            assert requests < 10_000 or late[name] < FLAT * before, name
        print(dict(chaos.done), stats["requests"], stats["prefix_cache"])

    run(test(small.server, small.url), seconds=1200)


# The same crowd, while faults are injected.

CLIENTS = 500  # at a time
SECONDS = 180.0
SHORTAGE = 5.0  # seconds
BOMBS = ("power", "text", "loop")
TEMPLATE = """{% set bomb, nine = messages[0].content, 9 %}
{%- if bomb == "power" %}{{ nine ** (nine ** nine) }}
{%- elif bomb == "text" %}{{ bomb * 10 ** nine }}
{%- elif bomb == "loop" %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}
{%- endif %}{{ bomb }}"""
UNREAD = 300  # lines of 300 bytes; a pipe holds 64 KiB
BOUND = 1 << 30  # bytes that the front may have in memory
REFUSALS = {"loading", "dead", "hung", "draining", "stopped", "queue_full", "overloaded"}


def engine_killed(server: Supervisor) -> None:
    os.kill(server.engine(), signal.SIGKILL)


def engine_frozen(server: Supervisor) -> None:
    os.kill(server.engine(), signal.SIGSTOP)


def memory_limited(server: Supervisor) -> None:
    """What the engine has it keeps, and gets no more for a while."""
    engine = server.engine()
    with contextlib.suppress(ProcessLookupError):  # it may not survive
        resource.prlimit(engine, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
        time.sleep(SHORTAGE)
        resource.prlimit(engine, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def template_exploded(server: Supervisor) -> None:
    """Each of these would compute, or allocate, for ever."""
    for bomb in BOMBS:
        sent = {"messages": [{"role": "user", "content": bomb}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=PATIENCE)
        assert response.status_code in (400, 503), response.text


def log_blocked(server: Supervisor) -> None:
    """Nothing reads the log, until more has been written than its pipe holds."""
    one = server.lives[-1]
    one.log_is_read.clear()
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            for number in range(UNREAD):
                assert http.get(f"/v1/models/{'x' * 200}-{number}").status_code == 404
    finally:
        one.log_is_read.set()


# In this order, evenly spread over the time. A further fault is a function of the supervised server, added here.
INJECTED: Sequence[Callable[[Supervisor], None]] = (
    *(engine_killed, memory_limited, template_exploded),
    *(engine_killed, log_blocked, engine_frozen),
)


class Turbulence(Chaos):
    """Clients that take an orderly refusal for an answer. They never take a wrong answer, nor half a one."""

    async def orderly(self, draw: random.Random) -> None:
        which = draw.randrange(len(self.given))
        try:
            async with line(self.url, request(self.body(draw, which))) as reader:
                content = await reader.read()
        except OSError:  # between two processes
            content = b""
        if not content:
            self.done["no server"] += 1
            return await asyncio.sleep(0.2)
        response = parsed(content)
        error = response.error if response.status != 200 else None
        if error is None and response.headers["content-type"] != "application/json":
            *_, last, done = response.events
            assert done == "[DONE]"
            error = json.loads(last).get("error")
        if error is None:
            assert answer(response) == self.wanted[which]
            self.done["right"] += 1
            return None
        assert error["code"] in REFUSALS, error
        self.done["refused"] += 1
        await asyncio.sleep(0.1)  # Retry-After, in this hurry
        return None

    async def until(self, end: float) -> None:
        async def client(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < end:
                if draw.random() < 0.9:
                    await self.orderly(draw)
                else:
                    with contextlib.suppress(OSError):
                        await self.leaves(draw)

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))


@pytest.mark.slow
def test_orderly_clients_are_answered_right_or_refused_in_order_while_the_engine_fails(tmp_path: Path) -> None:
    oracle = Oracle.saved(tmp_path)
    given = prompts(oracle.model.config.vocab_size, LENGTHS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--dtype", "float32", "--kv-cache-pages", "160", "--hang-timeout", "10", "--heartbeat-timeout", "5")
    with Supervisor(port, str(tmp_path), *flags, "--max-engine-restarts", "2", "--chat-template", TEMPLATE) as server:
        chaos = Turbulence(server.url, given, oracle.answers(given, OUTPUT), Counter())

        async def inject() -> None:
            begin = time.monotonic()
            crowd = asyncio.create_task(chaos.until(begin + SECONDS))
            for number, fault in enumerate(INJECTED, 1):
                await asyncio.sleep(begin + number * SECONDS / (len(INJECTED) + 1) - time.monotonic())
                await asyncio.to_thread(server.until_ready)
                right = chaos.done["right"]
                await asyncio.to_thread(fault, server)
                await asyncio.to_thread(server.until_ready)
                while chaos.done["right"] <= right and not crowd.done():
                    await asyncio.sleep(0.1)
                print(f"{fault.__name__}: {dict(chaos.done)}, exits {server.codes}")
            await crowd
            await asyncio.to_thread(server.until_ready)
            after = Chaos(server.url, given, chaos.wanted, Counter())
            await asyncio.gather(*(after.orderly(random.Random(n)) for n in range(CROWD)))
            await idle(server.url)

        server.until_ready()
        run(inject(), seconds=3 * SECONDS)
        assert chaos.done["right"] > CLIENTS
        front = psutil.Process(server.lives[-1].process.pid).memory_info().rss
        print(f"front: {front >> 20} MiB; {dict(chaos.done)}; exits {server.codes}")
        assert front < BOUND
    assert server.codes[-1] == 0
    assert set(server.codes[:-1]) <= {ENGINE_FAILED}
    assert len(server.codes) < 1 + len(INJECTED)
