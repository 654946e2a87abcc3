"""Crowds of clients, some of them hostile, and an engine that is killed, frozen and starved. Orderly clients get what
transformers generates, token for token, from a server that preempts them all the time."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from phase6_integration.serve import ENGINE_FAILED
from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.crowd import AT_ONCE, LENGTHS, OUTPUT, Crowd
from tests.phase6_integration.life import PATIENCE, Life, Supervisor
from tests.phase6_integration.running import Oracle, answer, ask, idle, line, parsed, request, run, serving

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


# Requests of all kinds.


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
    crowd = Crowd(small.url, given, small.oracle.answers(given, OUTPUT), Counter())

    async def test() -> None:
        tenth = requests // 10
        await crowd.rush(0, tenth)
        await idle(small.url)
        early = memory(small.server)
        await crowd.rush(tenth, requests - tenth)
        stats = await idle(small.url)
        late = memory(small.server)
        assert crowd.done.total() == requests
        assert min(crowd.done.values()) > 0, crowd.done
        assert stats["requests"]["finished"]["error"] == 0
        for name, before in early.items():
            print(f"{name}: {before >> 10} KiB after {tenth} requests, {late[name] >> 10} KiB after {requests}")
            assert requests < 10_000 or late[name] < FLAT * before, name

    run(test(), seconds=1200)


# Clients that ask for much and hang up: what they asked for goes with them, at once.

LONG = 10_000  # tokens of each prompt, or of each answer: none ends within half a second
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("clients", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_client_that_hangs_up_leaves_nothing_behind(tmp_path: Path, clients: int) -> None:
    """What comes behind them is answered, and in the end every page is free or cached."""
    oracle = Oracle.saved(tmp_path, **SHAPE, num_key_value_heads=1, max_position_embeddings=16_384)
    prompt = [5, 6, 7, 8]
    (wanted,) = oracle.answers([prompt], 24)

    async def hangs_up(url: str, number: int) -> None:
        """Half of them bring a long prompt, and half want a long answer; half of them stream."""
        given = [(number + i * i) % 4000 + 3 for i in range(LONG if number % 2 else 10)]
        body = {"prompt": given, "max_tokens": 6_000 if number % 2 else LONG, "stream": number % 4 < 2}
        async with line(url, request(body)) as reader:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reader.read()

    async def test(url: str) -> None:
        await asyncio.gather(*(hangs_up(url, number) for number in range(clients)))
        last = await ask(url, {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0})
        assert answer(last) == wanted
        stats = await idle(url)
        assert stats["requests"]["finished"]["length"] == 1, "no other request was completed"

    with serving(str(tmp_path), "--dtype", "float32", "--kv-cache-pages", "4096") as (_, url):
        run(test(url))


# The engine of a supervised server fails. Each request gets the right answer, or an orderly refusal.

CLIENTS = 500  # at a time
SECONDS = 180.0
SHORTAGE = 5.0  # seconds
BOMBS = ("text", "loop")
TEMPLATE = """{% set bomb = messages[0].content %}
{%- if bomb == "text" %}{{ bomb * 10 ** 7 }}
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
    """Each of these would render for ever, or more than any model reads."""
    for bomb in BOMBS:
        sent = {"messages": [{"role": "user", "content": bomb}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=PATIENCE)
        assert response.status_code in (400, 503), response.text


def log_blocked(server: Supervisor) -> None:
    """Nothing reads the log, until more has been written than its pipe holds."""
    life = server.lives[-1]
    life.log_is_read.clear()
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            for number in range(UNREAD):
                assert http.get(f"/v1/models/{'x' * 200}-{number}").status_code == 404
    finally:
        life.log_is_read.set()


# In this order, evenly spread over the time. A further fault is a function of the supervised server, added here.
INJECTED: Sequence[Callable[[Supervisor], None]] = (
    *(engine_killed, memory_limited, template_exploded),
    *(engine_killed, log_blocked, engine_frozen),
)


class CrowdUnderFaults(Crowd):
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
        return await asyncio.sleep(0.1)  # Retry-After, in this hurry

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
        crowd = CrowdUnderFaults(server.url, given, oracle.answers(given, OUTPUT), Counter())

        async def inject() -> None:
            begin = time.monotonic()
            clients = asyncio.create_task(crowd.until(begin + SECONDS))
            for number, fault in enumerate(INJECTED, 1):
                await asyncio.sleep(begin + number * SECONDS / (len(INJECTED) + 1) - time.monotonic())
                await asyncio.to_thread(server.until_ready)
                right = crowd.done["right"]
                await asyncio.to_thread(fault, server)
                await asyncio.to_thread(server.until_ready)
                while crowd.done["right"] <= right and not clients.done():
                    await asyncio.sleep(0.1)
                print(f"{fault.__name__}: {dict(crowd.done)}, exits {server.codes}")
            await clients
            await asyncio.to_thread(server.until_ready)
            after = Crowd(server.url, given, crowd.wanted, Counter())
            await asyncio.gather(*(after.orderly(random.Random(n)) for n in range(AT_ONCE)))
            await idle(server.url)

        server.until_ready()
        run(inject(), seconds=3 * SECONDS)
        assert crowd.done["right"] > CLIENTS
        assert psutil.Process(server.lives[-1].process.pid).memory_info().rss < BOUND
    assert server.codes[-1] == 0
    assert set(server.codes[:-1]) <= {ENGINE_FAILED}
    assert len(server.codes) < 1 + len(INJECTED)
