"""The engine dies, freezes, hangs, never loads or has no memory.

Published cases in other servers: vLLM #7633, #24897 and #39863 (the front of a dead engine stays up, its health says
ready), #52178 (it exits with 0, and Restart=on-failure does nothing); SGLang #6624 (health without a scheduler).
"""

import asyncio
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase0_request import FinishReason, SamplingParams
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process import async_engine
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import CHUNK, Channel, EngineRequest, Finish, frame
from phase6_integration.process.outputs import OutputStream
from phase6_integration.serve import ENGINE_FAILED
from tests.phase6_integration.asgi import awaited
from tests.phase6_integration.fake_engine import served
from tests.phase6_integration.life import PATIENCE, Life, gone, life, logfmt, scripted, stream
from tests.phase6_integration.real_engine import FAULTS, admitted, process, read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits other processes")
LONG = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "RESTART_DELAY", 0.01)


@contextlib.asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine process without a model, which runs one request at a time."""
    async with AsyncEngine(EngineOptions(max_num_seqs=1, **options), factory=f"{FAULTS}:light") as made:
        yield made
    assert process(made).poll() is not None, "its process is still there"


def submit(made: AsyncEngine, name: str, params: SamplingParams = LONG, token: int = 3) -> OutputStream:
    return made.submit(EngineRequest(name, [(token,)], params, [params.max_tokens]))


async def end(outputs: OutputStream) -> tuple[FinishReason | None, Health | None]:
    ((*_, last),) = await read(outputs)
    return last.finish_reason, last.error.health if isinstance(last.error, UnavailableError) else None


@awaited
async def test_an_engine_that_is_killed_is_started_again_twice() -> None:
    """Fault: after `kill -9` of the engine every later request got a 503 for ever."""
    async with engine(max_engine_restarts=2) as made:
        for health in (Health.LOADING, Health.LOADING, Health.DEAD):
            outputs = [submit(made, f"{number}") for number in range(3)]  # of which two wait
            await admitted(outputs[0])
            process(made).kill()
            assert [await end(one) for one in outputs] == [(FinishReason.ERROR, Health.DEAD)] * 3
            assert made.health is health
            assert (made.gauges.running, made.gauges.waiting, made._live) == (0, 0, {})
            with pytest.raises(UnavailableError, match=health.value):
                submit(made, "refused")
            while made.health is Health.LOADING:
                await asyncio.sleep(0.01)
        assert made.restarts == 2
        assert made.failed.is_set(), "it is not started a third time"


@awaited
async def test_a_server_can_drain_while_its_engine_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(max_engine_restarts=1) as made:
        monkeypatch.setattr(async_engine, "RESTART_DELAY", 3600.0)
        outputs = submit(made, "first")
        process(made).kill()
        assert await end(outputs) == (FinishReason.ERROR, Health.DEAD)
        await made.drain(0.0)
        assert made.health is Health.DRAINING


@awaited
async def test_a_restart_that_fails_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: without memory for a thread the restart ended unseen, and the engine counted as loading for ever."""
    async with engine(max_engine_restarts=2) as made:

        def spawn(_: EngineClient, end: socket.socket) -> None:
            end.close()
            raise RuntimeError("can't start new thread")

        killed = process(made)
        with monkeypatch.context() as shortage:
            shortage.setattr(EngineClient, "spawn", spawn)
            killed.kill()
            async with asyncio.timeout(PATIENCE):
                await made.failed.wait()
        assert (made.health, made.restarts) == (Health.DEAD, 2)
        assert "can't start new thread" in made.reason
        made._client.process = killed  # type: ignore[union-attr]  # for the check of the fixture


@pytest.mark.parametrize(("busy", "limit"), [(True, {"hang_timeout": 0.5}), (False, {"heartbeat_timeout": 0.3})])
@awaited
async def test_an_engine_that_is_frozen_is_noticed(busy: bool, limit: dict[str, Any]) -> None:
    """Fault: SIGSTOP of an idle engine was not noticed before a request had waited for the whole hang timeout."""
    async with engine(max_engine_restarts=0, **limit) as made:
        running = [submit(made, "running") for _ in range(busy)]
        for outputs in running:
            await admitted(outputs)
        process(made).send_signal(signal.SIGSTOP)
        late = [submit(made, "late") for _ in range(busy)]
        await made.failed.wait()
        assert made.health is Health.HUNG
        assert "it has sent nothing for" in made.reason
        for outputs in running + late:
            assert await end(outputs) == (FinishReason.ERROR, Health.HUNG)


@awaited
async def test_an_idle_engine_that_answers_is_left_alone() -> None:
    async with engine(heartbeat_timeout=0.2) as made:
        assert made._client is not None
        heard = asyncio.Semaphore(0)
        listen = made._client.watchdog.heard
        made._client.watchdog.heard = lambda: (listen(), heard.release())  # type: ignore[method-assign,assignment]
        for _ in range(4):
            await heard.acquire()
        assert (made.health, made.restarts) == (Health.READY, 0)


