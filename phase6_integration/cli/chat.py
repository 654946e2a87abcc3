"""`nanoserve chat`: a chat in the terminal. Ctrl-C stops an answer; /quit or the end of the input ends the chat.

The model is a `LocalModel` or a `RemoteModel`; both stream an answer as pieces of text, then its `ChatUsage`.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import httpx
from rich.console import Console
from rich.text import Text

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.cli.common import (
    Parser,
    add_local_model,
    add_sampling,
    add_server,
    first_model,
    http_error,
    http_settings,
    local_options,
    open_engine,
    printable,
)
from phase6_integration.options import EngineOptions
from phase6_integration.stats import Gauges

HELP = "/reset starts over; /system TEXT sets the system message; /quit leaves; Ctrl-C stops an answer"
SAMPLED = ("max_tokens", "temperature", "seed")
DEFAULTS = {"max_tokens": 256, "temperature": 0.5}

Messages = list[dict[str, str]]


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

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[str | ChatUsage]:
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

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[str | ChatUsage]:
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
            with closing(self.engine.stream([prompt], params)) as deltas:
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
        self.client = httpx.Client(**settings)
        self.name = model or first_model(self.client.get("/v1/models"))

    # region server_answer
    def answer(self, messages: Messages, params: SamplingParams) -> Generator[str | ChatUsage]:
        usage, reason, done = None, None, False
        body = self._body(messages, params)
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise AnswerError(f"{response.status_code}: {_message(response.read())}")
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    if (data := line[5:].strip()) == "[DONE]":
                        done = True
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise AnswerError(chunk["error"]["message"])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        reason = choice.get("finish_reason") or reason
                        if content := choice["delta"].get("content"):
                            yield content
        except httpx.TransportError as error:
            raise AnswerError(http_error(error, str(self.client.base_url))) from None
        except (ValueError, LookupError, TypeError):
            raise AnswerError("the server sent an event that is no chat completion chunk") from None
        if not done:
            raise AnswerError("the stream ended before the answer did")
        if usage is not None:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            yield ChatUsage(usage["prompt_tokens"], cached, usage["completion_tokens"], reason == "length")

    # endregion

    def close(self) -> None:
        self.client.close()

    def _body(self, messages: Messages, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if params.seed is None else body | {"seed": params.seed}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "a response that is no JSON error"


class Chat:
    """One conversation. A question without an answer is not kept in it."""

    def __init__(self, model: ChatModel, params: SamplingParams, system: str | None, console: Console) -> None:
        self.model = model
        self.params = params
        self.system = system
        self.console = console
        self.history: Messages = []

    @property
    def messages(self) -> Messages:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.history

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash. False if the chat ends."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.history.clear()
                self.note("a new conversation")
            case "/system":
                self.system = rest.strip() or None
                self.history.clear()
                self.note("a new conversation" + ("" if self.system else ", without a system message"))
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"there is no {name}: {HELP}")
        return True

    def ask(self, question: str) -> bool:
        """Send a message and print its answer as it comes. False if it failed or was stopped."""
        self.history.append({"role": "user", "content": question})
        text, usage, problem = "", None, None
        start, first, last = time.perf_counter(), 0.0, 0.0
        try:
            with closing(self.model.answer(self.messages, self.params)) as pieces:
                for piece in pieces:
                    if isinstance(piece, ChatUsage):
                        usage = piece
                        continue
                    last = time.perf_counter()
                    first = first or last
                    text += piece
                    self.console.file.write(printable(piece))
                    self.console.file.flush()
        except KeyboardInterrupt:
            problem = "stopped"
        except (AnswerError, ValueError) as error:
            problem = f"error: {error}"
        self.console.file.write("\n")
        if text:
            self.history.append({"role": "assistant", "content": text})
        else:
            self.history.pop()
        if problem is not None:
            self.note(problem, "dim" if problem == "stopped" else "red")
        elif self.console.is_terminal and usage is not None:
            self.note(_summary(usage, first - start, last - first))
        return problem is None

    def note(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(printable(text), style))


def _summary(usage: ChatUsage, ttft: float, decoding: float) -> str:
    parts = [f"first token {ttft * 1e3:.0f} ms"] if usage.output_tokens else []
    if usage.output_tokens > 1 and decoding > 0:
        parts.append(f"{(usage.output_tokens - 1) / decoding:.0f} tokens/s")
    parts += [f"{usage.output_tokens} tokens", f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"]
    return "   ".join([*parts, "truncated at max-tokens"] if usage.truncated else parts)


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve chat [MODEL] [flags]"
    parser.add_argument("model", nargs="?", help="a directory, a name on the hub, or with --url its name there")
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling(chat, SAMPLED, **DEFAULTS)
    add_local_model(parser.add_argument_group("local model"))
    add_server(parser.add_argument_group("server"))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 at the end of the chat; with piped input, 1 if a line was not answered."""
    options = vars(given)
    try:
        params = SamplingParams(**DEFAULTS | {name: options[name] for name in SAMPLED if name in options})
        local = local_options(options)
        settings = http_settings(options) if local is None else {}
    except ValueError as error:
        parser.error(str(error))
    console, terminal = Console(highlight=False, soft_wrap=True), sys.stdin.isatty()
    try:
        with Console(stderr=True).status("loading" if local else "connecting"):
            model = RemoteModel(settings, options.get("model")) if local is None else LocalModel(local)
        with closing(model):
            return _converse(Chat(model, params, options.get("system"), console), terminal)
    except httpx.TransportError as error:
        print(f"{parser.prog}: {http_error(error, options['url'])}", file=sys.stderr)
    except (ValueError, OSError) as error:  # also input that is not text
        print(f"{parser.prog}: {error}", file=sys.stderr)
    return 1


def _converse(chat: Chat, terminal: bool) -> int:
    if terminal:
        chat.note(f"{chat.model.name}   {HELP}")
    answered = True
    for line in _lines(chat.console, terminal):
        if not line.startswith("/"):
            answered = chat.ask(line) and answered
        elif not chat.command(line):
            break
    return 0 if answered or terminal else 1


def _lines(console: Console, terminal: bool) -> Iterator[str]:
    """Lines that are typed or piped in, without empty ones. Ctrl-C discards a line."""
    if terminal:
        import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(Text("  /quit leaves", "dim"))
            continue
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()
