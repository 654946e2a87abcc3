"""A fault that ends the engine ends every request with an error. `test_async_engine.py` has faults of one request."""

import asyncio

import pytest

from phase0_request import FinishReason, SamplingParams
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import EngineRequest
from tests.phase6_integration.faults import POISON
from tests.phase6_integration.real_engine import GREEDY, PROMPTS, answer, engine
from tests.phase6_integration.running import run


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
