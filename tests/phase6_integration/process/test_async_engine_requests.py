"""What the HTTP process notes of live requests: submitted, admitted, answered, ended. The test acts as the engine."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phase0_request import FinishReason, QueueFullError, SamplingParams
from phase6_integration.process.async_engine import Observer
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import EngineRequest, Finish, Progress, Ready, Update
from phase6_integration.process.outputs import JOINED, Output, OutputStream
from tests.phase6_integration import real_engine
from tests.phase6_integration.fake_engine import FakeEngine, ended
from tests.phase6_integration.real_engine import read
from tests.phase6_integration.running import run

pytestmark = pytest.mark.usefixtures("one_tokenizer")
LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def on_a_silent_engine(**options: Any) -> Callable[..., Callable[[], None]]:
    """Make a test of a coroutine that gets an engine of which nothing comes but what the test says."""

    def decorate(test: Callable[[FakeEngine], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def main() -> None:
            await test(FakeEngine(script=None, **options))

        def runs() -> None:
            run(main(), 20)

        runs.__doc__ = test.__doc__
        return runs

    return decorate


def ask(id: str, n: int = 1, client: str = "", **params: Any) -> EngineRequest:
    """Of its completions the ids are `id-0`, `id-1` and so on."""
    return real_engine.request(id, (1, 2, 3), SamplingParams(**{"max_tokens": 20, **params}), n=n, client=client)


async def answer(outputs: OutputStream) -> tuple[str, FinishReason | None, object]:
    """The text of the only output, how it ended, and the error."""
    (chunks,) = await read(outputs)
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason, chunks[-1].error


async def turns_of_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# Requests are submitted.


@on_a_silent_engine()
async def test_completions_are_sent_in_one_message_and_live_until_the_engine_ends_them(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("a", n=2))
    (message,) = engine.sent
    assert (message.id, list(message.numbers), message.arrival > 0) == ("a", [0, 1], True)
    engine.tell(Progress("a-0", admitted=5.0, cached=2))
    assert [output.cached_tokens for output in outputs.outputs] == [2, 0]
    assert outputs.outputs[0].times.admitted == 5.0
    assert (engine.live, engine.unfinished) == (2, 1)
    for id in ("a-0", "a-1"):
        engine.tell(ended(id, FinishReason.TIMEOUT))
    assert [chunks[-1].finish_reason for chunks in await read(outputs)] == [FinishReason.TIMEOUT] * 2
    assert (engine.live, engine._waiting, await engine._is_idle(0)) == (0, set(), True)


@on_a_silent_engine()
async def test_the_watchdog_hears_of_the_first_request_after_an_idle_time(engine: FakeEngine) -> None:
    begun = list[int]()
    watchdog = SimpleNamespace(work_begins=lambda: begun.append(engine.live))
    engine._client = cast(EngineClient, SimpleNamespace(watchdog=watchdog))
    for id in ("a", "b"):
        engine.submit(ask(id))
        assert len(begun) == 1, "work begins with the first request, and not again while one is live"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (ask("live"), "a request id must be unique among unfinished requests"),
        (ask("new", n=6), "6 completions are requested at once; at most 5 may wait"),
        (ask("new", n=4, client="t"), "4 completions are requested at once; at most 3 may wait"),
        (ask("new", n=2, max_tokens=10**6), "max_tokens is 1000000; together"),
    ],
)
def test_all_completions_are_submitted_or_none(refused: EngineRequest, message: str) -> None:
    @on_a_silent_engine(max_num_queued_reqs=5)
    async def test(engine: FakeEngine) -> None:
        engine.submit(ask("live"))
        with pytest.raises(ValueError, match=message):
            engine.submit(refused)
        left = (engine.live, len(engine.sent), engine._waiting)
        assert left == (1, 1, {"live-0"}), "a refused request left something behind"

    test()


@on_a_silent_engine()
async def test_an_engine_that_is_not_ready_takes_no_request(engine: FakeEngine) -> None:
    engine.health, engine.reason = Health.DRAINING, "it is about to stop"
    with pytest.raises(UnavailableError, match="about to stop"):
        engine.submit(ask("a", n=10**6))


@on_a_silent_engine(max_num_queued_reqs=2)
async def test_the_queue_is_bounded_and_an_end_makes_room(engine: FakeEngine) -> None:
    def is_full() -> bool:
        with pytest.raises(QueueFullError):
            engine.submit(ask("too many"))
        return True

    engine.submit(ask("first", n=2))
    assert is_full()
    engine.tell(Progress("first-0", admitted=0.0))
    engine.submit(ask("third"))
    assert is_full()
    engine.tell(ended("first-1", FinishReason.TIMEOUT))
    engine.submit(ask("fourth"))
    assert is_full()


@on_a_silent_engine(max_num_queued_reqs=4)
async def test_a_tenant_may_have_its_share_of_the_queue(engine: FakeEngine) -> None:
    engine.submit(ask("a", n=2, client="t"))
    with pytest.raises(QueueFullError, match="2 requests are already waiting"):
        engine.submit(ask("c", client="t"))
    engine.submit(ask("c", client="other"))
    engine.submit(ask("d"))  # without a name: as many as the queue holds


# The engine's messages are taken.


@on_a_silent_engine()
async def test_tokens_become_text_and_the_engine_ends_the_request(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one"))
    engine.write("one-0", "one two", reason=LENGTH)
    assert await answer(outputs) == ("one two", LENGTH, None)
    assert len(engine.sent) == 1, "the engine knows of this end"
    assert engine.tokenizer is not None
    (output,) = outputs.outputs
    assert (output.generated, len(output.times.tokens)) == (len(engine.tokenizer.encode("one two")),) * 2
    assert output.times.finished is not None


@on_a_silent_engine()
async def test_a_stop_string_is_reported_once_and_the_tokens_after_it_are_dropped(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one", stop="two"))
    engine.write("one-0", "one two")
    assert engine.live == 1, "it is live until the engine has reported its end"
    engine.write("one-0", " three")
    engine.tell(ended("one-0", STOP))
    assert await answer(outputs) == ("one ", STOP, None)
    assert engine.sent[1:] == [Finish("one-0", STOP)]
    assert engine.live == 0


@on_a_silent_engine()
async def test_a_stop_string_in_the_last_token_needs_no_message(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one", stop="two"))
    engine.write("one-0", "one two", reason=LENGTH)
    assert (await answer(outputs))[:2] == ("one ", STOP)
    assert len(engine.sent) == 1, "this message ended the request in the engine"


@on_a_silent_engine()
async def test_a_token_without_text_fails_its_request_and_no_other(engine: FakeEngine) -> None:
    one, other = engine.submit(ask("one")), engine.submit(ask("other"))
    one.outputs[0].append = lambda *_: 1 / 0  # type: ignore
    engine.tell(Progress("one-0", 300), Progress("other-0", 300, finish_reason=LENGTH))
    assert await answer(one) == ("", FinishReason.ERROR, "its text cannot be made")
    assert (await answer(other))[1] is LENGTH
    assert engine.sent[2:] == [Finish("one-0", ABORT)]


@on_a_silent_engine()
async def test_a_request_may_end_behind_its_last_token_in_the_same_step(engine: FakeEngine) -> None:
    """As a grammar ends: unlike an end-of-sequence token, the last token is part of the text."""
    assert engine.tokenizer is not None
    outputs = engine.submit(ask("one"))
    tokens = [Progress("one-0", token) for token in engine.tokenizer.encode("one two three")]
    engine.tell(*tokens, ended("one-0", STOP))
    assert await answer(outputs) == ("one two three", STOP, None)


@on_a_silent_engine()
async def test_an_abort_ends_the_stream_now_and_its_tokens_are_dropped(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one"))
    engine.tell(Progress("one-0", 300, admitted=0.0))
    outputs.abort()
    outputs.abort()
    assert engine.sent[1:] == [Finish("one-0", ABORT)], "an abort is sent once"
    engine.say("one-0", 301, 302, reason=LENGTH)
    (chunks,) = await read(outputs)
    assert [token for chunk in chunks for token in chunk.tokens] == [300]
    assert [chunk.finish_reason for chunk in chunks] == [None, ABORT]
    assert (outputs.outputs[0].generated, engine.live) == (1, 0)


@on_a_silent_engine()
async def test_what_has_arrived_comes_at_once_and_unread_chunks_are_joined(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("a", n=2))
    turns: list[list[tuple[int, list[int]]]] = []

    async def reader() -> None:
        async for chunks in outputs:
            turns.append([(chunk.index, list(chunk.tokens)) for chunk in chunks])

    reading = asyncio.create_task(reader())
    await asyncio.sleep(0)
    engine.say("a-0", 300)
    await turns_of_the_loop()
    engine.say("a-1", 301, 302)
    engine.say("a-0", 303, reason=LENGTH)
    engine.tell(ended("a-1", FinishReason.ERROR))
    await reading
    assert turns[0] == [(0, [300])], "the first chunk is read while the requests run"
    assert turns[1:] == [[(1, [301, 302]), (0, [303]), (1, [])]], (
        "two tokens of 1 are joined, and the chunk of its failure stands by itself"
    )


@on_a_silent_engine()
async def test_a_chunk_that_comes_while_the_reader_is_busy_is_read_in_the_next_turn(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("a"))
    engine.say("a-0", 300)
    turns: list[list[int]] = []
    async for chunks in outputs:
        turns.append([token for chunk in chunks for token in chunk.tokens])
        if len(turns) == 1:
            engine.say("a-0", 301, reason=LENGTH)
    assert turns == [[300], [301]]


@on_a_silent_engine()
async def test_unread_chunks_are_joined_up_to_a_limit(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("a"))
    engine.say("a-0", *[300] * (JOINED + 1), reason=LENGTH)
    (chunks,) = await read(outputs)
    assert [len(chunk.tokens) for chunk in chunks] == [JOINED, 1]


class Kept:
    """What a reader of this test keeps."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def add(self, more: bytes) -> None:
        self.said.append(more)


