"""The engine in its process: what it answers, what it refuses, and what becomes of everyone when something fails."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from phase0_request import FinishReason, QueueFullError, SamplingParams
from phase2_prefill_decode.fields import ConfigError
from phase2_prefill_decode.shapes import SHAPES
from phase2_prefill_decode.threads import threads_for
from phase6_integration.answers import AnswerState, Ask, Delta
from phase6_integration.async_engine import AsyncEngine, Health, StepReport, UnavailableError
from phase6_integration.engine import NanoServingEngine
from phase6_integration.options import EngineOptions
from phase6_integration.reply import Reply
from phase6_integration.threads import environment
from phase6_integration.wire import Ended, Output, Started
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.faults import POISON

FAULTS = "tests.phase6_integration.faults"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [tuple(range(20 + 3 * n, 60 + 3 * n, 2)) for n in range(8)]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 120)

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def engine(fault: str = "", **options: Any) -> AsyncIterator[AsyncEngine]:
    """The bundled model on one thread, small, with every invariant checked after every step."""
    given = EngineOptions(**{"kv_cache_pages": 256, "threads": 1, "check_invariants": True, **options})
    made = AsyncEngine(given, factory=f"{FAULTS}:{fault}") if fault else AsyncEngine(given)
    async with made as ready:
        yield ready
    assert made._process is not None
    assert made._process.poll() is not None, "its process is still there"


async def read(reply: Reply) -> list[list[Delta]]:
    """All deltas of each answer."""
    answers: list[list[Delta]] = [[] for _ in reply.answers]
    async for deltas in reply:
        for delta in deltas:
            answers[delta.index].append(delta)
    return answers


async def answer(made: AsyncEngine, prompt: Sequence[int], params: SamplingParams = GREEDY, name: str = "one") -> Delta:
    """All of an answer in one piece."""
    (deltas,) = await read(made.submit([Ask(name, tuple(prompt), params)]))
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return Delta(
        0,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(offset for delta in deltas for offset in delta.offsets),
        tuple(found for delta in deltas for found in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[-1].error,
    )


async def idle(made: AsyncEngine) -> None:
    """The engine has said its last word on everyone."""
    assert await made._is_idle(30)
    gauges = made.gauges
    assert (gauges.running, gauges.waiting, gauges.pages_used) == (0, 0, 0)
    assert gauges.pages_free + gauges.pages_cached == gauges.pages_total


@pytest.fixture(scope="module")
def offline() -> list[list[int]]:
    with NanoServingEngine.from_pretrained(kv_cache_pages=256) as made:
        return [completion.output_tokens for completion in made.generate(PROMPTS, GREEDY)]


def test_it_answers_as_the_engine_in_this_process(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            found = await asyncio.gather(*(answer(made, prompt, name=f"{n}") for n, prompt in enumerate(PROMPTS)))
            assert [list(one.tokens) for one in found] == offline
            assert {one.finish_reason for one in found} == {FinishReason.LENGTH}
            assert made.tokenizer is not None
            assert [one.text for one in found] == [made.tokenizer.decode(tokens) for tokens in offline]
            await idle(made)

    run(test())


def test_the_front_needs_no_torch() -> None:
    program = "import sys, phase6_integration.server.app\nprint({'torch', 'triton', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_is_asked_together_is_told_apart_and_computed_once(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            asks = [Ask(f"{n}", PROMPTS[0] * 4, SamplingParams(max_tokens=9, seed=n)) for n in range(4)]
            with made.submit(asks) as reply:
                await reply.admitted()
                answers = await read(reply)
            assert [state.generated for state in reply.answers] == [9] * 4
            assert len({tuple(token for delta in deltas for token in delta.tokens) for deltas in answers}) > 1
            await idle(made)
            cached = sorted(state.cached_tokens for state in reply.answers)
            assert cached == [0, 64, 64, 64], "three find the pages of the first"
            assert made.gauges.hit_tokens == 192

    run(test())


def test_a_stop_string_ends_an_answer_and_the_engine_is_told(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            assert made.tokenizer is not None
            text = made.tokenizer.decode(offline[1])
            stop = text[len(text) // 2 :][:3]
            params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True, stop=stop, logprobs=0)
            one = await answer(made, PROMPTS[1], params)
            assert one.finish_reason is FinishReason.STOP
            assert one.text == text[: text.index(stop)]
            assert one.offsets == tuple(sorted(one.offsets))
            assert all(offset < len(one.text) for offset in one.offsets), "no token of what is not shown"
            assert len(one.logprobs) == len(one.tokens)
            await idle(made)

    run(test())


def test_who_leaves_is_let_go_of() -> None:
    async def test() -> None:
        async with engine() as made:
            long = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
            replies = [made.submit([Ask(f"{n}", PROMPTS[n], long)]) for n in range(6)]
            await replies[0].admitted()
            for reply in replies:
                with reply:
                    pass
            for reply in replies:
                ((last,),) = [deltas[-1:] for deltas in await read(reply)]
                assert last.finish_reason is FinishReason.ABORT
                reply.abort()
            await idle(made)

    run(test())


def test_who_does_not_read_holds_up_nobody(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            stalled = made.submit([Ask("stalled", PROMPTS[0], GREEDY)])
            assert list((await answer(made, PROMPTS[1])).tokens) == offline[1]
            await idle(made)
            turns = [deltas async for deltas in stalled]
            assert len(turns) == 1, "all that has come, at once"
            assert [token for delta in turns[0] for token in delta.tokens] == offline[0]

    run(test())


def test_a_deadline_ends_an_answer() -> None:
    async def test() -> None:
        async with engine(request_timeout=0.05) as made:
            long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
            assert (await answer(made, PROMPTS[0], long)).finish_reason is FinishReason.TIMEOUT
            (deltas,) = await read(made.submit([Ask("patient", PROMPTS[0], GREEDY, timeout=100.0)]))
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            await idle(made)

    run(test())


def test_what_can_never_be_served_is_refused_at_once() -> None:
    async def test() -> None:
        async with engine(kv_cache_pages=8, max_num_queued_reqs=3) as made:
            assert made.max_model_len == 128
            cases: list[tuple[Ask, str]] = [
                (Ask("a", (1,) * 120, SamplingParams(max_tokens=9)), "120 tokens and max_tokens is 9; together .* 128"),
                (Ask("a", (), GREEDY), "the prompt is empty"),
                (Ask("a", (9_999_999,), GREEDY), "token 9999999 is not of this model"),
                (Ask("a", (1,), SamplingParams(logit_bias={9_999_999: 1.0})), "not of this model"),
                (Ask("a", (1,), SamplingParams(stop_token_ids=[9_999_999])), "not of this model"),
                (Ask("a", (1,), GREEDY, cache_salt="x" * 300), "cache_salt"),
                (Ask("a", (1,), GREEDY, cache_salt="\ud800"), "surrogates not allowed"),
                (Ask("a", (1,), GREEDY, timeout=0.0), "finite number of seconds above 0"),
                (Ask("a", (1,), GREEDY, timeout=float("nan")), "finite number of seconds above 0"),
            ]
            for ask, words in cases:
                with pytest.raises(ValueError, match=words):
                    made.submit([Ask("fine", (1,), GREEDY), ask])
            with pytest.raises(ValueError, match="unique"):
                made.submit([Ask("a", (1,), GREEDY), Ask("a", (1,), GREEDY)])
            with pytest.raises(ValueError, match="4 answers are asked for at once; at most 3 may wait"):
                made.submit([Ask(f"{n}", (1,), GREEDY) for n in range(4)])
            assert (await answer(made, (1, 2, 3))).finish_reason is FinishReason.LENGTH, "nothing of them is left"
            await idle(made)

    run(test())


def test_prompts_are_scored() -> None:
    async def test() -> None:
        async with engine() as made:
            params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
            for name in ("first", "again"):
                reply = made.submit([Ask(name, PROMPTS[0], params)])
                await read(reply)
                (state,) = reply.answers
                assert state.prompt_logprobs is not None
                assert len(state.prompt_logprobs) == len(PROMPTS[0]) - 1
                assert all(len(found.top) == 2 and found.logprob <= 0 for found in state.prompt_logprobs)

    run(test())


def test_observers_are_told_of_everything() -> None:
    class Recorder:
        tokens, answered, generated, ends = 0, 0, 0, list[tuple[str, int, FinishReason]]()

        def stepped(self, report: StepReport) -> None:
            self.tokens += report.prefill_tokens + report.decode_tokens
            self.answered, self.generated = self.answered + report.answered, self.generated + report.generated

        def finished(self, ask: Ask, state: AnswerState, reason: FinishReason) -> None:
            times = state.times
            assert times.queue is not None
            assert times.e2e is not None
            assert 0 <= times.queue <= times.e2e
            self.ends.append((ask.id, state.generated, reason))

    async def test() -> None:
        async with engine() as made:
            recorder = Recorder()
            made.observers.append(recorder)
            await asyncio.gather(*(answer(made, PROMPTS[n], name=f"{n}") for n in range(3)))
            await idle(made)
            assert sorted(recorder.ends) == [(f"{n}", 24, FinishReason.LENGTH) for n in range(3)]
            assert recorder.tokens == sum(len(prompt) + 23 for prompt in PROMPTS[:3])
            assert (recorder.answered, recorder.generated) == (sum(map(len, PROMPTS[:3])), 3 * 24)

    run(test())


class Silent(FakeEngine):
    """What is said of its requests, the test says."""

    def _say(self, message: object) -> None: ...


def test_what_the_engine_says_of_an_answer_after_its_end_is_not_heard() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([Ask("one", (1,), GREEDY)])
        made._tell(started=[Started("one", 0.0, 0)], outputs=[Output("one", 300)])
        reply.abort()
        made._tell(outputs=[Output("one", 301)])
        made._tell(outputs=[Output("one", 302)], ended=[Ended("one", FinishReason.LENGTH)])
        (deltas,) = await read(reply)
        assert [token for delta in deltas for token in delta.tokens] == [300]
        assert [delta.finish_reason for delta in deltas] == [None, FinishReason.ABORT]
        assert reply.answers[0].generated == 1
        assert made.live == 0

    run(test())


def test_a_queue_holds_as_many_as_it_may_and_whoever_leaves_it_makes_room() -> None:
    def full(made: FakeEngine) -> bool:
        with pytest.raises(QueueFullError):
            made.submit([Ask("too many", (1,), GREEDY)])
        return True

    async def test() -> None:
        made = Silent(max_num_queued_reqs=2)
        made.submit([Ask("first", (1,), GREEDY), Ask("second", (1,), GREEDY)])
        assert full(made)
        made._tell(started=[Started("first", 0.0, 0)])
        made.submit([Ask("third", (1,), GREEDY)])
        assert full(made)
        made._tell(ended=[Ended("second", FinishReason.TIMEOUT)])
        made.submit([Ask("fourth", (1,), GREEDY)])
        assert full(made)

    run(test())


def test_draining_waits_for_everyone_not_for_the_first() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([Ask("one", (1,), GREEDY), Ask("two", (1,), GREEDY)])
        draining = asyncio.create_task(made.drain(60))
        await asyncio.sleep(0)
        made._tell(ended=[Ended("one", FinishReason.LENGTH)])
        for _ in range(5):
            await asyncio.sleep(0)
        made._tell(ended=[Ended("two", FinishReason.LENGTH)])
        await draining
        assert [deltas[-1].finish_reason for deltas in await read(reply)] == [FinishReason.LENGTH] * 2

    run(test())


# Something fails.


@pytest.mark.parametrize(
    ("fault", "victim", "params"),
    [
        ("model_raises", (*PROMPTS[0], POISON, 9), GREEDY),
        ("model_says_nan", (*PROMPTS[0], POISON), GREEDY),
        ("sampler_raises", PROMPTS[0], SamplingParams(max_tokens=9, top_k=13)),
    ],
)
def test_who_makes_a_step_fail_fails_alone(
    fault: str,
    victim: tuple[int, ...],
    params: SamplingParams,
    offline: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with engine(fault) as made:
            others = [asyncio.create_task(answer(made, PROMPTS[n], name=f"{n}")) for n in range(1, 5)]
            await asyncio.sleep(0)
            one = await answer(made, victim, params, name="victim")
            assert one.finish_reason is FinishReason.ERROR
            assert [list((await other).tokens) for other in others] == offline[1:5]
            assert made.health is Health.READY
            await idle(made)
            assert list((await answer(made, PROMPTS[5])).tokens) == offline[5]
            alone = await answer(made, victim, params, name="again")
            assert alone.finish_reason is FinishReason.ERROR, "alone too, and the engine lives"
            assert made.health is Health.READY

    run(test())
    said = [record.getMessage() for record in caplog.records if record.name.endswith("async_engine.process")]
    assert any("request victim fails alone too" in line for line in said) == ("raises" in fault)


@pytest.mark.parametrize(
    ("fault", "health", "words"),
    [
        ("model_hangs", Health.HUNG, "not said a word for 1 seconds"),
        ("model_dies", Health.DEAD, "its process has ended"),
        ("model_breaks", Health.DEAD, "no step can be computed any more"),
        ("scheduler_raises", Health.DEAD, "a seat is lost"),
    ],
)
def test_when_the_engine_fails_everyone_is_told(fault: str, health: Health, words: str) -> None:
    async def test() -> None:
        async with engine(fault, hang_timeout=1.0) as made:
            long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
            others = [asyncio.create_task(answer(made, PROMPTS[n], long, name=f"{n}")) for n in range(1, 5)]
            await asyncio.sleep(0)
            victim = await answer(made, (*PROMPTS[0], POISON, 9), name="victim")
            for one in (victim, *[await other for other in others]):
                assert one.finish_reason is FinishReason.ERROR
            assert made.health is health
            assert words in made.reason
            with pytest.raises(UnavailableError, match=health.value):
                made.submit([Ask("late", (1,), GREEDY)])

    run(test())


def test_an_answer_whose_text_cannot_be_made_fails_alone(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            tokenizer = made.tokenizer
            assert tokenizer is not None
            sound: Callable[[int], bytes] = tokenizer.token_bytes

            def token_bytes(token: int) -> bytes:
                if token == offline[0][5]:
                    raise RuntimeError("no bytes for this one")
                return sound(token)

            tokenizer.token_bytes = token_bytes  # type: ignore[method-assign]
            spared = next(n for n, tokens in enumerate(offline) if offline[0][5] not in tokens)
            one, other = await asyncio.gather(
                answer(made, PROMPTS[0], name="one"), answer(made, PROMPTS[spared], name="other")
            )
            assert one.finish_reason is FinishReason.ERROR
            assert list(other.tokens) == offline[spared]
            await idle(made)

    run(test())


def test_an_engine_is_started_once() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:no_engine")
        first, second = await asyncio.gather(made.start(), made.start(), return_exceptions=True)
        assert first is None
        assert str(second) == "an engine is started once"
        waiting = await asyncio.gather(*(made.ready() for _ in range(3)), return_exceptions=True)
        assert [type(end) for end in waiting] == [UnavailableError] * 3
        await made.close()
        assert psutil.Process().children() == []
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


def test_draining_lets_those_who_are_here_end_and_takes_nobody(offline: list[list[int]]) -> None:
    async def test() -> None:
        async with engine() as made:
            here = asyncio.create_task(answer(made, PROMPTS[0]))
            await asyncio.sleep(0)
            draining = asyncio.create_task(made.drain(60))
            await asyncio.sleep(0)
            assert made.health is Health.DRAINING
            with pytest.raises(UnavailableError, match="draining"):
                made.submit([Ask("late", (1,), GREEDY)])
            assert list((await here).tokens) == offline[0]
            await draining

    run(test())


def test_who_is_left_when_the_time_is_up_ends_with_an_error() -> None:
    async def test() -> None:
        async with engine() as made:
            long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
            here = asyncio.create_task(answer(made, PROMPTS[0], long))
            await asyncio.sleep(0)
            await made.drain(0.0)
            assert (await here).finish_reason is FinishReason.ERROR
            await idle(made)

    run(test())


def test_closing_leaves_no_process_and_no_thread() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(kv_cache_pages=64, threads=1))
        async with made:
            assert made._process is not None
            process = psutil.Process(made._process.pid)
            here = asyncio.create_task(answer(made, PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True)))
            await asyncio.sleep(0)
        assert (await here).finish_reason is FinishReason.ERROR
        assert not process.is_running()
        await made.close()

    run(test())
    assert psutil.Process().children() == []


def test_an_engine_that_loads_has_no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase6_integration.async_engine.LAST_WORDS", 3600.0)

    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        await made.close()
        assert made._process is not None
        assert made._process.returncode == -signal.SIGKILL

    run(test())


def test_ctrl_c_in_a_terminal_is_not_for_the_engine() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(), factory=f"{FAULTS}:never")
        await made.start()
        assert made._process is not None
        assert os.getpgid(made._process.pid) != os.getpgrp()
        await made.close()

    run(test())


def test_who_does_not_wait_for_the_end_leaves_no_process_either() -> None:
    async def test() -> None:
        made = AsyncEngine(EngineOptions(kv_cache_pages=64), factory=f"{FAULTS}:model_hangs")
        async with made:
            reply = made.submit([Ask("one", (POISON,), GREEDY)])
            closing = asyncio.create_task(made.close())
            await read(reply)
            closing.cancel()
            await asyncio.wait([closing])
            assert made._process is not None
            assert await asyncio.to_thread(made._process.wait, 60) == -signal.SIGKILL

    run(test())


def test_closing_does_not_wait_for_threads_of_others() -> None:
    held = threading.Event()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        try:
            async with engine(kv_cache_pages=64):
                loop.set_default_executor(ThreadPoolExecutor(1))
                busy = loop.run_in_executor(None, held.wait)
            assert not busy.done()
        finally:
            held.set()

    run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the line alone tells an engine that its front has gone")
def test_an_engine_whose_front_is_gone_when_it_looks_does_not_begin() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "phase6_integration.engine_process", str(theirs.fileno()), "1"]
        begun = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            assert begun.wait(60) == 0
        finally:
            begun.kill()
            begun.wait()


def test_a_small_model_has_one_thread_and_a_large_one_all_that_sleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("phase2_prefill_decode", "phase6_integration"):
        monkeypatch.setattr(f"{module}.threads.cores", lambda: 4)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert threads_for(SHAPES["17m"]) == 4
    assert AsyncEngine(EngineOptions()).options.threads == 1
    assert AsyncEngine(EngineOptions(threads=3)).options.threads == 3
    assert environment(4) == {"OMP_WAIT_POLICY": "passive"}
    assert environment(3) == {}, "a core is left to the front"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert environment(4) == {}, "whoever sets it knows why"
