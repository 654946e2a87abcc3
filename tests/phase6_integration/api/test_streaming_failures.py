"""Failures of a stream: a status before its first byte, an event after it, and [DONE] at the end."""

import asyncio

import pytest

from phase0_request.request import FinishReason
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest, Progress
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.streams import PATHS, body, run, text_of

pytestmark = pytest.mark.usefixtures("one_tokenizer")
FAILURES = [
    (FinishReason.ERROR, 500, "internal_error"),
    (FinishReason.TIMEOUT, 408, "deadline_passed"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_before_the_first_token_has_a_status(
    path: str, reason: FinishReason, status: int, code: str, stream: bool
) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda _: [reason])
        async with Call(create_app(engine, ServerSettings()), path, body(path, stream=stream)) as call:
            pass
        assert call.status == status, f"nothing was sent before the request failed: {status}, not {call.status}"
        assert call.json["error"]["code"] == code
        assert "a reason that no client may see" not in call.content.decode()
        assert engine.live == 0

    run(test)


@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
def test_what_fails_in_its_first_step_has_a_status_too(reason: FinishReason, status: int, code: str) -> None:
    """No byte of a request that failed right after admission has been sent."""

    class AtOnce(FakeEngine):
        def _send(self, message: object) -> None:
            if isinstance(message, EngineRequest):
                error = "why" if reason is FinishReason.ERROR else None
                failed = Progress(message.name(0), finish_reason=reason, error=error, admitted=0.0)
                asyncio.get_running_loop().call_soon(lambda: self.tell(failed))

    async def test() -> None:
        async with Call(create_app(AtOnce(), ServerSettings()), PATHS[0], body(PATHS[0], stream=True)) as call:
            pass
        assert (call.status, call.json["error"]["code"]) == (status, code)

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("reason", "status", "code"), FAILURES)
def test_what_fails_later_is_an_event_and_done_comes_after_it(
    path: str, reason: FinishReason, status: int, code: str
) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda submit: [*submit.prompt_tokens[:3], reason])
        async with Call(create_app(engine, ServerSettings()), path, body(path, stream=True)) as call:
            pass
        assert call.events[-1] == "[DONE]", f"the last event is always [DONE]; it was {call.events[-1]}"
        *chunks, failure, _ = call.events
        assert "error" in failure, f"before [DONE] comes the error; it was {failure}"
        assert (call.status, failure["error"]["code"]) == (200, code)
        assert set(failure["error"]) == {"message", "type", "param", "code"}
        assert chunks, "what came before the failure was sent"
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert "a reason that no client may see" not in call.content.decode()

    run(test)


def test_what_came_together_with_a_failure_is_sent_before_it() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda submit: [*submit.prompt_tokens * 20, FinishReason.ERROR])
        asked = body(PATHS[0], stream=True, max_tokens=50)
        async with Call(create_app(engine, ServerSettings()), PATHS[0], asked) as call:
            await call.until(lambda call: call.sends >= 2)
            call.reads.clear()
            while engine.live:
                await asyncio.sleep(0)
            call.reads.set()
        *chunks, failure, _ = call.events
        text = "".join(map(text_of, chunks))
        assert text == "Hello" * 20, f"20 words were generated before the failure; the client got {text.count('Hello')}"
        assert failure["error"]["code"] == "internal_error"

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_is_unavailable_not_a_fault_of_the_request(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.flow.clear()
        app = create_app(engine, ServerSettings(keepalive=0.001))
        async with Call(app, "/v1/completions", body("", stream=stream)) as call:
            while not engine.submitted:
                await asyncio.sleep(0)
            if stream:
                await call.until(lambda call: call.status is not None)
            engine._process_failed(Health.DEAD, "its process has ended with status -9")
        error = call.events[-2]["error"] if stream else call.json["error"]
        assert error["code"] == "dead"
        assert error["type"] == "service_unavailable_error"
        assert call.status == (200 if stream else 503)
        assert "-9" not in call.content.decode()

    run(test)
