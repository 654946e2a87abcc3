"""The chat: lines in, answers out as they come. Ctrl-C stops an answer; /quit or the end of the input ends the chat."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing

from rich.console import Console
from rich.text import Text

from phase0_request.params import SamplingParams
from phase6_integration.async_engine import UnavailableError
from phase6_integration.cli.conversation import AnswerError, Facts, Speaker
from phase6_integration.http_client import UnreachableError

HELP = "/reset forgets the conversation; /system TEXT sets its first message; /quit leaves; Ctrl-C stops an answer"
FAULTS = (AnswerError, UnavailableError, UnreachableError, ValueError)
# A model may say anything; what would move the cursor or ring the bell is shown as a mark.
HARMLESS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")


class Chat:
    """One conversation. What fails is said, and leaves it as it was."""

    def __init__(self, speaker: Speaker, params: SamplingParams, system: str | None, console: Console) -> None:
        self.speaker = speaker
        self.params = params
        self.system = system
        self.console = console
        self.said: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.said

    def command(self, line: str) -> bool:
        """Whether the chat goes on after this line, which begins with a slash."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.said.clear()
                self.note("the conversation is forgotten")
            case "/system":
                self.system = rest.strip() or None
                self.said.clear()
                self.note("a new conversation" + ("" if self.system else ", without a system message"))
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"there is no {name}: {HELP}")
        return True

    def ask(self, runner: asyncio.Runner, line: str) -> bool:
        """Put a question, show the answer. False if there was none."""
        self.said.append({"role": "user", "content": line})
        heard = Heard(self.show)
        fault = None
        try:
            runner.run(heard.listen(self))
        except KeyboardInterrupt:
            fault = "stopped"
        except FAULTS as error:
            fault = f"error: {error}"
        self.show("\n")
        if heard.text:
            self.said.append({"role": "assistant", "content": heard.text})
        else:
            self.said.pop()
        if fault is not None:
            self.note(fault, "red" if fault != "stopped" else "dim")
        elif self.console.is_terminal:
            self.note(heard.words())
        return fault is None

    def show(self, text: str) -> None:
        """As it is said, not as a console would lay it out."""
        self.console.file.write(text.translate(HARMLESS))
        self.console.file.flush()

    def note(self, words: str, style: str = "dim") -> None:
        self.console.print(Text(words.translate(HARMLESS), style))


class Heard:
    """An answer as it comes, and when it came."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.text = ""
        self.facts: Facts | None = None
        self._show = show
        self._clock = clock
        self._asked = clock()
        self._first = self._last = 0.0

    async def listen(self, chat: Chat) -> None:
        async with aclosing(chat.speaker.answer(chat.messages, chat.params)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Facts):
                    self.facts = piece
                    continue
                self._last = self._clock()
                self._first = self._first or self._last
                self.text += piece
                self._show(piece)

    def words(self) -> str:
        """What it took, in a line."""
        said = [f"first token {(self._first - self._asked) * 1e3:.0f} ms"] if self.text else []
        if self.facts is not None:
            prompt, cached, tokens, cut = self.facts
            if tokens > 1 and self._last > self._first:
                said.append(f"{(tokens - 1) / (self._last - self._first):.0f} tokens/s")
            said += [f"{tokens} tokens", f"{cached} of {prompt} prompt tokens cached"]
            said += ["cut at max-tokens"] if cut else []
        return "   ".join(said)


def converse(
    open_speaker: Callable[[], Awaitable[Speaker]], params: SamplingParams, system: str | None, name: str
) -> int:
    """Until the input ends. From a pipe each line is a message; the exit code is then 1 if one was not answered."""
    console = Console(highlight=False, soft_wrap=True)

    async def opened() -> Speaker:
        return await open_speaker()

    with asyncio.Runner() as runner:
        try:
            with Console(stderr=True).status("getting ready"):
                speaker = runner.run(opened())
        except (*FAULTS, OSError, RuntimeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        try:
            chat, person = Chat(speaker, params, system, console), sys.stdin.isatty()
            if person:
                chat.note(f"{speaker.name}   {HELP}")
            answered = True
            for line in lines(console, person):
                if line.startswith("/"):
                    if not chat.command(line):
                        break
                else:
                    answered = chat.ask(runner, line) and answered
            return 0 if answered or person else 1
        except UnicodeDecodeError as error:  # what comes in is no text
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        finally:
            runner.run(speaker.close())


def lines(console: Console, person: bool) -> Iterator[str]:
    """What is typed, or piped in, without empty lines. Ctrl-C gives a line up."""
    if person:
        import readline  # noqa: F401  so that lines can be edited and called back
    while True:
        try:
            line = input("> ") if person else sys.stdin.readline()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(Text("  /quit leaves", "dim"))
            continue
        if not person and not line:
            return
        if line.strip():
            yield line.strip()
