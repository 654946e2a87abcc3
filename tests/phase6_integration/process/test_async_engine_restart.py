"""Live requests while no engine process runs, while the next one loads, and while the server drains."""

import asyncio
import time

import pytest

from phase0_request import FinishReason
from phase6_integration.process.health import Health
from phase6_integration.process.messages import Ended, EngineRequest, Finish, Ready
from tests.phase6_integration.real_engine import GREEDY, read
from tests.phase6_integration.silent_engine import STOPPED, Silent, answer, ask, run

pytestmark = pytest.mark.usefixtures("one_tokenizer")


def test_a_new_engine_gets_the_requests_that_were_waiting() -> None:
    async def test() -> None:
        made, before = Silent(), time.monotonic()
        reply = made.submit([ask("one")])
        made.health = Health.LOADING
        made._restarting = asyncio.create_task(asyncio.sleep(0))
        made.handle(Ready(512, 40, 16, "cpu", "float32"))
        assert made._restarting is None, "the next engine is ready: no restart is under way"
        assert made._ready_at >= before, "when it became ready counts for its next failure"
        assert [message.id for message in made.sent] == ["one", "one"]
        assert (made.health, made.reason, made.max_model_len) == (Health.READY, "ready", 512)
        assert (made.gauges.pages_total, made.gauges.pages_free) == (40, 40)
        assert made._resubmitted["one"] == 1
        await asyncio.wait_for(made.ready(), 1)
        made.say("one", 300, reason=FinishReason.LENGTH)
        assert (await answer(reply))[1] is FinishReason.LENGTH
        assert not made._resubmitted, "a request that has ended is still counted as resubmitted"

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
        reply = made.submit([ask("one")])
        made._restarting = asyncio.create_task(asyncio.sleep(0))
        reply.abort()
        assert made.live == 0, "no engine will report the end of this request"
        assert (await answer(reply))[1] is FinishReason.ABORT

    run(test())


def test_draining_leaves_an_output_that_is_done_as_it_is() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([ask("one", stop=("two",))])
        made.write("one", "one two")
        (chunks,) = await read(reply)
        assert chunks[-1].finish_reason is FinishReason.STOP
        draining = asyncio.create_task(made.drain(0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert made.sent[1:] == [Finish("one", FinishReason.STOP)], "its client has the last chunk: no second end"
        made._tell(ended=[STOPPED])
        await draining

    run(test())


def test_draining_waits_for_all_requests() -> None:
    async def test() -> None:
        made = Silent()
        reply = made.submit([EngineRequest("one", (1,), GREEDY), EngineRequest("two", (1,), GREEDY)])
        draining = asyncio.create_task(made.drain(60))
        await asyncio.sleep(0)
        made._tell(ended=[Ended("one", FinishReason.LENGTH)])
        for _ in range(5):
            await asyncio.sleep(0)
        made._tell(ended=[Ended("two", FinishReason.LENGTH)])
        await draining
        assert [chunks[-1].finish_reason for chunks in await read(reply)] == [FinishReason.LENGTH] * 2

    run(test())
