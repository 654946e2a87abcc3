"""TokenizerProcess: renders chat templates and encodes text in another process, with limits of time and memory.

A model's template is a program, and its tokenizer.json may describe a normalizer that makes gigabytes of a sentence.
Each can run for ever or fill the memory, inside C code that no exception reaches. So they run in a process that the
kernel ends. A parent loads the tokenizer once and forks a child to do the work; when a limit
ends the child, the parent reports that in its place and forks another, which takes milliseconds.
"""

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
from pathlib import Path
from typing import TypeVar

import msgspec
from jinja2 import TemplateError

from phase0_request import safe_path
from phase0_request.params import MAX_TOKENS
from phase0_request.tokenizer import Tokenizer

MEMORY = 1 << 30  # bytes that a child may allocate beyond what its parent has loaded
LOADING = 120.0  # seconds to load a tokenizer
GRACE = 10.0  # seconds after its time limit in which a child has been replaced, or something else is wrong
HEADER = struct.Struct(">QQ")  # before each message: the number of its job, and its length
UNKNOWN = 0  # the number of a job that ended its child


class Setup(msgspec.Struct, frozen=True):
    """To the parent, first. Its answer is an empty Tokens."""

    directory: str
    chat_template: str | None


class Encode(msgspec.Struct, tag=True):
    """Encode texts."""

    texts: list[str]
    add_special_tokens: bool
    seconds: float


class EncodeChat(msgspec.Struct, tag=True):
    """Render and encode a conversation."""

    conversation: bytes  # arguments of Tokenizer.chat as JSON, which has integers of any size
    max_chars: int  # of the rendered text
    seconds: float
    add_special_tokens: bool = False  # around the rendered text


class Tokens(msgspec.Struct, tag=True):
    """The token ids of each text."""

    ids: list[list[int]]


class Refused(msgspec.Struct, tag=True):
    """There are no token ids. `why` is for the client."""

    why: str


class Killed(msgspec.Struct, tag=True):
    """The child was ended, at its time limit or mostly for lack of memory."""

    late: bool = False


Job = Encode | EncodeChat
Result = Tokens | Refused | Killed
T = TypeVar("T")
_setup: "msgspec.msgpack.Decoder[Setup]" = msgspec.msgpack.Decoder(Setup)
_job: "msgspec.msgpack.Decoder[Job]" = msgspec.msgpack.Decoder(Job)
_result: "msgspec.msgpack.Decoder[Result]" = msgspec.msgpack.Decoder(Result)


class NotStartedError(RuntimeError):
    """The tokenizer process could not be started: no fault of the job."""


class TokenizerProcess:
    """The process as the server sees it. It is started by the first job, and again if it dies. For one thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._jobs = 0  # so far

    def run(self, job: Job) -> Result:
        """The result of a job. Blocks until then. NotStartedError if there is no process and none can be started."""
        connection = self._start() if self._running is None else self._running[1]
        try:
            connection.settimeout(job.seconds + GRACE)
            self._jobs += 1
            _send(connection, self._jobs, job)
            while True:
                number, result = _receive(connection, _result)
                if number in (self._jobs, UNKNOWN):  # not of a job that was given up
                    return result
        except (OSError, EOFError):  # TimeoutError is an OSError
            self.close()
            return Killed()

    def _start(self) -> socket.socket:
        try:
            return self._connect()
        except (OSError, EOFError, RuntimeError, MemoryError) as error:
            self.close()
            raise NotStartedError(f"{type(error).__name__}: {error}") from error

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            self._running = self._spawn(theirs), ours
        except BaseException:
            ours.close()
            raise
        self._reaper = threading.Thread(target=self._running[0].wait, daemon=True)  # killed, it is no zombie
        self._reaper.start()
        ours.settimeout(LOADING)
        _send(ours, UNKNOWN, self._setup)
        _receive(ours, _result)
        return ours

    def _spawn(self, end: socket.socket) -> "subprocess.Popen[bytes]":
        """Start the process with its end of the socket pair."""
        with end:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(end.fileno())],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # so that Ctrl-C reaches the server only
                env={**safe_path.environment(), "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """End the process. The child reads the end of the connection, or ends at its time limit."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()


def _send(connection: socket.socket, number: int, message: Setup | Job | Result) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(HEADER.pack(number, len(body)) + body)


def _receive(connection: socket.socket, decoder: "msgspec.msgpack.Decoder[T]") -> tuple[int, T]:
    """The number of a job and a message about it. EOFError at the end of the connection."""
    number, size = HEADER.unpack(_exactly(connection, HEADER.size))
    return number, decoder.decode(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# In the other process.


def compute(job: Job, tokenizer: Tokenizer) -> Result:
    try:
        if isinstance(job, EncodeChat):
            tokens = tokenizer.chat(**json.loads(job.conversation), max_chars=job.max_chars)
            ids = [tokenizer.wrap(tokens) if job.add_special_tokens else tokens]
        else:
            ids = [tokenizer.encode(text, job.add_special_tokens) for text in job.texts]
    except MemoryError:
        return Killed()
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, Exception) and not isinstance(cause, TemplateError):  # not in the template's own words
            return Killed() if isinstance(cause, MemoryError) else Refused("the chat template refused these messages")
        return Refused(str(error)[:300])
    if sum(map(len, ids)) > MAX_TOKENS:
        return Refused(f"these are more than {MAX_TOKENS} tokens")
    return Tokens(ids)


def serve(connection: socket.socket, tokenizer: Tokenizer) -> None:
    """The child's loop, until the server closes the connection. The kernel's alarm ends the child in a job that takes
    too long."""
    limit_memory(MEMORY)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, job = _receive(connection, _job)
            signal.setitimer(signal.ITIMER_REAL, job.seconds)
            result = compute(job, tokenizer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, number, result)


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
    connection = socket.socket(fileno=int(sys.argv[1]))
    _, setup = _receive(connection, _setup)
    tokenizer = Tokenizer.from_pretrained(setup.directory, setup.chat_template)
    if tokenizer.chat_template is not None:
        import transformers.utils.chat_template_utils  # noqa: F401  # once, instead of in every child
    _send(connection, UNKNOWN, Tokens([]))
    while True:
        child = os.fork()
        if child == 0:
            try:
                serve(connection, tokenizer)
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        _send(connection, UNKNOWN, Killed(late=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # the server has gone
        main()
