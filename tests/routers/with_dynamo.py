"""Dynamo's SelectionService, which Ray Serve's KVAwareRouter asks too: what it learns from KV events, it must find."""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dynamo.llm import SelectionService

PAGE, PAGES, PATIENCE = 16, 48, 60.0
Tokens = list[int]


class Server:
    """`nanoserve serve` with few pages, and where it listens."""

    def __init__(self, command: str) -> None:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0)), second.bind(("127.0.0.1", 0))
            self.events, self.replay = (f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
        config = json.dumps({"endpoint": self.events, "replay_endpoint": self.replay})
        flags = ("--port", "0", "--kv-cache-pages", f"{PAGES}", "--kv-events-config", config)
        self.process = subprocess.Popen([*command.split(), "serve", *flags], stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = self.until(r"listening.*(http://[\d.]+:\d+)")
        self.until(r"\bready\b")
        assert self.process.stderr is not None
        threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()

    def until(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found[found.re.groups]
        raise AssertionError(f"the server has ended:\n{''.join(self.log)}")

    def complete(self, prompt: Tokens, salt: str) -> int:
        """How many of the prompt's tokens the engine found in its cache."""
        body = {"prompt": prompt, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request) as response:
            found: int = json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def kill_engine(self) -> None:
        """Kill the engine's process, and wait until there is another one."""
        pid = self.process.pid
        (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)
        while not any("started again" in line for line in self.log) and self.is_ready():
            pass
        while not self.is_ready():
            pass

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready"):
                return True
        except OSError:
            return False


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(os.environ.get("NANOSERVE", "nanoserve"))
    try:
        yield one
    finally:
        one.process.terminate()
        assert one.process.wait(PATIENCE) == 0


@asynccontextmanager
async def router(server: Server) -> AsyncIterator[SelectionService]:
    service = SelectionService(indexer_threads=1)
    worker = {"worker_id": 7, "block_size": PAGE, "endpoint": server.url, "max_num_batched_tokens": 512}
    await service.upsert_worker(worker | {"kv_events_endpoint": server.events, "replay_endpoint": server.replay})
    try:
        yield service
    finally:
        service.shutdown()


async def expected(service: SelectionService, prompt: Tokens, salt: str = "") -> int:
    """The tokens that the router expects the engine to have, of those that need not be computed."""
    (score,) = (await service.overlap_scores({"token_ids": prompt[:-1], "cache_salt": salt or None}))["workers"]
    return PAGE * int(score["device_blocks"])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.01)


async def send(service: SelectionService, server: Server, prompt: Tokens, salt: str = "") -> int:
    """Run a prompt, and wait until the router has heard of it, and so of all before it."""
    found = await asyncio.to_thread(server.complete, prompt, salt)
    whole = (len(prompt) - 1) // PAGE * PAGE

    async def heard() -> bool:
        return await expected(service, prompt, salt) == whole

    await until(heard)
    return found


def test_it_expects_what_the_engine_has(server: Server) -> None:
    """Prompts with common prefixes and salts, in a pool that is too small for them: hits, misses and evictions."""

    async def check() -> None:
        choose = random.Random(1)
        texts = [[choose.randrange(10, 4000) for _ in range(8 * PAGE)] for _ in range(4)]
        hits = misses = 0
        server.complete(texts[0], "")  # before the router listens
        async with router(server) as service:
            await send(service, server, texts[1])
            assert await expected(service, texts[0]) == 7 * PAGE
            for _ in range(150):
                text, salt = choose.choice(texts), choose.choice(["", "", "a", "b"])
                prompt = text[: choose.randrange(PAGE, len(text))] + [choose.randrange(10, 4000) for _ in range(9)]
                wanted = await expected(service, prompt, salt)
                found = await send(service, server, prompt, salt)
                assert wanted == found, f"{len(prompt)} tokens, salt {salt!r}: {found} found, {wanted} expected"
                hits, misses = hits + (found > 0), misses + (found == 0)
        assert min(hits, misses) > 20

    asyncio.run(check())


def test_an_engine_that_starts_again_has_nothing(server: Server) -> None:
    async def check() -> None:
        prompt = list(range(100, 100 + 4 * PAGE))
        async with router(server) as service:
            server.complete(prompt, "")
            await send(service, server, [5] * 3 * PAGE)
            assert await expected(service, prompt) == 3 * PAGE
            await asyncio.to_thread(server.kill_engine)
            fresh = itertools.count(6)

            async def heard() -> bool:
                """The router takes a moment to connect again, and then asks for what it has missed."""
                await asyncio.to_thread(server.complete, newest := [next(fresh)] * 3 * PAGE, "")
                return await expected(service, newest) > 0

            await until(heard)
            assert await expected(service, prompt) == 0

    asyncio.run(check())
