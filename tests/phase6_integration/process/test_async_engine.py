"""The engine in its process: what it answers, what it refuses, what it reports, and which requests a fault ends."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from phase0_request import FinishReason, SamplingParams
from phase6_integration.process.async_engine import AsyncEngine, StepReport
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import OutputState
from tests.phase6_integration.faults import NAN, POISON
from tests.phase6_integration.real_engine import GREEDY, PROMPTS, OnTheEngine, answer, engine, idle, read, shared
from tests.phase6_integration.running import run

OUTSIDE = "token ids of this model run from 0 to .*, got 9999999"


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


def test_the_front_needs_no_torch() -> None:
    program = "import sys, phase6_integration.app\nprint({'torch', 'triton', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_requests_with_one_prompt_compute_it_once_and_keep_their_outputs_apart(on_the_engine: OnTheEngine) -> None:
    async def test(made: AsyncEngine) -> None:
        prompt, hits = tuple(range(1000, 1080)), made.gauges.hit_tokens
        asks = [EngineRequest(f"{n}", prompt, SamplingParams(max_tokens=9, seed=n)) for n in range(4)]
        with made.submit(asks) as reply:
            await reply.admitted()
            answers = await read(reply)
        assert [state.generated for state in reply.states] == [9] * 4
        assert len({tuple(token for chunk in chunks for token in chunk.tokens) for chunks in answers}) > 1
        await idle(made)
        cached = sorted(state.cached_tokens for state in reply.states)
        assert cached == [0, 64, 64, 64], "three find the pages of the first"
        assert made.gauges.hit_tokens - hits == 192

    on_the_engine(test)


def test_a_stop_string_finishes_the_request_in_the_engine(on_the_engine: OnTheEngine, offline: list[list[int]]) -> None:
    async def test(made: AsyncEngine) -> None:
        assert made.tokenizer is not None
        text = made.tokenizer.decode(offline[1])
        stop = text[len(text) // 2 :][:3]
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True, stop=stop, logprobs=0)
        one = await answer(made, PROMPTS[1], params)
        assert one.finish_reason is FinishReason.STOP
        assert one.text == text[: text.index(stop)]
        assert [*one.offsets] == sorted(one.offsets)
        assert all(offset < len(one.text) for offset in one.offsets), "no token of what is not shown"
        assert len(one.logprobs or ()) == len(one.tokens)

    on_the_engine(test)


def test_an_aborted_stream_frees_its_pages(on_the_engine: OnTheEngine) -> None:
    async def test(made: AsyncEngine) -> None:
        long = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
        replies = [made.submit([EngineRequest(f"{n}", PROMPTS[n], long)]) for n in range(6)]
        await replies[0].admitted()
        for reply in replies:
            with reply:
                pass
        for reply in replies:
            ((last,),) = [chunks[-1:] for chunks in await read(reply)]
            assert last.finish_reason is FinishReason.ABORT
            reply.abort()

    on_the_engine(test)


def test_a_stream_that_is_not_read_delays_no_other(on_the_engine: OnTheEngine, offline: list[list[int]]) -> None:
    async def test(made: AsyncEngine) -> None:
        stalled = made.submit([EngineRequest("stalled", PROMPTS[0], GREEDY)])
        assert list((await answer(made, PROMPTS[1])).tokens) == offline[1]
        await idle(made)
        turns = [chunks async for chunks in stalled]
        assert len(turns) == 1, "all that has come, at once"
        assert [token for chunk in turns[0] for token in chunk.tokens] == offline[0]

    on_the_engine(test)


def test_a_deadline_ends_an_answer(on_the_engine: OnTheEngine) -> None:
    async def test(made: AsyncEngine) -> None:
        long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
        for timeout, params, reason in (
            (0.05, long, FinishReason.TIMEOUT),
            (100.0, GREEDY, FinishReason.LENGTH),
        ):
            (chunks,) = await read(made.submit([EngineRequest("r", PROMPTS[0], params, timeout=timeout)]))
            assert chunks[-1].finish_reason is reason

    on_the_engine(test)


def test_what_can_never_be_served_is_refused_at_once() -> None:
    async def test() -> None:
        async with engine("light", kv_cache_pages=8, max_num_queued_reqs=3) as made:
            assert made.max_model_len == 128
            cases: list[tuple[EngineRequest, str]] = [
                (
                    EngineRequest("a", (1,) * 120, SamplingParams(max_tokens=9)),
                    "120 tokens and max_tokens is 9; together .* 128",
                ),
                (EngineRequest("a", (), GREEDY), "the prompt is empty"),
                (EngineRequest("a", (9_999_999,), GREEDY), OUTSIDE),
                (
                    EngineRequest("a", (1,), SamplingParams(logit_bias={9_999_999: 1.0})),
                    OUTSIDE,
                ),
                (
                    EngineRequest("a", (1,), SamplingParams(stop_token_ids=[9_999_999])),
                    OUTSIDE,
                ),
                (EngineRequest("a", (1,), GREEDY, cache_salt="x" * 300), "cache_salt"),
                (EngineRequest("a", (1,), GREEDY, cache_salt="\ud800"), "surrogates not allowed"),
                (EngineRequest("a", (1,), GREEDY, timeout=0.0), "timeout must be a number above 0"),
                (EngineRequest("a", (1,), GREEDY, timeout=float("nan")), "timeout must be a number above 0"),
            ]
            for ask, words in cases:
                with pytest.raises(ValueError, match=words):
                    made.submit([EngineRequest("fine", (1,), GREEDY), ask])
            with pytest.raises(ValueError, match="unique"):
                made.submit([EngineRequest("a", (1,), GREEDY), EngineRequest("a", (1,), GREEDY)])
            with pytest.raises(ValueError, match="4 completions are requested at once; at most 3 may wait"):
                made.submit([EngineRequest(f"{n}", (1,), GREEDY) for n in range(4)])
            assert (await answer(made, (1, 2, 3))).finish_reason is FinishReason.LENGTH, "nothing of them is left"
            await idle(made)

    run(test())


@pytest.mark.parametrize("grammar", [None, 'start: "the pages of a cache"'], ids=["free", "forced"])
def test_prompts_are_scored(on_the_engine: OnTheEngine, grammar: str | None) -> None:
    """Also if a grammar forces tokens behind the first one of the output."""

    async def test(made: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2, grammar=grammar)
        for name in ("first", "again"):
            reply = made.submit([EngineRequest(name, PROMPTS[0], params)])
            await read(reply)
            (state,) = reply.states
            assert state.prompt_logprobs is not None
            assert len(state.prompt_logprobs) == len(PROMPTS[0]) - 1
            assert all(len(found.top) == 2 and found.logprob <= 0 for found in state.prompt_logprobs)

    on_the_engine(test)


def test_observers_see_every_step_and_every_finished_request(on_the_engine: OnTheEngine) -> None:
    class Recorder:
        tokens, answered, generated, ends = 0, 0, 0, list[tuple[str, int, FinishReason]]()

        def stepped(self, report: StepReport) -> None:
            self.tokens += report.prefill_tokens + report.decode_tokens
            self.answered, self.generated = self.answered + report.prompt_tokens, self.generated + report.generated

        def finished(self, ask: EngineRequest, state: OutputState, reason: FinishReason) -> None:
            times = state.times
            assert times.queue_time is not None
            assert times.e2e is not None
            assert 0 <= times.queue_time <= times.e2e
            self.ends.append((ask.id, state.generated, reason))

    async def test(made: AsyncEngine) -> None:
        recorder = Recorder()
        made.observers.append(recorder)
        prompts = [tuple(token + 2000 for token in prompt) for prompt in PROMPTS[:3]]  # not in the cache
        await asyncio.gather(*(answer(made, prompt, name=f"{n}") for n, prompt in enumerate(prompts)))
        await idle(made)
        made.observers.remove(recorder)
        assert sorted(recorder.ends) == [(f"{n}", 24, FinishReason.LENGTH) for n in range(3)]
        assert recorder.tokens == sum(len(prompt) + 23 for prompt in prompts)
        assert (recorder.answered, recorder.generated) == (sum(map(len, prompts)), 3 * 24)

    on_the_engine(test)


# A request fails.


@pytest.mark.parametrize(
    ("fault", "victim", "params"),
    [
        ("the model raises", (*PROMPTS[0], POISON, 9), GREEDY),
        ("the model says NaN", (*PROMPTS[0], NAN), GREEDY),
        ("the sampler raises", PROMPTS[0], SamplingParams(max_tokens=9, top_k=13)),
    ],
)
def test_a_request_that_makes_a_step_fail_fails_alone(
    fault: str,
    victim: tuple[int, ...],
    params: SamplingParams,
    on_the_engine: OnTheEngine,
    offline: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(made: AsyncEngine) -> None:
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

    on_the_engine(test)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("engine_process")]
    assert any("request victim fails alone too" in line for line in said) == ("raises" in fault)


def test_a_request_that_cannot_be_detokenized_fails_alone(
    on_the_engine: OnTheEngine, offline: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(made: AsyncEngine) -> None:
        tokenizer = made.tokenizer
        assert tokenizer is not None
        sound = tokenizer.token_bytes

        def token_bytes(token: int, skip_special_tokens: bool = True) -> bytes:
            if token == offline[0][5]:
                raise RuntimeError("no bytes for this one")
            return sound(token, skip_special_tokens)

        monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
        spared = next(n for n, tokens in enumerate(offline) if offline[0][5] not in tokens)
        one, other = await asyncio.gather(
            answer(made, PROMPTS[0], name="one"), answer(made, PROMPTS[spared], name="other")
        )
        assert one.finish_reason is FinishReason.ERROR
        assert list(other.tokens) == offline[spared]

    on_the_engine(test)
