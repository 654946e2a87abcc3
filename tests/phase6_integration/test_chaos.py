"""Crowds of clients, some of them hostile, and an engine that is killed and frozen. Orderly clients get what
transformers generates, token for token, from a server that preempts them all the time."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.crowd import LENGTHS, OUTPUT, Crowd
from tests.phase6_integration.life import Life, life
from tests.phase6_integration.running import Oracle, answer, ask, get, idle, line, request, run, serving

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


@pytest.mark.parametrize("requests", [150, pytest.param(10_000, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("clients", [20, pytest.param(200, marks=pytest.mark.slow)])
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


# The engine fails. Each request gets the right answer, or an orderly refusal; never a wrong answer, nor half a one.

REFUSALS = {"loading", "dead", "hung", "queue_full", "overloaded"}


class CrowdUnderFaults(Crowd):
    """Clients that take an orderly refusal for an answer."""

    async def orderly(self, draw: random.Random) -> None:
        which = draw.randrange(len(self.given))
        response = await ask(self.url, self.body(draw, which))
        error = response.error if response.status != 200 else None
        if error is None and response.headers["content-type"] != "application/json":
            *_, last, done = response.events
            assert done == "[DONE]"
            error = json.loads(last).get("error")
        assert (error["code"] in REFUSALS) if error else answer(response) == self.wanted[which], response
        self.done["refused" if error else "right"] += 1
        await asyncio.sleep(0.1 if error else 0)  # Retry-After, in this hurry

    async def until(self, over: asyncio.Event, draw: random.Random) -> None:
        while not over.is_set():
            if draw.random() < 0.9:
                await self.orderly(draw)
            else:
                with contextlib.suppress(OSError):
                    await self.leaves(draw)


@pytest.mark.slow
def test_orderly_clients_are_answered_right_or_refused_in_order_while_the_engine_fails(tmp_path: Path) -> None:
    """What else may fail, in a quiet server: `adversarial`."""
    oracle = Oracle.saved(tmp_path)
    given = prompts(oracle.model.config.vocab_size, LENGTHS)
    flags = ("--dtype", "float32", "--kv-cache-pages", "160", "--heartbeat-timeout", "5", "--max-engine-restarts", "9")
    with life(str(tmp_path), *flags) as server:
        url = server.listening()
        server.until("ready")
        crowd = CrowdUnderFaults(url, given, oracle.answers(given, OUTPUT), Counter())

        async def test() -> None:
            over = asyncio.Event()
            clients = [asyncio.create_task(crowd.until(over, random.Random(number))) for number in range(200)]
            for fault in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
                right = crowd.done["right"]
                while crowd.done["right"] < right + 100:
                    await asyncio.sleep(0.1)
                (engine,) = server.engines()
                os.kill(engine, fault)
                await asyncio.to_thread(server.until, "the engine is (dead|hung)")
                while (await get(url, "/health/ready")).status != 200:
                    await asyncio.sleep(0.1)
            over.set()
            await asyncio.gather(*clients)
            assert crowd.done["refused"]
            await Crowd(url, given, crowd.wanted, Counter()).orderly(random.Random(0))
            await idle(url)

        run(test(), seconds=600)
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
