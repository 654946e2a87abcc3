"""GrammarServer: a process that has the vocabulary, and forks a child for each connection, which takes milliseconds."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection

from phase0_request.support import entry
from phase0_request.tokenizer import Tokenizer
from phase6_integration.extras.structured.client_grammars import ClientGrammars
from phase6_integration.extras.structured.grammar_process import Child, serve

# Threads of libraries do not survive a fork. The arenas of malloc, 64 MB of addresses for each thread, would count as
# memory that a child has taken.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class GrammarServer:
    """The server as the engine sees it. It is started by the first connection, and again if it has ended."""

    def __init__(self, directory: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`directory` has the tokenizer."""
        self._setup = directory, vocab_size, sorted(eos_ids)
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.has_answered = False  # a child of it, since it was started

    def connect(self) -> socket.socket:
        """Have a child forked, and connect to it: its end is closed if there is none. OSError if no process can be
        started."""
        _, control = self._running = self._running or self._start()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [b"\0"], [theirs.fileno()])
            except ConnectionError:  # it has ended: the next connection starts another
                self.close()
        return ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        self.has_answered = False
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from {__name__} import run; run({theirs.fileno()}, *{self._setup!r})"
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C reaches the owner only
                    env={**entry.environment(), **ENVIRONMENT},
                )
            except OSError:
                ours.close()
                raise
        return process, ours

    def close(self) -> None:
        """End the server. Its children read the end of their connections, or end at their limits."""
        if self._running is not None:
            process, control = self._running
            self._running = None
            control.close()
            process.kill()
            process.wait()


def run(descriptor: int, directory: str, vocab_size: int, eos_ids: Collection[int]) -> None:
    """In the server: fork a child for each socket that arrives, until the engine closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    grammars = ClientGrammars(Tokenizer.from_pretrained(directory), vocab_size, eos_ids)
    assert grammars.vocabulary  # read now, for all children
    control = socket.socket(fileno=descriptor)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            control.close()
            serve(socket.socket(fileno=descriptors[0]), Child(grammars, vocab_size))
            os._exit(0)
        os.close(descriptors[0])
