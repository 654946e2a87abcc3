"""What the HTTP process notes of live requests: submitted, admitted, answered, ended. The test acts as the engine."""

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from phase0_request import FinishReason, QueueFullError, TokenLogprobs
from phase6_integration.process.async_engine import Observer, StepReport
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import Ended, EngineRequest, Finish, Output, Ready, Started, Update
from phase6_integration.process.outputs import JOINED, OutputStream
from phase6_integration.process.outputs import Output as Completion
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.real_engine import read
from tests.phase6_integration.silent_engine import Silent, answer, ask, run

pytestmark = pytest.mark.usefixtures("one_tokenizer")
STOPPED = Ended("one-0", FinishReason.STOP)


# Requests are submitted.


def test_completions_are_sent_in_one_message_and_live_until_the_engine_ends_them() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("a", n=2))
        (message,) = made.sent
        assert (message.id, list(message.numbers), message.arrival > 0) == ("a", [0, 1], True)
        made._tell(started=[Started("a-0", 5.0, 2)])
        assert [output.cached_tokens for output in reply.outputs] == [2, 0]
        assert reply.outputs[0].times.admitted == 5.0
        assert (made.live, made.unfinished) == (2, 1)
        for id in ("a-0", "a-1"):
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
            made.submit(ask(id))
            assert len(begun) == 1, "work begins with the first request, and not again while one is live"

    run(test())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("live"), "a request id must be unique among unfinished requests"),
        (ask("new", n=6), "6 completions are requested at once; at most 5 may wait"),
        (ask("new", n=4, tenant="t"), "4 completions are requested at once; at most 3 may wait"),
        (ask("new", n=2, max_tokens=10**6), "max_tokens is 1000000; together"),
    ],
)
def test_all_completions_are_submitted_or_none(request_: EngineRequest, message: str) -> None:
    async def test() -> None:
        made = Silent(max_num_queued_reqs=5)
        made.submit(ask("live"))
        with pytest.raises(ValueError, match=message):
            made.submit(request_)
        left = (made.live, len(made.sent), made._waiting)
        assert left == (1, 1, {"live-0"}), "a refused request left something behind"

    run(test())


def test_an_engine_that_is_not_ready_takes_no_request() -> None:
    async def test() -> None:
        made = Silent()
        made.health, made.reason = Health.DRAINING, "it is about to stop"
        with pytest.raises(UnavailableError, match="about to stop"):
            made.submit(ask("a", n=10**6))

    run(test())


def test_the_queue_is_bounded_and_an_end_makes_room() -> None:
    def full(made: FakeEngine) -> bool:
        with pytest.raises(QueueFullError):
            made.submit(ask("too many"))
        return True

    async def test() -> None:
        made = Silent(max_num_queued_reqs=2)
        made.submit(ask("first", n=2))
        assert full(made)
        made._tell(started=[Started("first-0", 0.0, 0)])
        made.submit(ask("third"))
        assert full(made)
        made._tell(ended=[Ended("first-1", FinishReason.TIMEOUT)])
        made.submit(ask("fourth"))
        assert full(made)

    run(test())


def test_a_tenant_may_have_its_share_of_the_queue() -> None:
    async def test() -> None:
        made = Silent(max_num_queued_reqs=4)
        made.submit(ask("a", n=2, tenant="t"))
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            made.submit(ask("c", tenant="t"))
        made.submit(ask("c", tenant="other"))
        made.submit(ask("d"))  # without a name: as many as the queue holds

    run(test())


# The engine's messages are taken.


def test_tokens_become_text_and_the_engine_ends_the_request() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one"))
        made.write("one-0", "one two", reason=FinishReason.LENGTH)
        assert await answer(reply) == ("one two", FinishReason.LENGTH, None)
        assert len(made.sent) == 1, "the engine knows of this end"
        (output,) = reply.outputs
        assert (output.generated, len(output.times.tokens)) == (len(made.tokenizer.encode("one two")),) * 2
        assert output.times.finished is not None

    run(test())


def test_a_stop_string_is_reported_to_the_engine_once_and_the_tokens_after_it_are_dropped() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one", stop="two"))
        made.write("one-0", "one two")
        assert made.live == 1, "it is live until the engine has reported its end"
        made.write("one-0", " three")
        made._tell(ended=[STOPPED])
        assert await answer(reply) == ("one ", FinishReason.STOP, None)
        assert made.sent[1:] == [Finish("one-0", FinishReason.STOP)]
        assert made.live == 0

    run(test())


