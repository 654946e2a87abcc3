"""/health and its two halves: what they say is what a request gets."""

import asyncio

import pytest

from phase6_integration.health import Health
from tests.phase6_integration.fake_engine import FakeEngine, client


@pytest.mark.parametrize("health", Health)
def test_an_engine_is_ready_exactly_when_it_takes_requests(health: Health) -> None:
    async def statuses() -> list[int]:
        engine = FakeEngine()
        async with client(engine) as http:
            engine.health = health
            answer = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            return [answer.status_code, *[(await http.get(path)).status_code for path in ("/health", "/health/ready")]]

    expected = 200 if health is Health.READY else 503
    assert asyncio.run(statuses()) == [expected] * 3
