"""TokenizerWorker: renders chat templates and encodes text in another process, with limits of time and memory.

A model's template is a program, and its tokenizer.json may describe a normalizer that makes gigabytes of a sentence.
Each can run for ever or fill the memory, inside C code that no exception reaches. So they run in a process that the
kernel ends. Its successor is forked from one that has imported what both need, which takes milliseconds.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jinja2 import TemplateError

from phase0_request import safe_path
from phase0_request.params import MAX_TOKENS
from phase0_request.tokenizer import Tokenizer

MEMORY = 1 << 30  # bytes that a job may allocate beyond what the process has loaded
IMPORTED = ["phase0_request.tokenizer", "transformers.utils.chat_template_utils"]
QUIET = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:resource_tracker"}

Tokens = list[tuple[int, ...]]
Job = Callable[..., Tokens]  # its first argument is the tokenizer; a ValueError is for the client
T = TypeVar("T")
_starting = threading.Lock()
_tokenizer: Tokenizer  # in the other process


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
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, seconds: float, job: Job, *arguments: Any) -> Tokens:
        """The result of a job. OSError if no process can be started."""
        begin = time.monotonic()
        try:
            return await asyncio.wrap_future(self.submit(seconds, job, *arguments))
        except (BrokenProcessPool, MemoryError):
            self.close()
            raise KilledError(late=time.monotonic() - begin >= seconds) from None
        except OSError:
            self.close()
            raise

    def submit(self, seconds: float, job: Job, *arguments: Any) -> "Future[Tokens]":
        """Start a job, and the process if there is none."""
        if self._pool is None:
            self._pool = _start(self._setup)
        return self._pool.submit(_limited, seconds, job, arguments)

    def close(self) -> None:
        """End the process once its job has ended."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _start(setup: tuple[str, str | None]) -> ProcessPoolExecutor:
    """Start a process. It imports from where this one does, and does not run this program's main module again."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    silent = {"PYTHONWARNINGS": "ignore"}  # the tracker of multiprocessing cleans up after a server that is at its end
    environment, main = {**safe_path.environment(), **QUIET, **silent}, {"__main__": ModuleType("__main__")}
    with _starting, _replaced(os.environ, environment), _replaced(sys.modules, main):
        pool = ProcessPoolExecutor(1, context, _load, setup)
        pool.submit(os.getpid)
    return pool


@contextlib.contextmanager
def _replaced(mapping: MutableMapping[str, T], values: Mapping[str, T]) -> Iterator[None]:
    """Change these values during the body."""
    before = {name: mapping[name] for name in values if name in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for name in values:
            del mapping[name]
        mapping.update(before)


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


def _limited(seconds: float, job: Job, arguments: Sequence[Any]) -> Tokens:
    """Do a job. The kernel's alarm ends the process if that takes too long."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        tokens = job(_tokenizer, *arguments)
    except ValueError as error:
        raise ValueError(str(error)[:300]) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if sum(map(len, tokens)) > MAX_TOKENS:
        raise ValueError(f"these are more than {MAX_TOKENS} tokens")
    return tokens


def _load(directory: str, chat_template: str | None) -> None:
    """Load the tokenizer, then limit the memory. The process ends with the server, and ignores its signals."""
    global _tokenizer
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(QUIET)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    _tokenizer = Tokenizer.from_pretrained(directory, chat_template)
    limit_memory(MEMORY)


def _end_with_the_server() -> None:
    server = parent_process()
    assert server is not None
    server.join()
    os._exit(0)


def limit_memory(more: int) -> None:
    """Limit the address space to what is mapped now and `more` bytes, where the system can; no core is dumped."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has neither the file nor the limit
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))
