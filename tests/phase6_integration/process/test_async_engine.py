"""The engine in a process of its own: what it answers and refuses, how it begins and how it ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from phase0_request import FinishReason, SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.lab.shapes import SHAPES
from phase6_integration.engine.located import threads_for
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import EngineRequest
from tests.phase6_integration.faults import POISON
from tests.phase6_integration.real_engine import (
    FAULTS,
    PROMPTS,
    OnTheEngine,
    answer,
    engine,
    idle,
    process,
    read,
    request,
    shared,
)
from tests.phase6_integration.running import run

OUTSIDE = "token ids of this model run from 0 to .*, got 9999999"
LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def on_the_engine() -> Iterator[OnTheEngine]:
    """Runs a test on the bundled model, on which three kinds of requests fail."""
    with shared("requests_fail") as run_on:
        yield run_on


def test_it_answers_as_the_engine_in_this_process(on_the_engine: OnTheEngine, offline: list[list[int]]) -> None:
    async def test(made: AsyncEngine) -> None:
        found = await asyncio.gather(*(answer(made, prompt, name=f"{n}") for n, prompt in enumerate(PROMPTS)))
        assert [list(one.tokens) for one in found] == offline
        assert {one.finish_reason for one in found} == {FinishReason.LENGTH}
        assert made.tokenizer is not None
        assert [one.text for one in found] == [made.tokenizer.decode(tokens) for tokens in offline]

    on_the_engine(test)


def test_what_can_never_be_served_is_refused_at_once() -> None:
    async def test() -> None:
        async with engine("light", kv_cache_pages=8, max_num_queued_reqs=3) as made:
            assert made.max_model_len == 128
            cases: list[tuple[EngineRequest, str]] = [
                (request("a", (1,) * 120, SamplingParams(max_tokens=9)), "120 tokens and max_tokens is 9; .* 128"),
                (request("a", ()), "the prompt is empty"),
                (request("a", (9_999_999,)), OUTSIDE),
                (request("a", (1,), SamplingParams(logit_bias={9_999_999: 1.0})), OUTSIDE),
                (request("a", (1,), SamplingParams(stop_token_ids=[9_999_999])), OUTSIDE),
                (request("a", (1,), cache_salt="x" * 300), "cache_salt"),
                (request("a", (1,), cache_salt="\ud800"), "surrogates not allowed"),
                (request("a", (1,), priority=1 << 40), "priority"),
                (request("a", (1,), timeout=0.0), "timeout must be a number above 0"),
                (request("a", (1,), timeout=float("nan")), "timeout must be a number above 0"),
                (request("a", (1,), n=4), "4 completions are requested at once; at most 3 may wait"),
            ]
            for refused, words in cases:
                with pytest.raises(ValueError, match=words):
                    made.submit(refused)
            assert (await answer(made, (1, 2, 3))).finish_reason is FinishReason.LENGTH, "nothing of them is left"
            await idle(made)

    run(test())


def test_a_fault_of_the_scheduler_ends_the_engine_and_every_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with engine("light_scheduler_raises") as made:
            others = [asyncio.create_task(answer(made, PROMPTS[n], LONG, name=f"{n}")) for n in range(1, 5)]
            await asyncio.sleep(0)
            victim = await answer(made, (*PROMPTS[0], POISON, 9), name="victim")
            for chunk in (victim, *[await other for other in others]):
                assert chunk.finish_reason is FinishReason.ERROR
            assert made.health is Health.DEAD
            assert "a seat is lost" in made.reason

    run(test())
    assert "the engine has failed" in caplog.text, "the records of its process are logged in this one"


# It begins.


def test_an_engine_is_started_once_and_says_why_it_cannot_load() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:no_engine")
        await made.start()
        for start in (made.start(), made.start()):
            with pytest.raises(RuntimeError, match="an engine can be started only once"):
                await start
        for _ in range(2):
            with pytest.raises(UnavailableError, match="no memory is left"):
                await made.ready()
        await made.close()
        assert made.health is Health.STOPPED
        assert process(made).poll() is not None

    run(test())
    with pytest.raises(ConfigError, match=r"there is no directory \./nowhere"):
        AsyncEngine(EngineOptions(model="./nowhere"))


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


def test_a_small_model_has_one_thread_and_a_large_one_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase6_integration.engine.located.cores", lambda: 4)
    assert threads_for(SHAPES["17m"]) == 4
    assert AsyncEngine(EngineOptions()).options.threads == 1
    assert AsyncEngine(EngineOptions(threads=3)).options.threads == 3


@pytest.mark.parametrize("set_by_the_user", [None, "active"])
def test_threads_sleep_while_they_wait_unless_the_user_wants_otherwise(set_by_the_user: str | None) -> None:
    """What OpenMP says itself when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": set_by_the_user} if set_by_the_user else {})
    command = [sys.executable, "-c", "import phase2_prefill_decode.engine"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"OMP_WAIT_POLICY = '{(set_by_the_user or 'passive').upper()}'" in ran.stderr
    assert ("GOMP_SPINCOUNT = '300'" in ran.stderr) is (set_by_the_user is None)


# It ends.


def test_requests_left_after_the_drain_timeout_end_with_an_error() -> None:
    async def test() -> None:
        async with engine("light") as made:
            here = asyncio.create_task(answer(made, PROMPTS[0], LONG))
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


def test_an_engine_that_still_loads_is_killed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a process group of its own: Ctrl-C in a terminal is not for the engine."""
    monkeypatch.setattr("phase6_integration.process.engine_client.STOP_TIMEOUT", 3600.0)

    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        assert os.getpgid(process(made).pid) != os.getpgrp()
        while made.reason != "compiling, 1 of 3 done":
            await asyncio.sleep(0.01)
        assert made.health is Health.LOADING
        await made.close()
        assert process(made).returncode == -signal.SIGKILL

    run(test())


def test_a_cancelled_close_leaves_no_process() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(kv_cache_pages=64), factory=f"{FAULTS}:light_hangs")
        async with made:
            reply = made.submit(request("one", (POISON,)))
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
        async with engine("light"):
            loop.set_default_executor(ThreadPoolExecutor(1))
            busy = loop.run_in_executor(None, held.wait)
        assert not busy.done()
        held.set()

    try:
        run(test())
    finally:
        held.set()
