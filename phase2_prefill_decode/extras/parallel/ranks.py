"""Ranks: the other processes of a model, as rank 0 sees them. It starts them, and calls methods of their `Worker`s.

A call is pickled and sent over a pair of sockets, the same to all ranks. Tensors travel in collectives. So an idle rank
waits at its socket without a time limit, and the end of a rank is noticed because its socket closes.
"""

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any
from weakref import finalize

from phase0_request.core import EngineFailedError
from phase0_request.support import entry

WORKER = "phase2_prefill_decode.extras.parallel.worker"
LOST = 3  # the exit status of a rank that another one has left alone: that is not what has failed first
PATIENCE = 2.0  # seconds in which the cause of a failed collective shows


class LostError(RuntimeError):
    """A collective has failed: another rank has ended, or did not come in time."""


class RankError(EngineFailedError):
    """A rank has died, hangs or has failed."""


class Ranks:
    """The processes of ranks 1 to size - 1."""

    def __init__(self, size: int) -> None:
        """Start them."""
        self.size = size
        self.runner: Callable[[], object] = lambda: None  # rank 0's, for which they have theirs
        self.in_step = False  # they compute what rank 0 computes
        self._over: str | None = None  # why no step can follow
        self._ends: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.close = finalize(self, end, self._ends, self._processes)  # kills them; may be called again
        for rank in range(1, size):
            ours, theirs = Pipe()
            self._ends.append(ours)
            with theirs:
                self._start(rank, theirs)

    def _start(self, rank: int, theirs: Connection) -> None:
        """Start a process with its end of a socket pair."""
        command = [sys.executable, "-m", WORKER, str(theirs.fileno()), str(os.getpid()), str(rank)]
        self._processes.append(
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=entry.environment())
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a rank has ended; then `check` says how."""
        return [end.fileno() for end in self._ends]

    def tell(self, method: str, *values: object, replies: bool = False) -> None:
        """Call a method on all ranks."""
        message = pickle.dumps((replies, method, values))
        with self.together():
            for end in self._ends:
                end.send_bytes(message)

    def ask(self, method: str, *values: object) -> list[Any]:
        """Call a method on all ranks, and wait for the results. If any rank ends instead, RankError is raised."""
        self.tell(method, *values, replies=True)
        replies: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, end in enumerate(self._ends, 1):
                selector.register(end, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    message = receive(self._ends[key.data - 1])
                    reply = None if message is None else json.loads(message)
                    if message is None or (isinstance(reply, dict) and "error" in reply):
                        raise self._failure(reply and f"rank {key.data} of {self.size} has failed: {reply['error']}")
                    replies[key.data] = reply
                    selector.unregister(key.fileobj)
        return [replies[rank] for rank in sorted(replies)]

    def check(self) -> None:
        """Raise RankError if a rank has ended: a rank that owes no reply is readable."""
        raise self._failure()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A part of a step that all ranks run at once. If it ends early here, the others are in the middle of it,
        and no step can follow."""
        if self._over is not None:
            raise RankError(self._over)
        self.in_step = True
        try:
            yield
        except (LostError, OSError) as error:
            raise self._failure(words=str(error)) from error
        except BaseException as error:
            if self._over is None:
                self._over = f"rank 0 of {self.size} has left a step in the middle: {type(error).__name__}: {error}"
            self.close()
            if isinstance(error, Exception):
                raise RankError(self._over) from error
            raise  # Ctrl-C
        finally:
            self.in_step = False

    def _failure(self, fault: str | None = None, words: str = "its socket is closed") -> RankError:
        """The failure of a rank. If none shows, some rank has not joined a collective. All ranks are ended."""
        deadline = time.monotonic() + PATIENCE
        while (fault := fault or self._fault()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = [f"{rank}" for rank, process in enumerate(self._processes, 1) if process.poll() is None]
        self.close()
        late = f"rank {' and '.join(silent) or 0} of {self.size} did not take part in a step in time"
        self._over = fault or f"{late}: {words.partition(chr(10))[0]}"
        return RankError(self._over)

    def _fault(self) -> str | None:
        """The first rank that has ended, and why; ranks that were only left alone do not count."""
        for rank, (end, process) in enumerate(zip(self._ends, self._processes, strict=False), 1):
            if process.poll() not in (None, LOST):
                return f"rank {rank} of {self.size} {last_words(end) or status(process)}"
        return None


def end(ends: list[Connection], processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.kill()
    for each in ends:
        each.close()
    for process in processes:
        process.wait()


def last_words(end: Connection) -> str | None:
    """What a rank that has ended sent about its failure."""
    while end.poll() and (message := receive(end)) is not None:
        if isinstance(reply := json.loads(message), dict) and "error" in reply:
            return f"has failed: {reply['error']}"
    return None


def status(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"


def receive(end: Connection) -> bytes | None:
    """The next message, on both ends; None if the other end is closed."""
    with suppress(EOFError, OSError):
        return end.recv_bytes()
    return None
