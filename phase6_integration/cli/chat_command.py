"""`nanoserve chat`: a chat in the terminal. Ctrl-C stops an answer; /quit or the end of the input ends the chat."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx2
from rich.console import Console
from rich.text import Text

from phase0_request.params import SamplingParams
from phase0_request.support.flags import Parser
from phase6_integration.cli.chat_models import (
    AnswerError,
    ChatModel,
    ChatUsage,
    LocalModel,
    Messages,
    RemoteModel,
    Sampling,
)
from phase6_integration.cli.common import add_sampling, add_server, http_error, http_settings, printable
from phase6_integration.cli.local_model import add_local_model, local_options
from phase6_integration.cli.terminal import Wrapping

HELP = (
    "/reset starts over; /system TEXT sets the system message; /help shows this; /quit leaves; Ctrl-C stops an answer"
)
SAMPLED = ("max_tokens", "temperature", "seed")
DEFAULTS = {"max_tokens": 256, "temperature": 0.5}


class Chat:
    """One conversation. A question without an answer is not kept in it."""

    def __init__(self, model: ChatModel, sampling: Sampling, system: str | None, console: Console) -> None:
        self.model = model
        self.sampling = sampling
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
        out = Wrapping(self.console.file, self.console.width if self.console.is_terminal else sys.maxsize)
        start, first, last = time.perf_counter(), 0.0, 0.0
        try:
            with closing(self.model.answer(self.messages, self.sampling)) as parts:
                for part in parts:
                    if isinstance(part, ChatUsage):
                        usage = part
                        continue
                    last = time.perf_counter()
                    first = first or last
                    text += part
                    out.write(printable(part))
        except KeyboardInterrupt:
            problem = "stopped"
        except (AnswerError, ValueError) as error:
            problem = f"error: {error}"
        out.end()
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
    parser.add_argument(
        "model",
        nargs="?",
        help="a directory, a name on the hub, or with --url its name there (tiny_chat, or the first of the server)",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="the system message (none)")
    add_sampling(chat, SAMPLED, **DEFAULTS)
    add_local_model(parser.add_argument_group("local model"))
    add_server(parser.add_argument_group("server"))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 at the end of the chat; with piped input, 1 if a line was not answered."""
    options = vars(given)
    sampling = DEFAULTS | {name: options[name] for name in SAMPLED if name in options}
    try:
        SamplingParams(**sampling)
        local = local_options(options)
        settings = http_settings(options) if local is None else {}
    except ValueError as error:
        parser.error(str(error))
    console, terminal = Console(highlight=False, soft_wrap=True), sys.stdin.isatty()
    if terminal:  # an exception, so that what restores the terminal runs
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with _keys_unseen(terminal):
            if local is not None:
                model: ChatModel = LocalModel(local)
            else:
                with Console(stderr=True).status("connecting"):
                    model = RemoteModel(settings, options.get("model"))
        with closing(model):
            return _converse(Chat(model, sampling, options.get("system"), console), terminal)
    except httpx2.RequestError as error:
        print(f"{parser.prog}: {http_error(error, options['url'])}", file=sys.stderr)
    except (ValueError, OSError) as error:  # also input that is not text
        print(printable(f"{parser.prog}: {error}"), file=sys.stderr)
    return 1


def _converse(chat: Chat, terminal: bool) -> int:
    if terminal:
        chat.note(f"{chat.model.name}   {HELP}")
    answered = True
    for line in _lines(chat.console, terminal):
        if not line.startswith("/"):
            with _keys_unseen(terminal):
                answered = chat.ask(line) and answered
        elif not chat.command(line):
            break
    return 0 if answered or terminal else 1


@contextmanager
def _keys_unseen(terminal: bool) -> Iterator[None]:
    """The terminal does not echo what is typed meanwhile into a spinner or an answer: the next prompt shows it."""
    if not terminal:
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


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