@awaited
async def test_a_restarted_engine_that_does_not_load_is_noticed() -> None:
    async with engine(max_engine_restarts=1) as made:
        made._factory = f"{FAULTS}:never"
        made.options = replace(made.options, load_timeout=0.3)
        process(made).kill()
        await made.failed.wait()
        assert (made.health, made.reason) == (Health.HUNG, "the model was not loaded within 0.3 seconds")


def test_the_channel_takes_descriptors_above_1023() -> None:
    """Fault: `select()` raises ValueError from descriptor 1024 on, and with many clients the engine has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        ours, theirs = socket.socketpair()
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)
        with ours, theirs, socket.socket(fileno=high) as end:
            channel = Channel(end)
            ours.sendall(frame(Finish("x", FinishReason.ABORT)))
            assert channel.receive(wait=True) == [Finish("x", FinishReason.ABORT)]
            while not channel._unsent:
                channel.send(Finish("y" * CHUNK, FinishReason.ABORT))  # type: ignore[arg-type]
            assert channel.receive(wait=False) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# As a process.


def engine_of(one: Life) -> int:
    """The engine's process id."""
    (found,) = one.engines()
    return found


@contextlib.contextmanager
def ready(*arguments: str, **environment: str) -> Iterator[tuple[Life, str]]:
    with life(*arguments, factory="faults:light", **environment) as one:
        url = one.listening()
        one.until("message=ready ")
        yield one, url


def test_a_server_whose_engine_fails_for_good_completes_its_responses_and_exits_with_70() -> None:
    """Fault: it stayed up, answered 503 for ever, and ended with 0 when it was stopped."""
    with (
        ready("--max-engine-restarts", "0") as (one, url),
        httpx2.Client(timeout=PATIENCE) as http,
    ):
        events = stream(http, url, prompt=[3], max_tokens=1900, ignore_eos=True)
        next(events)
        child = engine_of(one)
        os.kill(child, signal.SIGKILL)
        *_, failure, done = events
        assert '"code": "dead"' in failure
        assert done == "[DONE]"
        assert one.ended() == ENGINE_FAILED == 70
    assert gone(child)
    assert logfmt(one.lines[-1])["message"].startswith("the engine is dead: its process has ended")


def test_a_restart_is_seen_from_outside() -> None:
    """Meanwhile the server is alive and not ready; the metrics count it."""
    with ready() as (one, url), httpx2.Client(base_url=url) as http:
        os.kill(engine_of(one), signal.SIGKILL)
        one.until("the engine is dead")
        assert http.get("/health/live").status_code == 200
        response = http.get("/health/ready")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert int(response.headers["retry-after"]) > 0
        while (response := http.get("/health")).status_code != 200:
            assert response.json()["error"]["code"] == "loading"
        metrics = http.get("/metrics").text
        for line in ("engine_up{engine=", "engine_restarts_total{engine="):
            assert re.search(rf'nanoserve:{line}"0",model_name="tiny_chat"}} 1\.0', metrics), metrics
        assert http.get("/stats").json()["engine_restarts"] == 1
        one.signal(signal.SIGTERM)
        assert one.ended() == 0


def test_a_model_that_never_loads_ends_the_server_with_1() -> None:
    with life("--load-timeout", "0.5", factory="faults:never") as one:
        assert one.ended() == 1
    assert logfmt(one.lines[-1])["message"] == "the model was not loaded within 0.5 seconds"


def test_when_descriptors_run_out_clients_and_the_log_hear_of_it_and_the_server_recovers() -> None:
    """Fault: at the limit the kernel's connections were accepted and closed without a byte, and the log had no line."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (84, 84))"  # 64 of them are kept
    with scripted(first=few) as (server, url):
        port = int(url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            answers = []
            for _ in range(50):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
                client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answers.append(client.recv(4096))
        assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 20 + [b"HTTP/1.1 503"] * 30
        assert all(b'"code": "overloaded"' in answer and b"retry-after" in answer for answer in answers[20:])
        with httpx2.Client(base_url=url) as http:
            while http.get("/version").status_code != 200:
                pass
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    assert any("more connections than 20 are open" in line for line in server.lines)


def test_after_a_shortage_of_memory_prompts_are_answered_again() -> None:
    """Fault: with the address space limited for a moment, prompts of 60 and 1,000 words got a 500 for ever after, while
    /health said ready: the probe computed one token, which still went well."""
    engines: list[AsyncEngine] = []

    def make() -> AsyncEngine:
        engines.append(AsyncEngine(EngineOptions(kv_cache_pages=512)))
        return engines[0]

    with served(make) as url, httpx2.Client(timeout=PATIENCE) as http:

        def ask(words: int) -> int:
            body = {"prompt": "word " * words, "max_tokens": 2, "ignore_eos": True}
            return http.post(f"{url}/v1/completions", json=body).status_code

        assert ask(3) == 200
        child = process(engines[0]).pid
        held = int(Path(f"/proc/{child}/statm").read_text().split()[0]) * resource.getpagesize()
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(child, resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))
        during = [ask(words) for words in (60, 1000, 60)]
        assert set(during) <= {200, 503}, "no request is to blame"
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(child, resource.RLIMIT_AS, unlimited)
        for words in (60, 1000):
            while (status := ask(words)) != 200:
                assert status == 503
