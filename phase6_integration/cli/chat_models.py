"""The models that `nanoserve chat` talks to: one in this process, or one of a server. Both stream an answer as pieces
of text, then its `ChatUsage`."""

import json
import signal
from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import httpx2

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.support.checks import check_int
from phase6_integration.cli.common import body_of, error_message, http_error, lines_of
from phase6_integration.cli.local_model import open_engine
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.load.client import first_model

Messages = list[dict[str, str]]
Sampling = dict[str, Any]  # fields of SamplingParams, as OpenAI's API names them


class AnswerError(RuntimeError):
    """There is no answer, or only a part of it, and why."""


class ChatUsage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    truncated: bool  # at max_tokens


class ChatModel(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str | ChatUsage]:
        """Stream an answer. Closing the generator, or Ctrl-C, aborts it."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """A model on an engine in this process."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = open_engine(options)
        self.name = options.model.rstrip("/").rpartition("/")[2]
        tokenizer = self.engine.parts.model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError("this model has no chat template, so it cannot chat; `nanoserve generate` completes text")
        self.tokenizer = tokenizer

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str | ChatUsage]:
        """Ctrl-C takes effect between two tokens, so that it cannot interrupt the scheduler in the middle of a step; a
        second Ctrl-C takes effect at once."""
        prompt, cached = self.tokenizer.chat(messages), self._hit_tokens()
        pressed = False

        def press(*_: object) -> None:
            nonlocal pressed
            pressed = True
            signal.signal(signal.SIGINT, default)

        default = signal.signal(signal.SIGINT, press)
        try:
            with closing(self.engine.stream([prompt], SamplingParams(**sampling))) as deltas:
                for delta in deltas:
                    if delta.text:
                        yield delta.text
                    if pressed:
                        raise KeyboardInterrupt
        finally:
            signal.signal(signal.SIGINT, default)
        request = delta.request
        if request.error is not None:
            raise AnswerError(request.error)
        truncated = request.finish_reason is FinishReason.LENGTH
        yield ChatUsage(len(prompt), self._hit_tokens() - cached, len(request.output_tokens), truncated)

    def close(self) -> None:
        self.engine.close()

    def _hit_tokens(self) -> int:
        return Gauges.read(self.engine.parts.scheduler).hit_tokens


class RemoteModel:
    """A model of an OpenAI-compatible server."""

    def __init__(self, settings: dict[str, Any], model: str | None) -> None:
        self.client = httpx2.Client(**settings)
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        with self.client.stream("GET", "/v1/models") as response:
            return first_model(
                httpx2.Response(response.status_code, content=body_of(response), request=response.request)
            )

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str | ChatUsage]:
        usage, reason, done = None, None, False
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= sampling
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise AnswerError(f"{response.status_code}: {error_message(body_of(response))}")
                for line in lines_of(response):
                    if not line.startswith("data:"):
                        continue
                    if (data := line[5:].strip()) == "[DONE]":
                        done = True
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise AnswerError(str(chunk["error"]["message"]))
                    usage = usage_of(chunk) or usage
                    for choice in chunk["choices"]:
                        reason = choice.get("finish_reason") or reason
                        if content := choice["delta"].get("content"):
                            yield str(content)
        except httpx2.RequestError as error:
            raise AnswerError(http_error(error, str(self.client.base_url))) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise AnswerError("the server sent an event that is no chat completion chunk") from None
        if not done:
            raise AnswerError("the stream ended before the answer did")
        if usage is not None:
            yield ChatUsage(*usage, truncated=reason == "length")

    def close(self) -> None:
        self.client.close()


def usage_of(chunk: dict[str, Any]) -> tuple[int, int, int] | None:
    """The tokens of a prompt, how many of them were cached, and the tokens of an answer, where a server says them."""
    if not (usage := chunk.get("usage")):
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = usage["prompt_tokens"], cached, usage["completion_tokens"]
    prompt, cached, output = (check_int("usage", count, 0) for count in counts)
    return prompt, cached, output
