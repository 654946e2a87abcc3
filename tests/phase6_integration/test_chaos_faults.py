"""The engine of a supervised server is killed, frozen and starved under a crowd. Each request gets the right answer,
token for token what transformers generates, or an orderly refusal."""

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
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from phase6_integration.serve import ENGINE_FAILED
from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.crowd import AT_ONCE, LENGTHS, OUTPUT, Crowd
from tests.phase6_integration.life import PATIENCE, Supervisor
from tests.phase6_integration.running import Oracle, answer, idle, line, parsed, request, run

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
        front = psutil.Process(server.lives[-1].process.pid).memory_info().rss
        print(f"front: {front >> 20} MiB; {dict(crowd.done)}; exits {server.codes}")
        assert front < BOUND
    assert server.codes[-1] == 0
    assert set(server.codes[:-1]) <= {ENGINE_FAILED}
    assert len(server.codes) < 1 + len(INJECTED)
