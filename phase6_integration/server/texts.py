"""Texts: text into tokens and conversations into text, without holding up the event loop."""

import asyncio
import copy
import importlib
import sys
from collections.abc import Sequence

from jinja2 import TemplateError

from phase0_request.tokenizer import Tokenizer
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.server.errors import conflict
from phase6_integration.server.protocol import Message
from phase6_integration.server.settings import ServerSettings

LONG = 20_000  # characters; a shorter text is tokenized sooner than a thread is woken
_LIBRARY = "transformers.utils.chat_template_utils"


class Texts:
    """The engine's tokenizer as the routes use it. Long work is done in threads, and templates have a time limit."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        self._settings = settings
        if settings.chat_template is not None and engine.tokenizer is not None:
            self._tokenizer = copy.copy(engine.tokenizer)
            self._tokenizer.chat_template = settings.chat_template

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise conflict(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text."""
        encode = self.tokenizer.encode
        try:
            if len(text) < LONG:
                return tuple(encode(text, add_special_tokens))
            return tuple(await asyncio.to_thread(encode, text, add_special_tokens))
        except ValueError as error:
            raise conflict(param, f"{param}: {error}") from None

    async def decode(self, tokens: Sequence[int], param: str) -> str:
        """The text of tokens; the same as the text of an answer that has them."""
        decode = self.tokenizer.decode
        try:
            return decode(tokens) if len(tokens) < LONG else await asyncio.to_thread(decode, tokens)
        except ValueError as error:
            raise conflict(param, f"{param}: {error}") from None

    async def chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[int, ...]:
        """The tokens of a conversation, laid out by the model's template: in a thread, and within its time."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise conflict("messages", "this model has no chat template; send a prompt to /v1/completions")
        if _LIBRARY not in sys.modules:  # loading it takes seconds, which are not the template's fault
            await asyncio.to_thread(importlib.import_module, _LIBRARY)
        plain = [{"role": message.role, "content": message.text} for message in messages]
        limit = self._settings.template_timeout
        try:
            laid_out = asyncio.to_thread(tokenizer.chat, plain, add_generation_prompt)
            return tuple(await asyncio.wait_for(laid_out, limit))
        except TimeoutError:
            raise conflict("messages", f"laying these messages out took longer than {limit:g} seconds") from None
        except ValueError as error:
            said = error.__cause__  # in the template's own words, if it had any; what else went wrong stays here
            why = f": {said}"[:200] if isinstance(said, TemplateError) else ""
            raise conflict("messages", f"the chat template refused these messages{why}") from None