def test_a_stop_string_in_the_last_token_needs_no_message() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one", stop="two"))
        made.write("one-0", "one two", reason=FinishReason.LENGTH)
        assert (await answer(reply))[:2] == ("one ", FinishReason.STOP)
        assert len(made.sent) == 1, "this message ended the request in the engine"

    run(test())


def test_a_token_without_text_fails_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        made = Silent()
        one, other = made.submit(ask("one")), made.submit(ask("other"))
        monkeypatch.setattr(one.outputs[0], "append", lambda *_: 1 / 0)
        made._tell(
            outputs=[Output("one-0", 300), Output("other-0", 300)], ended=[Ended("other-0", FinishReason.LENGTH)]
        )
        assert await answer(one) == ("", FinishReason.ERROR, "its text cannot be made")
        assert (await answer(other))[1] is FinishReason.LENGTH
        assert made.sent[2:] == [Finish("one-0", FinishReason.ABORT)]

    run(test())


def test_a_request_may_end_behind_its_last_token_in_the_same_step() -> None:
    """As a grammar ends: unlike an end-of-sequence token, the last token is part of the text."""

    async def test() -> None:
        made = Silent()
        assert made.tokenizer is not None
        tokens = made.tokenizer.encode("one two three")
        reply = made.submit(ask("one"))
        made.handle(Update(0.0, 0.0, 0, 1, [], [Output("one-0", token) for token in tokens], [STOPPED], made.gauges))
        assert await answer(reply) == ("one two three", FinishReason.STOP, None)

    run(test())


def test_an_abort_ends_the_stream_now_and_its_tokens_are_dropped() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one"))
        made._tell(started=[Started("one-0", 0.0, 0)], outputs=[Output("one-0", 300)])
        reply.abort()
        reply.abort()
        assert made.sent[1:] == [Finish("one-0", FinishReason.ABORT)], "an abort is sent once"
        made._tell(outputs=[Output("one-0", 301)])
        made._tell(outputs=[Output("one-0", 302)], ended=[Ended("one-0", FinishReason.LENGTH)])
        (chunks,) = await read(reply)
        assert [token for chunk in chunks for token in chunk.tokens] == [300]
        assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.ABORT]
        assert (reply.outputs[0].generated, made.live) == (1, 0)

    run(test())


def test_what_has_arrived_comes_at_once_and_unread_chunks_are_joined() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("a", n=2))
        turns: list[list[tuple[int, list[int]]]] = []

        async def reader() -> None:
            async for chunks in reply:
                turns.append([(chunk.index, list(chunk.tokens)) for chunk in chunks])

        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)
        made.say("a-0", 300)
        for _ in range(3):
            await asyncio.sleep(0)
        made.say("a-1", 301, 302)
        made.say("a-0", 303, reason=FinishReason.LENGTH)
        made._tell(ended=[Ended("a-1", FinishReason.ERROR)])
        await reading
        assert turns[0] == [(0, [300])], "the first chunk is read while the requests run"
        assert turns[1:] == [[(1, [301, 302]), (0, [303]), (1, [])]], (
            "two tokens of 1 are joined, and the chunk of its failure stands by itself"
        )

    run(test())


def test_a_chunk_that_comes_while_the_reader_is_busy_is_read_in_the_next_turn() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("a"))
        made.say("a-0", 300)
        turns: list[list[int]] = []
        async for chunks in reply:
            turns.append([token for chunk in chunks for token in chunk.tokens])
            if len(turns) == 1:
                made.say("a-0", 301, reason=FinishReason.LENGTH)
        assert turns == [[300], [301]]

    run(test())


def test_unread_chunks_are_joined_up_to_a_limit() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("a"))
        made.say("a-0", *[300] * (JOINED + 1), reason=FinishReason.LENGTH)
        (chunks,) = await read(reply)
        assert [len(chunk.tokens) for chunk in chunks] == [JOINED, 1]

    run(test())


def test_prompt_logprobs_are_kept() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one"))
        made._tell(outputs=[Output("one-0", 300, None, [TokenLogprobs(-0.5, ())] * 2)])
        made.say("one-0", 301, reason=FinishReason.LENGTH)
        kept = reply.outputs[0].prompt_logprobs
        assert kept is not None
        assert [scores.logprob for scores in kept if scores] == [-0.5, -0.5]

    run(test())


