"""TokenizerPool: the model's tokenizer for routes. It encodes in threads: a long text would stop the event loop."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, TypeVar

from phase0_request.machine import give_back_freed_memory
from phase0_request.params import MAX_TOKENS
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.errors import RequestError, unservable
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

LONG = 10_000  # tokens; to decode fewer takes a few milliseconds and is done on the event loop
MANY = 100_000  # tokens, with which the library takes 20 megabytes or more for a moment
THREADS = 2  # so that one long text does not delay all others
ROLES = "system", "user", "assistant", "tool"  # whatever a template makes of them
HELP = "a message may have the role system, developer, user, assistant or tool, or one that the chat template knows"
T = TypeVar("T")
Tokens = list[tuple[int, ...]]


class TokenizerPool:
    """The engine's tokenizer for routes, with the chat template of the server. No more than THREADS texts of one client
    wait in line for a thread, so that clients take turns."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        if self._tokenizer is not None and settings.chat_template is not None:
            self._tokenizer = self._tokenizer.with_chat_template(settings.chat_template)
        longest = 0 if self._tokenizer is None else self._tokenizer.longest
        self._max_chars = max(settings.max_body_bytes, engine.max_model_len * longest)  # of a rendered conversation
        self._max_waiting = engine.options.queued_per_client
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        self._places = dict[str, asyncio.Semaphore]()  # in the line for a thread, by tenant
        self._unfinished = Counter[str]()  # jobs, by tenant

    def start(self) -> None:
        """Load what a chat needs now, since that takes a second."""
        if self._tokenizer is not None:
            self._threads.submit(self._tokenizer.chat, [{"role": "user", "content": "Hello"}])

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise unservable(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    @property
    def template(self) -> str:
        """The chat template."""
        if self.tokenizer.chat_template is None:
            raise unservable("messages", "this model has no chat template; send a prompt to /v1/completions")
        return self.tokenizer.chat_template

    async def encode(self, texts: Sequence[str], tenant: str, add_special_tokens: bool = True) -> Tokens:
        """The tokens of each text."""
        tokenizer = self.tokenizer
        return await self._run(tenant, "prompt", lambda: tokenizer.encode_batch(texts, add_special_tokens))

    async def chat(
        self, conversation: Mapping[str, Any], tenant: str, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The tokens of a conversation, given as the arguments of Tokenizer.chat, rendered by the chat template."""
        tokenizer = self.tokenizer
        assert self.template

        def encode() -> list[list[int]]:
            given = _with_known_roles(tokenizer, conversation, self._max_chars)
            tokens = tokenizer.chat(**given, max_chars=self._max_chars)
            return [tokenizer.wrap(tokens) if add_special_tokens else tokens]

        (tokens,) = await self._run(tenant, "messages", encode)
        return tokens

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        tokenizer = self.tokenizer
        return await self.run(lambda: tokenizer.decode(tokens, skip_special_tokens), len(tokens))

    async def run(self, call: Callable[[], T], size: int) -> T:
        """The result of `call`, which runs in a thread unless its input is short."""
        return call() if size < LONG else await asyncio.to_thread(call)

    async def _run(self, tenant: str, param: str, job: Callable[[], list[list[int]]]) -> Tokens:
        """The tokens that a job finds in a thread. A RequestError says what is wrong with `param`."""

        def encode() -> Tokens:
            tokens = list(map(tuple, job()))
            total = sum(map(len, tokens))
            if total > MANY:
                give_back_freed_memory()
            if total > MAX_TOKENS:
                raise ValueError(f"these are more than {MAX_TOKENS} tokens")
            return tokens

        if self._unfinished[tenant] >= self._max_waiting:
            message = "too many texts wait for the tokenizer; try again later"
            raise RequestError(503, message, code="tokenizer_busy", headers={"retry-after": "10"})
        self._unfinished[tenant] += 1
        try:
            async with self._places.setdefault(tenant, asyncio.Semaphore(THREADS)):
                return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        except ValueError as error:
            raise unservable(param, f"{param}: {str(error)[:300]}") from None
        finally:
            self._unfinished -= Counter((tenant,))  # drops those with none
            if tenant not in self._unfinished:
                del self._places[tenant]


def _with_known_roles(tokenizer: Tokenizer, conversation: Mapping[str, Any], max_chars: int) -> Mapping[str, Any]:
    """The conversation, with a system message in place of a developer's where the template does not know these.
    ValueError if the template refuses another role, leaves out its messages, as many do, or makes a control token of
    it, as '<|' + role + '|>' does of endoftext."""
    messages: Sequence[Mapping[str, Any]] = conversation["messages"]
    if "developer" not in (tokenizer.chat_template or ""):
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    conversation = {**conversation, "messages": messages}
    salt = token_hex(8)
    marks = {place: f"{salt}{place:08}" for place, one in enumerate(messages) if one["role"] not in ROLES}
    if marks:
        marked = [{**one, "content": marks.get(place, one["content"])} for place, one in enumerate(messages)]
        try:
            parts = tokenizer.render(**{**conversation, "messages": marked})
        except ValueError as error:
            raise ValueError(f"{error}; {HELP}") from None
        text = "".join(parts)
        if not {*marks.values()} <= {*re.findall(rf"{salt}\d{{8}}", text)}:
            raise ValueError(f"the chat template leaves out messages; {HELP}")
        roles = {messages[place]["role"] for place in marks}
        if len(text) <= max_chars and tokenizer.spells(roles, parts):  # a longer one is refused
            raise ValueError(f"the chat template makes a control token of a role; {HELP}")
    return conversation
