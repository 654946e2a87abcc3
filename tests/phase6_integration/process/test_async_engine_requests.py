"""What the HTTP process notes of live requests: submitted, admitted, answered, ended. The test acts as the engine."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from phase0_request import FinishReason, QueueFullError, TokenLogprobs
from phase6_integration.process.async_engine import StepReport
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import Ended, EngineRequest, Finish, Output, Started, Update
from phase6_integration.process.outputs import JOINED, OutputState
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.real_engine import read
from tests.phase6_integration.silent_engine import STOPPED, Silent, answer, ask, run

pytestmark = pytest.mark.usefixtures("one_tokenizer")


# Requests are submitted.


def test_requests_are_sent_in_order_with_one_arrival_and_live_until_the_engine_ends_them() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("a"), ask("b")])
        assert [message.id for message in made.sent] == ["a", "b"]
        assert made.sent[0].arrival == made.sent[1].arrival > 0
        made._tell(started=[Started("a", 5.0, 2)])
        assert await reply.admitted(0)
        assert [state.cached_tokens for state in reply.states] == [2, 0]
        assert reply.states[0].times.admitted == 5.0
        assert made.live == 2
        for id in "ab":
            made._tell(ended=[Ended(id, FinishReason.TIMEOUT)])
        assert [chunks[-1].finish_reason for chunks in await read(reply)] == [FinishReason.TIMEOUT] * 2
        assert (made.live, made._waiting, await made._is_idle(0)) == (0, set(), True)

    run(test())


def test_the_watchdog_hears_of_the_first_request_after_an_idle_time() -> None:
    async def test() -> None:
        made, begun = Silent(), list[int]()
        watchdog = SimpleNamespace(work_begins=lambda: begun.append(made.live))
        made._client = cast(EngineClient, SimpleNamespace(watchdog=watchdog))
        for id in ("a", "b"):
            made.submit([ask(id)])
            assert len(begun) == 1, "work begins with the first request, and not again while one is live"

    run(test())


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "at least one request is needed"),
        ([ask("a"), ask("a")], "a request id must be unique among unfinished requests"),
        ([ask("new"), ask("live")], "a request id must be unique among unfinished requests"),
        ([ask(f"{n}") for n in range(6)], "6 completions are requested at once; at most 5 may wait"),
        ([ask(f"{n}", "t") for n in range(4)], "4 completions are requested at once; at most 3 may wait"),
        ([ask("new"), ask("large", max_tokens=10**6)], "max_tokens is 1000000; together"),
    ],
)
def test_all_requests_are_submitted_or_none(requests: list[EngineRequest], message: str) -> None:
    async def test() -> None:
        made = Silent(max_num_queued_reqs=5)
        made.submit([ask("live")])
        with pytest.raises(ValueError, match=message):
            made.submit(requests)
        assert (made.live, len(made.sent), made._waiting) == (1, 1, {"live"}), "a refused request left something behind"

    run(test())


def test_an_engine_that_is_not_ready_takes_no_request() -> None:
    async def test() -> None:
        made = Silent()
        made.health, made.reason = Health.DRAINING, "it is about to stop"
        with pytest.raises(UnavailableError, match="about to stop"):
            made.submit([])

    run(test())


def test_the_queue_is_bounded_and_an_end_makes_room() -> None:
    def full(made: FakeEngine) -> bool:
        with pytest.raises(QueueFullError):
            made.submit([ask("too many")])
        return True

    async def test() -> None:
        made = Silent(max_num_queued_reqs=2)
        made.submit([ask("first"), ask("second")])
        assert full(made)
        made._tell(started=[Started("first", 0.0, 0)])
        made.submit([ask("third")])
        assert full(made)
        made._tell(ended=[Ended("second", FinishReason.TIMEOUT)])
        made.submit([ask("fourth")])
        assert full(made)

    run(test())


def test_a_tenant_may_have_its_share_of_the_queue() -> None:
    async def test() -> None:
        made = Silent(max_num_queued_reqs=4)
        made.submit([ask("a", "t"), ask("b", "t")])
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            made.submit([ask("c", "t")])
        made.submit([ask("c", "other")])
        made.submit([ask("d")])  # without a name: as many as the queue holds

    run(test())


# The engine's messages are taken.


def test_tokens_become_text_and_the_engine_ends_the_request() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one")])
        made.write("one", "one two", reason=FinishReason.LENGTH)
        assert await answer(reply) == ("one two", FinishReason.LENGTH, None)
        assert not [message for message in made.sent if isinstance(message, Finish)], "the engine knows of this end"

    run(test())


def test_a_stop_string_is_reported_to_the_engine_once_and_the_tokens_after_it_are_dropped() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one", stop="two")])
        made.write("one", "one two")
        assert made.live == 1, "it is live until the engine has reported its end"
        made.write("one", " three")
        made._tell(ended=[Ended("one", FinishReason.STOP)])
        assert await answer(reply) == ("one ", FinishReason.STOP, None)
        assert made.sent[1:] == [Finish("one", FinishReason.STOP)]
        assert made.live == 0

    run(test())


def test_a_stop_string_in_the_last_token_needs_no_message() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one", stop="two")])
        made.write("one", "one two", reason=FinishReason.LENGTH)
        assert (await answer(reply))[:2] == ("one ", FinishReason.STOP)
        assert len(made.sent) == 1, "this message ended the request in the engine"

    run(test())


def test_a_token_without_text_fails_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        made = Silent()
        one, other = made.submit([ask("one")]), made.submit([ask("other")])
        monkeypatch.setattr(made._live["one"][0], "append", lambda *_: 1 / 0)
        made._tell(
            outputs=[Output("one", 300), Output("other", 300)],
            ended=[Ended("other", FinishReason.LENGTH)],
        )
        assert await answer(one) == ("", FinishReason.ERROR, "its text cannot be made")
        assert (await answer(other))[1] is FinishReason.LENGTH
        assert made.sent[2:] == [Finish("one", FinishReason.ABORT)]

    run(test())


def test_a_request_may_end_behind_its_last_token_in_the_same_step() -> None:
    """As a grammar ends: unlike an end-of-sequence token, the last token is part of the text."""

    async def test() -> None:
        made = Silent()
        assert made.tokenizer is not None
        tokens = made.tokenizer.encode("one two three")
        reply = made.submit([ask("one")])
        update = Update(0.0, 0.0, 0, 1, [], [Output("one", token) for token in tokens], [STOPPED], made.gauges)
        made.handle(update)
        assert await answer(reply) == ("one two three", FinishReason.STOP, None)
        assert reply.states[0].generated == len(tokens)

    run(test())


def test_an_abort_ends_the_stream_now_and_its_tokens_are_dropped() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one")])
        made._tell(started=[Started("one", 0.0, 0)], outputs=[Output("one", 300)])
        reply.abort()
        reply.abort()
        assert made.sent[1:] == [Finish("one", FinishReason.ABORT)], "an abort is sent once"
        made._tell(outputs=[Output("one", 301)])
        made._tell(outputs=[Output("one", 302)], ended=[Ended("one", FinishReason.LENGTH)])
        (chunks,) = await read(reply)
        assert [token for chunk in chunks for token in chunk.tokens] == [300]
        assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.ABORT]
        assert reply.states[0].generated == 1
        assert made.live == 0

    run(test())


def test_what_has_arrived_comes_at_once_and_unread_chunks_are_joined() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("a"), ask("b")])
        turns: list[list[tuple[int, list[int]]]] = []

        async def reader() -> None:
            async for chunks in reply:
                turns.append([(chunk.index, list(chunk.tokens)) for chunk in chunks])

        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)
        made.say("a", 300)
        for _ in range(3):
            await asyncio.sleep(0)
        made.say("b", 301, 302)
        made.say("a", 303, reason=FinishReason.LENGTH)
        made._tell(ended=[Ended("b", FinishReason.ERROR)])
        await reading
        assert turns[0] == [(0, [300])], "the first chunk is read while the requests run"
        assert turns[1:] == [[(1, [301, 302]), (0, [303]), (1, [])]], (
            "two tokens of b are joined, and the chunk of its failure stands by itself"
        )

    run(test())


def test_a_chunk_that_comes_while_the_reader_is_busy_is_read_in_the_next_turn() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("a")])
        made.say("a", 300)
        turns: list[list[int]] = []
        async for chunks in reply:
            turns.append([token for chunk in chunks for token in chunk.tokens])
            if len(turns) == 1:
                made.say("a", 301, reason=FinishReason.LENGTH)
        assert turns == [[300], [301]]

    run(test())


def test_unread_chunks_are_joined_up_to_a_limit() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("a")])
        made.say("a", *[300] * (JOINED + 1), reason=FinishReason.LENGTH)
        (chunks,) = await read(reply)
        assert [len(chunk.tokens) for chunk in chunks] == [JOINED, 1]

    run(test())


def test_prompt_logprobs_and_times_are_kept() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one")])
        made._tell(outputs=[Output("one", 300, None, [TokenLogprobs(-0.5, ())] * 2)])
        made.say("one", 301, reason=FinishReason.LENGTH)
        (state,) = reply.states
        assert state.prompt_logprobs is not None
        assert [found.logprob for found in state.prompt_logprobs if found] == [-0.5, -0.5]
        assert (state.generated, len(state.times.tokens)) == (2, 2)
        assert state.times.finished is not None

    run(test())


def test_observers_get_each_step_and_each_end_with_the_reason_of_the_client() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.steps: list[tuple[int, int]] = []
            self.ends: list[tuple[str, FinishReason]] = []

        def stepped(self, report: StepReport) -> None:
            self.steps.append((report.prompt_tokens, report.generated))

        def finished(self, request: EngineRequest, state: OutputState, reason: FinishReason) -> None:
            self.ends.append((request.id, reason))

    async def test() -> None:
        made, seen = Silent(), Recorder()
        made.observers.append(seen)
        assert made.tokenizer is not None
        made.submit([ask("a"), ask("b", stop="two")])
        made._tell(outputs=[Output("a", 300)])
        (two,) = made.tokenizer.encode(" two")
        made._tell(outputs=[Output("a", 300), Output("b", two)], ended=[Ended("a", FinishReason.LENGTH)])
        made._tell(ended=[Ended("b", FinishReason.ABORT)])
        assert seen.steps == [(3, 1), (3, 2), (0, 0)], "the prompt of a request counts with its first token"
        assert seen.ends == [("a", FinishReason.LENGTH), ("b", FinishReason.STOP)]

    run(test())
