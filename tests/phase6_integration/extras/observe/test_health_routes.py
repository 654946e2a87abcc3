"""/health and its two halves, /ping and /load: what they say is what a request gets."""

import asyncio

import pytest

from phase6_integration.process.health import Health
from tests.phase6_integration.fake_engine import FakeEngine, client


@pytest.mark.parametrize("health", Health)
def test_an_engine_is_ready_exactly_when_it_takes_requests(health: Health) -> None:
    async def statuses() -> list[int]:
        engine = FakeEngine()
        async with client(engine) as http:
            engine.health = health
            answer = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            return [
                answer.status_code,
                *[(await http.get(path)).status_code for path in ("/health", "/health/ready", "/ping")],
            ]

    expected = 200 if health is Health.READY else 503
    assert asyncio.run(statuses()) == [expected] * 4


@pytest.mark.parametrize("path", ["/load", "/v1/load"])
def test_the_load_is_the_number_of_requests_that_have_not_finished(path: str) -> None:
    async def loads() -> list[int]:
        engine, found = FakeEngine(), []

        async def look() -> None:
            found.append((await http.get(path)).json()["server_load"])

        async with client(engine) as http:
            await look()
            engine.flow.clear()
            bodies = [{"prompt": [5]}, {"prompt": [5], "n": 3, "stream": True}, {"prompt": [[5], [6]]}]
            sent = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
            while engine.live < 6:
                await asyncio.sleep(0)
            await look()
            engine.flow.set()
            await asyncio.gather(*sent)
            await look()
        return found

    assert asyncio.run(loads()) == [0, 3, 0]
