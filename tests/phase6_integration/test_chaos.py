"""Thousands of short requests from every kind of client. The orderly ones get what transformers generates, token for
token, from a server that preempts them all the time."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.crowd import LENGTHS, OUTPUT, Crowd
from tests.phase6_integration.life import Life
from tests.phase6_integration.running import Oracle, answer, ask, idle, line, request, run, serving

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
    wanted = small.oracle.answers(given, OUTPUT)

    async def test(server: Life, url: str) -> None:
        crowd = Crowd(url, given, wanted, Counter())
        tenth = requests // 10
        await crowd.rush(0, tenth)
        await idle(url)
        early = memory(server)
        await crowd.rush(tenth, requests - tenth)
        stats = await idle(url)
        late = memory(server)
        assert crowd.done.total() == requests
        assert min(crowd.done.values()) > 0, crowd.done
        assert stats["requests"]["finished"]["error"] == 0
        for name, before in early.items():
            print(f"{name}: {before >> 10} KiB after {tenth} requests, {late[name] >> 10} KiB after {requests}")
            assert requests < 10_000 or late[name] < FLAT * before, name
        print(dict(crowd.done), stats["requests"], stats["prefix_cache"])

    run(test(small.server, small.url), seconds=1200)
