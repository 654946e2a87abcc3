"""TokenizerPool: the model's tokenizer for routes. Nothing that a model's files define runs on the event loop."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import TypeVar

from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.errors import RequestError, conflict
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.tokenizer_process import (
    Encode,
    EncodeChat,
    Job,
    Killed,
    NotStartedError,
    Refused,
    Result,
    Setup,
    TokenizerProcess,
    Tokens,
)

logger = logging.getLogger("nanoserve")
LONG = 10_000  # tokens; to decode fewer takes a few milliseconds and is done on the event loop
PROCESSES = 2  # so that a text that takes its whole time limit delays no other
SLOWEST = 100_000  # characters a second that a tokenizer encodes at the very least
T = TypeVar("T")


class Processes:
    """Tokenizer processes, and a thread for each that waits for it. The second one starts when the first is busy. When
    both are, the clients that have jobs waiting take turns."""

    def __init__(self, setup: Setup) -> None:
        self._threads = ThreadPoolExecutor(PROCESSES, "tokenizers")
        self._free: LifoQueue[TokenizerProcess] = LifoQueue()
        for _ in range(PROCESSES):
            self._free.put(TokenizerProcess(setup))
        self._idle = PROCESSES
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self.unfinished = Counter[str]()  # jobs, by tenant

    def start(self) -> None:
        self._threads.submit(self._run, Encode([], False, 1.0))

    async def run(self, job: Job, tenant: str) -> Result:
        self.unfinished[tenant] += 1
        try:
            await self._turn(tenant)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)
            finally:
                self._pass_on()
        finally:
            self.unfinished -= Counter((tenant,))  # drops those with none

    async def attempt(self, job: Job, tenant: str, max_waiting: int) -> Result:
        """Run a job. A RequestError if too many of the client wait, or if there is no process."""
        if self.unfinished[tenant] >= max_waiting:
            message = "too many texts wait for the tokenizer; try again later"
            raise RequestError(503, message, code="tokenizer_busy", headers={"retry-after": "10"})
        try:
            return await self.run(job, tenant)
        except NotStartedError as error:
            logger.error("the tokenizer process cannot be started: %s", error)
            message = "the tokenizer cannot be started now; try again later"
            raise RequestError(503, message, code="tokenizer_unavailable", headers={"retry-after": "10"}) from None

    async def _turn(self, tenant: str) -> None:
        if self._idle:
            self._idle -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had its turn already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the process to the next job of the next tenant, which then is the last."""
        while self._turns:
            tenant, turns = next(iter(self._turns.items()))
            del self._turns[tenant]
            turn = turns.popleft()
            if turns:
                self._turns[tenant] = turns
            if not turn.done():
                return turn.set_result(None)
        self._idle += 1
        return None

    def _run(self, job: Job) -> Result:
        process = self._free.get()
        try:
            return process.run(job)
        finally:
            self._free.put(process)


class TokenizerPool:
    """The engine's tokenizer for routes. It encodes in processes with limits of time and memory, and decodes here."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._tokenizer = engine.tokenizer
        self._seconds = settings.template_timeout
        self._max_waiting = engine.options.queued_per_client
        self._template = settings.chat_template
        if self._template is None and engine.tokenizer is not None:
            self._template = engine.tokenizer.chat_template
        longest = 0 if engine.tokenizer is None else engine.tokenizer.longest
        self._max_chars = max(settings.max_body_bytes, engine.max_model_len * longest)  # of a rendered conversation
        setup = Setup(engine.options.tokenizer or engine.options.model, self._template)
        self._processes = Processes(setup) if engine.tokenizer else None

    def start(self) -> None:
        """Start the first tokenizer process now, since that takes a second."""
        if self._processes is not None:
            self._processes.start()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise conflict(None, "this model has no tokenizer; send token ids, to /v1/completions", "no_tokenizer")
        return self._tokenizer

    async def run(self, call: Callable[[], T], size: int) -> T:
        """The result of `call`, which runs in a thread unless its input is short."""
        return call() if size < LONG else await asyncio.to_thread(call)

    async def encode(self, texts: Sequence[str], tenant: str, add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """The tokens of each text."""
        seconds = self._seconds + sum(map(len, texts)) / SLOWEST
        job = Encode(list(texts), add_special_tokens, seconds)
        return await self._tokens(job, tenant, "prompt", "the tokenizer")

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        tokenizer = self.tokenizer
        return await self.run(lambda: tokenizer.decode(tokens, skip_special_tokens), len(tokens))

    @property
    def template(self) -> str:
        """The chat template."""
        if self._template is None:
            raise conflict("messages", "this model has no chat template; send a prompt to /v1/completions")
        return self._template

    async def chat(self, conversation: bytes, tenant: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The tokens of a conversation, rendered by the model's chat template."""
        assert self.template
        seconds = self._seconds + len(conversation) / SLOWEST
        job = EncodeChat(conversation, self._max_chars, seconds, add_special_tokens)
        (tokens,) = await self._tokens(job, tenant, "messages", "the chat template")
        return tokens

    async def _tokens(self, job: Job, tenant: str, param: str, program: str) -> list[tuple[int, ...]]:
        """The tokens of a job. `param` and `program` are what a client is to look at if there are none."""
        assert self.tokenizer is not None
        assert self._processes is not None
        match await self._processes.attempt(job, tenant, self._max_waiting):
            case Tokens(ids=ids):
                return list(map(tuple, ids))
            case Refused(why=why):
                raise conflict(param, f"{param}: {why}")
            case Killed(late=True):
                raise conflict(param, f"{param}: {program} took longer than {job.seconds:.2g} seconds")
            case Killed():
                raise conflict(param, f"{param}: {program} failed, or needed more memory than it may use")
