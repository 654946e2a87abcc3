"""The engine in its process: what it answers, what it refuses, and who is told what."""

import asyncio
import subprocess
import sys

import pytest

from phase0_request import FinishReason, QueueFullError, SamplingParams
from phase6_integration.answers import AnswerState, Ask
from phase6_integration.async_engine import StepReport
from phase6_integration.wire import Ended, Output, Started
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.real_engine import GREEDY, PROMPTS, answer, engine, idle, read
from tests.phase6_integration.running import run


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


# What the front itself knows of those who are here.


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
