"""Texts: text into tokens and conversations into text, without holding up the event loop."""

import asyncio
import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jinja2 import TemplateError

from phase0_request.tokenizer import Tokenizer
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.server.errors import conflict
from phase6_integration.server.interruptible import Interruptible
from phase6_integration.server.protocol import Message
from phase6_integration.server.settings import ServerSettings

LONG = 10_000  # characters, or tokens; what is shorter is done in a few milliseconds, here and now
HUGE = 100_000  # what is longer than this waits for its turn: a tokenizer takes a hundred bytes for each character
LIBRARY = "transformers.utils.chat_template_utils"
T = TypeVar("T")


class Texts:
    """The engine's tokenizer as the routes use it. Long work is done in threads, and templates have a time limit."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        self._settings = settings
        self._turns = ThreadPoolExecutor(1, "huge-texts")
        if settings.chat_template is not None and engine.tokenizer is not None:
            self._tokenizer = copy.copy(engine.tokenizer)
            self._tokenizer.chat_template = settings.chat_template

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise conflict(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    async def aside(self, call: Callable[[], T], size: int) -> T:
        """What `call` returns, here and now if it is about little: else from a thread."""
        if size < LONG:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread(size), call)

    def _thread(self, size: int) -> ThreadPoolExecutor | None:
        return self._turns if size > HUGE else None

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """The tokens of each text. What counts is how long they are together."""
        return await self.aside(lambda: [self.split(text, add_special_tokens) for text in texts], sum(map(len, texts)))

    def split(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text, here and now."""
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens))
        except ValueError as error:
            raise conflict("prompt", f"prompt: {error}") from None

    async def decode(self, tokens: Sequence[int], param: str) -> str:
        """The text of tokens; the same as the text of an answer that has them."""
        tokenizer = self.tokenizer
        try:
            return await self.aside(lambda: tokenizer.decode(tokens), len(tokens))
        except ValueError as error:
            raise conflict(param, f"{param}: {error}") from None

    async def chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[int, ...]:
        """The tokens of a conversation, laid out by the model's template: in a thread, and within its time."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise conflict("messages", "this model has no chat template; send a prompt to /v1/completions")
        if LIBRARY not in sys.modules:  # loading it takes seconds, which are not the template's fault
            await asyncio.to_thread(importlib.import_module, LIBRARY)
        plain = [{"role": message.role, "content": message.text} for message in messages]
        loop, limit, begun = asyncio.get_running_loop(), self._settings.template_timeout, asyncio.Event()

        def lay_out() -> list[int]:
            loop.call_soon_threadsafe(begun.set)
            return tokenizer.chat(plain, add_generation_prompt)

        laying_out = Interruptible(lay_out)
        laid_out = loop.run_in_executor(self._thread(sum(len(one["content"]) for one in plain)), laying_out)
        try:
            await begun.wait()  # long texts of others may be before it, and that is not its time
            return tuple(await asyncio.wait_for(laid_out, limit))
        except TimeoutError:
            raise conflict("messages", f"laying these messages out took longer than {limit:g} seconds") from None
        except ValueError as error:
            said = error.__cause__  # in the template's own words, if it had any; what else went wrong stays here
            why = f": {said}"[:200] if isinstance(said, TemplateError) else ""
            raise conflict("messages", f"the chat template refused these messages{why}") from None
        finally:
            laying_out.interrupt()
            laid_out.cancel()
