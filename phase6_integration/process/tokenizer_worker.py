"""TokenizerWorker: renders chat templates and encodes text in another process, with limits of time and memory.

A model's template is a program, and its tokenizer.json may describe a normalizer that makes gigabytes of a sentence.
Each can run for ever or fill the memory, inside C code that no exception reaches. So they run in a process that the
kernel ends. A parent loads the tokenizer once and forks a child to do the work; when a limit ends the child, the parent
says so in its place and forks another, which takes milliseconds.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from phase0_request import entry
from phase0_request.params import MAX_TOKENS
from phase0_request.tokenizer import Tokenizer

MEMORY = 1 << 30  # bytes that a job may allocate beyond what the process has loaded
LOADING = 120.0  # seconds to load a tokenizer
GRACE = 10.0  # seconds after its time limit in which a child has been replaced, or something else is wrong
QUIET = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
UNKNOWN = 0  # the number of a job that ended its child

Tokens = list[tuple[int, ...]]
Job = Callable[..., Tokens]  # its first argument is the tokenizer; a ValueError is for the client
Result = Tokens | str | bool  # or what is wrong, for the client; or that the child was ended, and whether for time


class KilledError(RuntimeError):
    """The process was ended: `late`, at the time limit of its job; otherwise mostly for lack of memory."""

    def __init__(self, late: bool) -> None:
        super().__init__("the tokenizer process was ended")
        self.late = late


class TokenizerWorker:
    """The process as the server sees it: one job at a time. It is started by the first job, and again if it was
    ended."""

    def __init__(self, directory: str, chat_template: str | None) -> None:
        self._setup = directory, chat_template
        self._thread = ThreadPoolExecutor(1, "tokenizer")  # waits for the process
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._jobs = 0  # so far

    async def run(self, seconds: float, job: Job, *arguments: Any) -> Tokens:
        """The result of a job. OSError if no process can be started."""
        return await asyncio.wrap_future(self.submit(seconds, job, *arguments))

    def submit(self, seconds: float, job: Job, *arguments: Any) -> "Future[Tokens]":
        """Start a job, and the process if there is none."""
        return self._thread.submit(self._run, seconds, job, arguments)

    def _run(self, seconds: float, job: Job, arguments: Sequence[Any]) -> Tokens:
        connection = self._running[1] if self._running is not None else self._start()
        self._jobs += 1
        try:
            connection.send((self._jobs, seconds, job, arguments))
            number, result = _received(connection, seconds + GRACE)
            while number not in (self._jobs, UNKNOWN):  # of a job whose child was thought to have ended
                number, result = _received(connection, seconds + GRACE)
        except (OSError, EOFError):
            self.close()
            raise KilledError(late=False) from None
        if isinstance(result, bool):
            raise KilledError(late=result)
        if isinstance(result, str):
            raise ValueError(result)
        return result

    def _start(self) -> Connection:
        """Start the parent, and wait until it has loaded the tokenizer."""
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a message is not read, or not sent whole
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(GRACE), 0))
        connection = Connection(ours.detach())
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C reaches the server only
                    env={**entry.environment(), **QUIET},
                )
            self._running = process, connection
            threading.Thread(target=process.wait, daemon=True).start()  # killed, it is no zombie
            connection.send(self._setup)
            _received(connection, LOADING)
        except (OSError, EOFError) as error:
            self.close()
            connection.close()
            raise OSError(f"{type(error).__name__}: {error}") from error
        return connection

    def close(self) -> None:
        """End the process. The child reads the end of the connection, or ends at its time limit."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()


def _received(connection: Connection, seconds: float) -> tuple[int, Result]:
    if not connection.poll(seconds):
        raise EOFError(f"no answer within {seconds:g} s")
    answer: tuple[int, Result] = connection.recv()
    return answer


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
    """The child's loop, until the server closes the connection. What a job raises ends the child."""
    limit_memory(MEMORY)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, *limited = connection.recv()
            connection.send((number, _limited(tokenizer, *limited)))


def limit_memory(more: int) -> None:
    """Limit the address space to what is mapped now and `more` bytes, where the system can; no core is dumped."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has neither the file nor the limit
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))


def main() -> None:
    """Load the tokenizer, then keep a child alive until the server closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the server has gone
        tokenizer = Tokenizer.from_pretrained(*connection.recv())
        if tokenizer.chat_template is not None:
            import transformers.utils.chat_template_utils  # noqa: F401  # once, instead of in every child
        connection.send((UNKNOWN, []))
        while (status := _forked(connection, tokenizer)) != 0:
            connection.send((UNKNOWN, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM))


def _forked(connection: Connection, tokenizer: Tokenizer) -> int:
    """Have a child do the work until it ends. Returns its status."""
    child = os.fork()
    if child == 0:
        try:
            _serve(connection, tokenizer)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
