"""ForkServer: a process that loads something once and forks a child for each connection, which takes milliseconds.

What a client sends may take hours or gigabytes inside C code that no exception reaches: a grammar is a program, and so
is a chat template. It runs in a child with limits, and the kernel ends the child. The next one begins with what the
server has loaded.
"""

import contextlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from phase0_request import entry

# Threads of libraries do not survive a fork. The arenas of malloc, 64 MB of addresses for each thread, would count as
# memory that a child has taken.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class ForkServer:
    """The server as its owner sees it. It is started by the first connection, and again if it has ended."""

    def __init__(self, load: str, *setup: Any) -> None:
        """The server calls the function `load`, given as `module:name`, with `setup`. It returns what a child does with
        its connection."""
        self._load, self._setup = load, pickle.dumps(setup)
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a server, which has not closed its end."""
        if self._running is None:
            return False
        closed = select.poll()
        closed.register(self._running[1], select.POLLIN)
        return not closed.poll(0)

    def connect(self) -> socket.socket:
        """Have a child forked, and connect to it: its end closes if there is none. OSError if no process can be
        started."""
        if not self.is_running:
            self.close()
        _, control = self._running = self._running or self._start()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # it ends at this moment: the next connection starts another
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        return ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        code = f"from {__name__} import run; run({self._load!r}, {theirs.fileno()})"
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                process_group=0,  # so that Ctrl-C reaches the owner only
                env={**entry.environment(), **ENVIRONMENT},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        threading.Thread(target=process.wait, daemon=True).start()  # killed, it is no zombie
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError), process.stdin:  # it has ended already
            process.stdin.write(self._setup)
        return process, ours

    def close(self) -> None:
        """End the server. Its children read the end of their connections, or end at their limits."""
        if self._running is not None:
            process, control = self._running
            self._running = None
            control.close()
            process.kill()
            process.wait()


# In the server.


def run(load: str, descriptor: int) -> None:
    """Fork a child for each socket that arrives, until the owner closes the connection. What a child raises ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    serve: Callable[[socket.socket], None] = resolve_name(load)(*pickle.load(sys.stdin.buffer))
    control = socket.socket(fileno=descriptor)
    while descriptors := _received(control):
        if os.fork() == 0:
            control.close()
            status = 1
            try:
                with contextlib.suppress(ConnectionError):  # the owner has gone
                    serve(socket.socket(fileno=descriptors[0]))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(descriptors[0])


def _received(control: socket.socket) -> list[int]:
    with contextlib.suppress(ConnectionError):  # the owner has gone
        return socket.recv_fds(control, 1, 1)[1]
    return []


def limit_memory(more: int) -> None:
    """Limit the address space to what is mapped now and `more` bytes, where the system can; no core is dumped."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has neither the file nor the limit
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))