def test_observers_get_each_step_and_each_end_with_the_reason_of_the_client() -> None:
    class Recorder(Observer):
        def __init__(self) -> None:
            self.requests: list[str] = []
            self.steps: list[tuple[int, int]] = []
            self.ends: list[tuple[str, FinishReason]] = []

        def submitted(self, request: EngineRequest) -> None:
            self.requests.append(request.id)

        def stepped(self, report: StepReport) -> None:
            self.steps.append((report.prompt_tokens, report.generated))

        def finished(self, stream: OutputStream, output: Completion, reason: FinishReason) -> None:
            self.ends.append((output.id, reason))

    async def test() -> None:
        made, seen = Silent(), Recorder()
        made.observers.append(seen)
        assert made.tokenizer is not None
        made.submit(ask("a", n=2, stop="two"))
        made._tell(outputs=[Output("a-0", 300)])
        (two,) = made.tokenizer.encode(" two")
        made._tell(outputs=[Output("a-0", 300), Output("a-1", two)], ended=[Ended("a-0", FinishReason.LENGTH)])
        made._tell(ended=[Ended("a-1", FinishReason.ABORT)])
        assert seen.requests == ["a"]
        assert seen.steps == [(3, 1), (3, 2), (0, 0)], "the prompt of a completion counts with its first token"
        assert seen.ends == [("a-0", FinishReason.LENGTH), ("a-1", FinishReason.STOP)]

    run(test())


# No engine runs, the next one loads, or the server drains.


def test_a_new_engine_gets_the_completions_that_were_waiting() -> None:
    async def test() -> None:
        made, before = Silent(), time.monotonic()
        reply, both = made.submit(ask("one")), made.submit(ask("two", n=2))
        made._tell(ended=[Ended("two-0", FinishReason.ERROR)])
        made.health = Health.LOADING
        made._restarting = asyncio.create_task(asyncio.sleep(0))
        made.handle(Ready(512, 40, 16, "cpu", "float32"))
        assert made._restarting is None, "the next engine is ready: no restart is under way"
        assert made._ready_at >= before, "when it became ready counts for its next failure"
        assert [(message.id, list(message.numbers)) for message in made.sent[2:]] == [("one", [0]), ("two", [1])]
        assert (made.health, made.reason, made.max_model_len) == (Health.READY, "ready", 512)
        assert (made.gauges.pages_total, made.gauges.pages_free) == (40, 40)
        assert (reply.sent, both.sent) == (2, 2)
        await asyncio.wait_for(made.ready(), 1)
        made.say("one-0", 300, reason=FinishReason.LENGTH)
        assert (await answer(reply))[1] is FinishReason.LENGTH

    run(test())


def test_an_engine_that_loads_while_the_server_drains_takes_no_request() -> None:
    async def test() -> None:
        made = Silent()
        made.health = Health.DRAINING
        made.handle(Ready(512, 40, 16, "cpu", "float32"))
        assert made.health is Health.DRAINING, "only LOADING becomes READY"

    run(test())


def test_an_abort_while_no_engine_runs_ends_the_request_here() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one"))
        made._restarting = asyncio.create_task(asyncio.sleep(0))
        reply.abort()
        assert made.live == 0, "no engine will report the end of this request"
        assert (await answer(reply))[1] is FinishReason.ABORT

    run(test())


def test_draining_leaves_an_output_that_is_done_as_it_is() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one", stop=("two",)))
        made.write("one-0", "one two")
        assert (await answer(reply))[1] is FinishReason.STOP
        draining = asyncio.create_task(made.drain(0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert made.sent[1:] == [Finish("one-0", FinishReason.STOP)], "its client has the last chunk: no second end"
        made._tell(ended=[STOPPED])
        await draining

    run(test())


def test_draining_waits_for_all_completions() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit(ask("one", n=2))
        draining = asyncio.create_task(made.drain(60))
        await asyncio.sleep(0)
        made._tell(ended=[Ended("one-0", FinishReason.LENGTH)])
        for _ in range(5):
            await asyncio.sleep(0)
        assert not draining.done()
        made._tell(ended=[Ended("one-1", FinishReason.LENGTH)])
        await draining
        assert [chunks[-1].finish_reason for chunks in await read(reply)] == [FinishReason.LENGTH] * 2

    run(test())
