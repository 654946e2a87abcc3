"""TokenizerPool: runs the tokenizer and chat templates without blocking the event loop."""

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
from phase6_integration.server.errors import RequestError, conflict
from phase6_integration.server.schemas import Message
from phase6_integration.server.settings import ServerSettings

LONG = 10_000  # characters or tokens; shorter inputs take a few milliseconds and are done on the event loop
HUGE = 100_000  # longer inputs are done one at a time: a tokenizer takes a hundred bytes for each character
TEMPLATE_THREADS = 4
TEMPLATE_LIBRARY = "transformers.utils.chat_template_utils"
T = TypeVar("T")


class TokenizerPool:
    """The engine's tokenizer for routes. Long work runs in threads; chat templates have a time limit."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        self._settings = settings
        self._huge = asyncio.Lock()
        self._template_threads = ThreadPoolExecutor(TEMPLATE_THREADS, "chat-templates")
        if settings.chat_template is not None and engine.tokenizer is not None:
            self._tokenizer = copy.copy(engine.tokenizer)
            self._tokenizer.chat_template = settings.chat_template

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise conflict(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    async def run(self, call: Callable[[], T], size: int) -> T:
        """The result of `call`, which runs in a thread unless its input is short."""
        if size < LONG:
            return call()
        if size <= HUGE:
            return await asyncio.to_thread(call)
        async with self._huge:
            return await asyncio.to_thread(call)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """The tokens of each text."""
        size = sum(map(len, texts))
        return await self.run(lambda: [self.encode_now(text, add_special_tokens) for text in texts], size)

    def encode_now(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens))
        except ValueError as error:
            raise conflict("prompt", f"prompt: {error}") from None

    async def decode(self, tokens: Sequence[int], param: str) -> str:
        """The text of tokens."""
        tokenizer = self.tokenizer
        try:
            return await self.run(lambda: tokenizer.decode(tokens), len(tokens))
        except ValueError as error:
            raise conflict(param, f"{param}: {error}") from None

    async def chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[int, ...]:
        """The tokens of a conversation, rendered by the model's chat template. A template that exceeds its time limit
        is abandoned, and its thread does no other work until it returns."""
        if self.tokenizer.chat_template is None:
            raise conflict("messages", "this model has no chat template; send a prompt to /v1/completions")
        if TEMPLATE_LIBRARY not in sys.modules:  # the import takes seconds, which do not count as the template's
            await asyncio.to_thread(importlib.import_module, TEMPLATE_LIBRARY)
        plain = [{"role": message.role, "content": message.text} for message in messages]
        if sum(len(one["content"]) for one in plain) <= HUGE:
            return await self._render(plain, add_generation_prompt)
        async with self._huge:
            return await self._render(plain, add_generation_prompt)

    async def _render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> tuple[int, ...]:
        tokenizer, limit = self.tokenizer, self._settings.template_timeout
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def render() -> list[int]:
            loop.call_soon_threadsafe(started.set)
            return tokenizer.chat(messages, add_generation_prompt)

        rendering = loop.run_in_executor(self._template_threads, render)
        try:
            async with asyncio.timeout(TEMPLATE_THREADS * limit):  # enough for those before it, unless threads are lost
                await started.wait()
        except TimeoutError:
            rendering.cancel()
            message = "all threads for chat templates are busy; try again later"
            raise RequestError(503, message, code="templates_busy", headers={"retry-after": "10"}) from None
        try:
            return tuple(await asyncio.wait_for(rendering, limit))
        except TimeoutError:
            raise conflict("messages", f"the chat template took longer than {limit:g} seconds") from None
        except ValueError as error:
            cause = error.__cause__  # only the template's own message is for the client
            why = f": {cause}"[:200] if isinstance(cause, TemplateError) else ""
            raise conflict("messages", f"the chat template refused these messages{why}") from None
