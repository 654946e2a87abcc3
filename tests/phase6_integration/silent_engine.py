"""An AsyncEngine without an engine process: a test reads the messages to it, and sends those from it."""

from collections.abc import Coroutine
from typing import Any

from phase0_request import FinishReason, SamplingParams
from phase6_integration.process.messages import Ended, EngineRequest, Output
from phase6_integration.process.outputs import OutputStream
from tests.phase6_integration import real_engine
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.running import run as run_for


class Silent(FakeEngine):
    """What is said of its requests, the test says. It keeps the messages to the engine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[Any] = []

    def _send(self, message: object) -> None:
        self.sent.append(message)

    def say(self, id: str, *tokens: int, reason: FinishReason | None = None) -> None:
        """These tokens of a completion, a step each; the last one with the reason."""
        for number, token in enumerate(tokens, 1):
            ended = [Ended(id, reason)] if reason is not None and number == len(tokens) else []
            self._tell(outputs=[Output(id, token)], ended=ended)

    def write(self, id: str, text: str, reason: FinishReason | None = None) -> None:
        """The tokens of a text, a step each."""
        assert self.tokenizer is not None
        self.say(id, *self.tokenizer.encode(text), reason=reason)


def ask(id: str, n: int = 1, tenant: str = "", **params: Any) -> EngineRequest:
    """Of its completions the ids are `id-0`, `id-1` and so on."""
    return real_engine.request(id, (1, 2, 3), SamplingParams(**{"max_tokens": 20, **params}), n=n, tenant=tenant)


def run(test: Coroutine[Any, Any, None]) -> None:
    """A stream that never ends is a failure, not a hang."""
    run_for(test, 20)


async def answer(reply: OutputStream) -> tuple[str, FinishReason | None, object]:
    """The text of the only output, how it ended, and the error."""
    (chunks,) = await real_engine.read(reply)
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason, chunks[-1].error
