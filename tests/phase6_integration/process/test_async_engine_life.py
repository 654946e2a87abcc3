"""How an engine's process begins and ends: starting, draining, closing, and its threads."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from phase0_request import FinishReason, SamplingParams
from phase0_request.checks import ConfigError
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.threads import threads_for
from phase6_integration.engine.options import EngineOptions, openmp_environment
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import EngineRequest
from tests.phase6_integration.faults import POISON
from tests.phase6_integration.life import engines
from tests.phase6_integration.real_engine import FAULTS, GREEDY, PROMPTS, answer, engine, idle, process, read
from tests.phase6_integration.running import run

# It begins.


def test_an_engine_is_started_once() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:no_engine")
        first, second = await asyncio.gather(made.start(), made.start(), return_exceptions=True)
        assert first is None
        assert str(second) == "an engine can be started only once"
        waiting = await asyncio.gather(*(made.ready() for _ in range(3)), return_exceptions=True)
        assert [type(end) for end in waiting] == [UnavailableError] * 3
        await made.close()
        assert engines(os.getpid()) == []
        with pytest.raises(RuntimeError, match="once"):
            await made.start()

    run(test())


def test_an_engine_that_cannot_load_says_why() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:no_engine")
        with pytest.raises(UnavailableError, match="no memory is left"):
            async with made:
                pass
        assert made.health is Health.STOPPED
        with pytest.raises(ConfigError, match=r"there is no directory \./nowhere"):
            AsyncEngine(EngineOptions(model="./nowhere"))

    run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the line alone tells an engine that its front has gone")
def test_an_engine_whose_parent_has_died_does_not_start() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "phase6_integration.process.engine_process", str(theirs.fileno()), "1"]
        begun = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            assert begun.wait(60) == 0
        finally:
            begun.kill()
            begun.wait()


def test_a_small_model_has_one_thread_and_a_large_one_all_that_sleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("phase2_prefill_decode.threads", "phase6_integration.engine.options"):
        monkeypatch.setattr(f"{module}.cores", lambda: 4)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert threads_for(SHAPES["17m"]) == 4
    assert AsyncEngine(EngineOptions()).options.threads == 1
    assert AsyncEngine(EngineOptions(threads=3)).options.threads == 3
    assert openmp_environment(4) == {"OMP_WAIT_POLICY": "passive"}
    assert openmp_environment(3) == {}, "a core is left to the front"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert openmp_environment(4) == {}, "a value set by the user is kept"


# It ends.


def test_draining_completes_running_requests_and_refuses_new_ones() -> None:
    async def test() -> None:
        async with engine("light") as made:
            here = asyncio.create_task(answer(made, PROMPTS[0]))
            await asyncio.sleep(0)
            draining = asyncio.create_task(made.drain(60))
            await asyncio.sleep(0)
            assert made.health is Health.DRAINING
            with pytest.raises(UnavailableError, match="draining"):
                made.submit([EngineRequest("late", (1,), GREEDY)])
            said = [300 + token for token in 2 * PROMPTS[0]]
            assert list((await here).tokens) == said[: GREEDY.max_tokens]
            await draining

    run(test())


def test_requests_left_after_the_drain_timeout_end_with_an_error() -> None:
    async def test() -> None:
        async with engine("light") as made:
            long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
            here = asyncio.create_task(answer(made, PROMPTS[0], long))
            await asyncio.sleep(0)
            await made.drain(0.0)
            assert (await here).finish_reason is FinishReason.ERROR
            await idle(made)

    run(test())


def test_closing_leaves_no_process_and_no_thread() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(kv_cache_pages=64), factory=f"{FAULTS}:light")
        async with made:
            child = psutil.Process(process(made).pid)
            here = asyncio.create_task(answer(made, PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True)))
            await asyncio.sleep(0)
        assert (await here).finish_reason is FinishReason.ERROR
        assert not child.is_running()
        await made.close()

    run(test())
    assert engines(os.getpid()) == []


def test_while_it_loads_the_reason_says_how_far_that_is() -> None:
    async def test() -> None:
        heard = asyncio.Event()

        class Heard(AsyncEngine):
            def handle(self, message: Any) -> None:
                super().handle(message)
                heard.set()

        made = Heard(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        await heard.wait()
        assert (made.health, made.reason) == (Health.LOADING, "compiling, 1 of 3 done")
        await made.close()

    run(test())


def test_an_engine_that_still_loads_is_killed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase6_integration.process.engine_client.STOP_TIMEOUT", 3600.0)

    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        await made.close()
        assert process(made).returncode == -signal.SIGKILL

    run(test())


def test_ctrl_c_in_a_terminal_is_not_for_the_engine() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        assert os.getpgid(process(made).pid) != os.getpgrp()
        await made.close()

    run(test())


def test_a_cancelled_close_leaves_no_process() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(kv_cache_pages=64), factory=f"{FAULTS}:light_hangs")
        async with made:
            reply = made.submit([EngineRequest("one", (POISON,), GREEDY)])
            closing = asyncio.create_task(made.close())
            await read(reply)
            closing.cancel()
            await asyncio.wait([closing])
            assert await asyncio.to_thread(process(made).wait, 60) == -signal.SIGKILL

    run(test())


def test_closing_does_not_wait_for_threads_of_others() -> None:
    held = threading.Event()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        try:
            async with engine("light"):
                loop.set_default_executor(ThreadPoolExecutor(1))
                busy = loop.run_in_executor(None, held.wait)
            assert not busy.done()
        finally:
            held.set()

    run(test())
