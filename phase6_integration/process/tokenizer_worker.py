"""TokenizerWorker: renders chat templates and encodes text in another process, with limits of time and memory.

A model's template is a program, and its tokenizer.json may describe a normalizer that makes gigabytes of a sentence.
Each can run for ever or fill the memory, inside C code that no exception reaches. So they run in a child of a fork
server that has the tokenizer. When a limit has ended the child, the next job gets another.
"""

import asyncio
import contextlib
import json
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError

from phase0_request.params import MAX_TOKENS
from phase0_request.tokenizer import Tokenizer
from phase6_integration.process.fork_server import ForkServer, limit_memory

MEMORY = 1 << 30  # bytes that a job may allocate beyond what the process has loaded
LOADING = 120.0  # seconds to load a tokenizer
GRACE = 10.0  # seconds after its time limit in which a job has ended, or something else is wrong

Tokens = list[tuple[int, ...]]
Job = Callable[..., Tokens]  # its first argument is the tokenizer; a ValueError is for the client
Result = Tokens | str  # or what is wrong, for the client


class KilledError(RuntimeError):
    """The process was ended: `late`, at the time limit of its job; otherwise mostly for lack of memory."""

    def __init__(self, late: bool) -> None:
        super().__init__("the tokenizer process was ended")
        self.late = late


class TokenizerWorker:
    """A process as the server sees it: one job at a time. It is started by the first job, and again if it was ended."""

    def __init__(self, directory: str, chat_template: str | None) -> None:
        self.server = ForkServer(f"{__name__}:load", directory, chat_template)
        self._thread = ThreadPoolExecutor(1, "tokenizer")  # waits for the process
        self._connection: Connection | None = None

    async def run(self, seconds: float, job: Job, *arguments: Any) -> Tokens:
        """The result of a job. OSError if no process can be started."""
        return await asyncio.wrap_future(self.submit(seconds, job, *arguments))

    def submit(self, seconds: float, job: Job, *arguments: Any) -> "Future[Tokens]":
        """Start a job, and the process if there is none."""
        return self._thread.submit(self._run, seconds, job, arguments)

    def _run(self, seconds: float, job: Job, arguments: Sequence[Any]) -> Tokens:
        if self._connection is not None and self._connection.poll():  # it has ended meanwhile
            self._disconnect()
        connection, begun = self._connection or self._started(), time.monotonic()
        try:
            connection.send((seconds, job, arguments))
            result: Result = _received(connection, seconds + GRACE)
        except (OSError, EOFError):
            self._disconnect()
            raise KilledError(late=time.monotonic() - begun >= seconds) from None
        if isinstance(result, str):
            raise ValueError(result)
        return result

    def _started(self) -> Connection:
        """Start a process. A server that is about to end may take the connection: then another is started."""
        was_running = self.server.is_running
        try:
            return self._start()
        except OSError:
            if not was_running:
                raise
            return self._start()

    def _start(self) -> Connection:
        """Start a process, and wait until it has the tokenizer."""
        ours = self.server.connect()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a message is not read, or not sent whole
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(GRACE), 0))
        self._connection = Connection(ours.detach())
        try:
            _received(self._connection, LOADING)
        except (OSError, EOFError) as error:
            self.close()
            raise OSError(f"{type(error).__name__}: {error}") from error
        return self._connection

    def _disconnect(self) -> None:
        """The child reads the end of the connection, or ends at its time limit."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End the processes."""
        self._disconnect()
        self.server.close()


def _received(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise EOFError(f"no answer within {seconds:g} s")
    return connection.recv()


# In the other process.


def encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> Tokens:
    """The tokens of each text."""
    return [tuple(tokenizer.encode(text, add_special_tokens)) for text in texts]


def encode_chat(tokenizer: Tokenizer, conversation: bytes, max_chars: int, add_special_tokens: bool) -> Tokens:
    """The tokens of a conversation, given as the arguments of Tokenizer.chat in JSON. The rendered text has at most
    `max_chars` characters; special tokens are added around it."""
    try:
        tokens = tokenizer.chat(**json.loads(conversation), max_chars=max_chars)
    except ValueError as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from None
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, TemplateError):
            raise ValueError("the chat template refused these messages") from None  # not in the template's own words
        raise
    return [tuple(tokenizer.wrap(tokens) if add_special_tokens else tokens)]


def _limited(tokenizer: Tokenizer, seconds: float, job: Job, arguments: Sequence[Any]) -> Result:
    """Do a job. The kernel's alarm ends the process if that takes too long."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        tokens = job(tokenizer, *arguments)
    except ValueError as error:
        return str(error)[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if sum(map(len, tokens)) > MAX_TOKENS:
        return f"these are more than {MAX_TOKENS} tokens"
    return tokens


def _serve(connection: Connection, tokenizer: Tokenizer) -> None:
    """The child's loop, until the server closes the connection. What else a job raises ends the child."""
    limit_memory(MEMORY)
    with contextlib.suppress(EOFError, MemoryError):
        connection.send("begun")
        while True:
            connection.send(_limited(tokenizer, *connection.recv()))


def load(directory: str, chat_template: str | None) -> Callable[[socket.socket], None]:
    """Load the tokenizer in the fork server. Returns what a child does."""
    tokenizer = Tokenizer.from_pretrained(directory, chat_template)
    if tokenizer.chat_template is not None:
        import transformers.utils.chat_template_utils  # noqa: F401  # once, instead of in every child
    return lambda connection: _serve(Connection(connection.detach()), tokenizer)
