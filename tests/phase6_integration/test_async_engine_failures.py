"""A fault in the engine: which requests it ends, and which it does not touch."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from phase0_request import FinishReason, SamplingParams
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.health import Health, UnavailableError
from phase6_integration.messages import EngineRequest
from tests.phase6_integration.faults import NAN, POISON
from tests.phase6_integration.real_engine import GREEDY, PROMPTS, OnTheEngine, answer, engine, idle, shared
from tests.phase6_integration.running import run


@pytest.fixture(scope="module")
def on_the_engine() -> Iterator[OnTheEngine]:
    """Runs a test on an engine on which three kinds of requests fail."""
    with shared("requests_fail") as run_on:
        yield run_on


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


@pytest.mark.parametrize(
    ("fault", "health", "words"),
    [
        ("light_hangs", Health.HUNG, "sent nothing for 1 seconds"),
        ("light", Health.DEAD, "its process has ended"),
        ("light_scheduler_raises", Health.DEAD, "a seat is lost"),
    ],
)
def test_when_the_engine_fails_every_request_gets_an_error(fault: str, health: Health, words: str) -> None:
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
                made.submit([EngineRequest("late", (1,), GREEDY)])

    run(test())


def test_a_request_that_cannot_be_detokenized_fails_alone(
    on_the_engine: OnTheEngine, offline: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(made: AsyncEngine) -> None:
        tokenizer = made.tokenizer
        assert tokenizer is not None
        sound: Callable[[int], bytes] = tokenizer.token_bytes

        def token_bytes(token: int) -> bytes:
            if token == offline[0][5]:
                raise RuntimeError("no bytes for this one")
            return sound(token)

        monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
        spared = next(n for n, tokens in enumerate(offline) if offline[0][5] not in tokens)
        one, other = await asyncio.gather(
            answer(made, PROMPTS[0], name="one"), answer(made, PROMPTS[spared], name="other")
        )
        assert one.finish_reason is FinishReason.ERROR
        assert list(other.tokens) == offline[spared]

    on_the_engine(test)
