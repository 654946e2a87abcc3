"""TokenizerPool: the model's tokenizer for routes. Nothing that a model's files define runs on the event loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.errors import RequestError, conflict
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.tokenizer_worker import (
    Job,
    KilledError,
    TokenizerWorker,
    Tokens,
    encode,
    encode_chat,
)

logger = logging.getLogger("nanoserve")
LONG = 10_000  # tokens; to decode fewer takes a few milliseconds and is done on the event loop
WORKERS = 2  # so that a text that takes its whole time limit delays no other
SLOWEST = 100_000  # characters a second that a tokenizer encodes at the very least
T = TypeVar("T")


class TokenizerPool:
    """The engine's tokenizer for routes. It encodes in processes with limits of time and memory, and decodes here. No
    more than WORKERS texts of one client wait in line for a process, so that clients take turns."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        self._seconds = settings.template_timeout
        self._max_waiting = engine.options.queued_per_client
        self._template = settings.chat_template
        if self._template is None and engine.tokenizer is not None:
            self._template = engine.tokenizer.chat_template
        longest = 0 if engine.tokenizer is None else engine.tokenizer.longest
        self._max_chars = max(settings.max_body_bytes, engine.max_model_len * longest)  # of a rendered conversation
        directory = engine.options.tokenizer or engine.options.model
        self._workers = [TokenizerWorker(directory, self._template) for _ in range(WORKERS)]
        self._idle = asyncio.LifoQueue[TokenizerWorker]()  # in most servers, the first does all the work
        for worker in reversed(self._workers):
            self._idle.put_nowait(worker)
        self._places = dict[str, asyncio.Semaphore]()  # in the line for a process, by tenant
        self._unfinished = Counter[str]()  # jobs, by tenant

    def start(self) -> None:
        """Start a process now, since that takes a second."""
        if self._tokenizer is not None:
            self._workers[0].submit(1.0, encode, [], False)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise conflict(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    @property
    def template(self) -> str:
        """The chat template."""
        if self._template is None:
            raise conflict("messages", "this model has no chat template; send a prompt to /v1/completions")
        return self._template

    async def encode(self, texts: Sequence[str], tenant: str, add_special_tokens: bool = True) -> Tokens:
        """The tokens of each text."""
        assert self.tokenizer
        seconds = self._seconds + sum(map(len, texts)) / SLOWEST
        return await self._run(tenant, "prompt", "the tokenizer", seconds, encode, list(texts), add_special_tokens)

    async def chat(self, conversation: bytes, tenant: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The tokens of a conversation, rendered by the model's chat template."""
        assert self.tokenizer
        assert self.template
        seconds = self._seconds + len(conversation) / SLOWEST
        arguments = encode_chat, conversation, self._max_chars, add_special_tokens
        (tokens,) = await self._run(tenant, "messages", "the chat template", seconds, *arguments)
        return tokens

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        tokenizer = self.tokenizer
        return await self.run(lambda: tokenizer.decode(tokens, skip_special_tokens), len(tokens))

    async def run(self, call: Callable[[], T], size: int) -> T:
        """The result of `call`, which runs in a thread unless its input is short."""
        return call() if size < LONG else await asyncio.to_thread(call)

    async def _run(self, tenant: str, param: str, program: str, seconds: float, job: Job, *arguments: Any) -> Tokens:
        """The result of a job. A RequestError says what is wrong with `param`, or what `program` did."""
        if self._unfinished[tenant] >= self._max_waiting:
            raise _unavailable("too many texts wait for the tokenizer; try again later", "tokenizer_busy")
        self._unfinished[tenant] += 1
        try:
            async with self._places.setdefault(tenant, asyncio.Semaphore(WORKERS)):
                worker = await self._idle.get()
                working = asyncio.create_task(worker.run(seconds, job, *arguments))
                working.add_done_callback(partial(self._ended, worker))
                return await asyncio.shield(working)  # a process is idle when its job has ended, client or not
        except ValueError as error:
            raise conflict(param, f"{param}: {error}") from None
        except KilledError as killed:
            late, large = f"took longer than {seconds:.2g} seconds", "failed, or needed more memory than it may use"
            raise conflict(param, f"{param}: {program} {late if killed.late else large}") from None
        except OSError as error:
            logger.error("the tokenizer process cannot be started: %s", error)
            message = "the tokenizer cannot be started now; try again later"
            raise _unavailable(message, "tokenizer_unavailable") from None
        finally:
            self._unfinished -= Counter((tenant,))  # drops those with none
            if tenant not in self._unfinished:
                del self._places[tenant]

    def _ended(self, worker: TokenizerWorker, job: "asyncio.Task[Tokens]") -> None:
        self._idle.put_nowait(worker)
        if not job.cancelled():
            job.exception()  # its client may have left, and nothing else asks for it


def _unavailable(message: str, code: str) -> RequestError:
    return RequestError(503, message, code=code, headers={"retry-after": "10"})
