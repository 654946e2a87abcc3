"""TokenizerPool: the model's tokenizer for routes. It encodes in threads: a long text would stop the event loop."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, TypeVar

from phase0_request.params import MAX_TOKENS
from phase0_request.support.machine import give_back_freed_memory
from phase0_request.tokenizer import Tokenizer, TooLongError
from phase6_integration.api.errors import RequestError, unservable
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

LONG = 10_000  # tokens; to decode fewer takes a few milliseconds and is done on the event loop
MANY = 100_000  # tokens, with which the library takes 20 megabytes or more for a moment
SHORT = 1 << 15  # characters of the texts of a request that wait for no long ones; rendered, they may be twice as long
PLACES = 2  # of a client in a line: one text is encoded and one is next
ROLES = "system", "user", "assistant", "tool"  # whatever a template makes of them
HELP = "a message may have the role system, developer, user, assistant or tool, or one that the chat template knows"
T = TypeVar("T")
Tokens = list[tuple[int, ...]]


class TokenizerLane:
    """A thread, and the line for it. No more than PLACES jobs of one client are in line, so that clients take turns."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self.thread = ThreadPoolExecutor(1, name)
        self._max_waiting = max_waiting  # of a client
        self._places = dict[str, asyncio.Semaphore]()  # by client
        self._unfinished = Counter[str]()  # jobs, by client

    async def run(self, client: str, job: Callable[[], T]) -> T:
        if self._unfinished[client] >= self._max_waiting:
            message = "too many texts wait for the tokenizer; try again later"
            raise RequestError(503, message, code="tokenizer_busy", headers={"retry-after": "10"})
        self._unfinished[client] += 1
        try:
            async with self._places.setdefault(client, asyncio.Semaphore(PLACES)):
                return await asyncio.get_running_loop().run_in_executor(self.thread, job)
        finally:
            self._unfinished -= Counter((client,))  # drops those with none
            if client not in self._unfinished:
                del self._places[client]


class TokenizerPool:
    """The engine's tokenizer for routes, with the chat template of the server. Short texts have a lane, and long ones
    another: no text of megabytes delays a short one, even of the same client."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        if self._tokenizer is not None and settings.chat_template is not None:
            self._tokenizer = self._tokenizer.with_chat_template(settings.chat_template)
        longest = 0 if self._tokenizer is None else self._tokenizer.longest
        self.most_chars = engine.max_model_len * longest  # of a prompt that fits into the context
        self._max_chars = max(settings.max_body_bytes, self.most_chars)  # of any rendered conversation
        self._short, self._long = (TokenizerLane(name, engine.options.queued_per_client) for name in ("short", "long"))

    def start(self) -> None:
        """Load now whatever a chat needs, since that takes a second."""
        if self._tokenizer is not None:
            self._short.thread.submit(self._tokenizer.chat, [{"role": "user", "content": "Hello"}])

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise unservable(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    @property
    def template(self) -> str:
        """The chat template."""
        if not self.tokenizer.chat_template:
            raise unservable("messages", "this model has no chat template; send a prompt to /v1/completions")
        return self.tokenizer.chat_template

    async def encode(self, texts: Sequence[str], client: str, add_special_tokens: bool = True) -> Tokens:
        """The tokens of each text."""
        tokenizer = self.tokenizer

        def encode(_: int) -> list[list[int]]:
            return tokenizer.encode_batch(texts, add_special_tokens)

        return await self._encode_in_lane(texts, client, "prompt", encode, self._max_chars)

    async def chat(
        self, conversation: Mapping[str, Any], client: str, add_special_tokens: bool = False, fits: bool = False
    ) -> tuple[int, ...]:
        """The tokens of a conversation, given as the arguments of Tokenizer.chat, rendered by the chat template. With
        `fits` it is refused before it is encoded if the rendered text is too long for the context."""
        tokenizer, template = self.tokenizer, self.template
        most = self.most_chars if fits else self._max_chars

        def encode(max_chars: int) -> list[list[int]]:
            given = _with_known_roles(tokenizer, template, conversation, max_chars)
            tokens = tokenizer.chat(**given, max_chars=max_chars)
            return [tokenizer.wrap(tokens) if add_special_tokens else tokens]

        (tokens,) = await self._encode_in_lane(conversation, client, "messages", encode, most)
        return tokens

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        tokenizer = self.tokenizer
        return await self.run(lambda: tokenizer.decode(tokens, skip_special_tokens), len(tokens))

    async def run(self, call: Callable[[], T], size: int) -> T:
        """The result of `call`, which runs in a thread unless its input is short."""
        return call() if size < LONG else await asyncio.to_thread(call)

    async def _encode_in_lane(
        self, given: Any, client: str, param: str, job: Callable[[int], list[list[int]]], most: int
    ) -> Tokens:
        """Encode `given` in the short lane, or in the long one if its text, or what the template makes of it, is too
        long. `job` gets the most characters it may encode; `most` is the limit in any lane. Errors name `param`."""

        def encode(most_here: int) -> Tokens:
            tokens = list(map(tuple, job(most_here)))
            total = sum(map(len, tokens))
            if total > MANY:
                give_back_freed_memory()
            if total > MAX_TOKENS:
                raise ValueError(f"these are more than {MAX_TOKENS} tokens")
            return tokens

        try:
            if not is_long(given):
                try:
                    return await self._short.run(client, lambda: encode(min(most, 2 * SHORT)))
                except TooLongError:
                    if most <= 2 * SHORT:  # too long in any lane
                        raise
            return await self._long.run(client, lambda: encode(most))
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLongError) else "conflicting_values"
            raise unservable(param, f"{param}: {str(error)[:300]}", code) from None


def is_long(given: Any) -> bool:
    """Whether the texts in a structure of JSON have more than SHORT characters together. An item counts as one, so that
    the walk ends soon too."""
    left, rest = SHORT, [given]
    while rest and left >= 0:
        one = rest.pop()
        sized = one if isinstance(one, str | Sequence | Mapping) else str(one)
        left -= len(sized)
        if left >= 0 and not isinstance(sized, str):
            rest += [*sized.keys(), *sized.values()] if isinstance(sized, Mapping) else sized
    return left < 0


def _with_known_roles(
    tokenizer: Tokenizer, template: str, conversation: Mapping[str, Any], max_chars: int
) -> Mapping[str, Any]:
    """The conversation, with a system message in place of a developer's where the template does not know these.
    ValueError if the template refuses another role, leaves out its messages, as many do, or makes a control token of
    it, as '<|' + role + '|>' does of endoftext."""
    messages: Sequence[Mapping[str, Any]] = conversation["messages"]
    if "developer" not in template:
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