@on_a_silent_engine()
async def test_what_is_said_beside_a_token_is_kept_by_who_reads_it(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one"))
    engine.tell(Progress("one-0", 300, more=b"nobody reads this"))
    engine.details = Kept
    engine.tell(Progress("one-0", 301, more=b"first"))
    engine.tell(Progress("one-0", 302), Progress("one-0", 303, LENGTH, more=b"second"))
    kept = outputs.outputs[0].details
    assert isinstance(kept, Kept)
    assert kept.said == [b"first", b"second"]


@on_a_silent_engine()
async def test_observers_get_each_step_and_each_end_with_the_reason_of_the_client(engine: FakeEngine) -> None:
    steps: list[tuple[int, int, int]] = []
    ends: list[tuple[str, FinishReason]] = []

    class Recorder(Observer):
        def stepped(self, update: Update, prompt_tokens: int, cached_tokens: int) -> None:
            steps.append((prompt_tokens, cached_tokens, len(update.progress)))

        def finished(self, stream: OutputStream, output: Output, reason: FinishReason) -> None:
            ends.append((output.id, reason))

    engine.observers.append(Recorder())
    assert engine.tokenizer is not None
    (two,) = engine.tokenizer.encode(" two")
    engine.submit(ask("a", n=2, stop="two"))
    engine.tell(Progress("a-0", 300, admitted=0.0, cached=2))
    engine.tell(Progress("a-0", 300, finish_reason=LENGTH), Progress("a-1", two))
    engine.tell(ended("a-1", ABORT))
    assert steps == [(3, 2, 1), (3, 0, 2), (0, 0, 1)], "the prompt of a completion counts with its first token"
    assert ends == [("a-0", LENGTH), ("a-1", STOP)]


# The engine becomes ready, or the server drains.


@pytest.mark.parametrize(("before", "after"), [(Health.LOADING, Health.READY), (Health.DRAINING, Health.DRAINING)])
def test_only_an_engine_that_loads_becomes_ready(before: Health, after: Health) -> None:
    @on_a_silent_engine()
    async def test(engine: FakeEngine) -> None:
        engine.health = before
        engine.handle(Ready(512, 40, 16, "cpu", "float32"))
        assert (engine.health, engine.max_model_len) == (after, 512)
        assert (engine.gauges.pages_total, engine.gauges.pages_free) == (40, 40)
        if after is Health.READY:
            await asyncio.wait_for(engine.ready(), 1)
            engine.submit(ask("one"))

    test()


@on_a_silent_engine()
async def test_draining_leaves_an_output_that_is_done_as_it_is(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one", stop=("two",)))
    engine.write("one-0", "one two")
    assert (await answer(outputs))[1] is STOP
    draining = asyncio.create_task(engine.drain(0))
    await turns_of_the_loop()
    assert engine.sent[1:] == [Finish("one-0", STOP)], "its client has the last chunk: no second end"
    engine.tell(ended("one-0", STOP))
    await draining


@on_a_silent_engine()
async def test_draining_waits_for_all_completions(engine: FakeEngine) -> None:
    outputs = engine.submit(ask("one", n=2))
    draining = asyncio.create_task(engine.drain(60))
    await asyncio.sleep(0)
    engine.tell(ended("one-0", LENGTH))
    await turns_of_the_loop()
    assert not draining.done()
    engine.tell(ended("one-1", LENGTH))
    await draining
    assert [chunks[-1].finish_reason for chunks in await read(outputs)] == [LENGTH] * 2
