"""Tokenizer processes that are forked from one which has imported what they need: a tenth of the time of a start."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from phase0_request import safe_path
from phase6_integration import tokenizer_process


class Forked:
    """As much of a Popen as a TokenizerProcess needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(self.pid, 0)
                time.sleep(1e-3)


class Nursery:
    """Starts with the first process that is asked for."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._lock = threading.Lock()

    def spawn(self, end: socket.socket) -> Forked:
        """In place of `TokenizerProcess._spawn`."""
        with end, self._lock:
            line = self._line = self._line or self._open()
            socket.send_fds(line, [b"!"], [end.fileno()])
            return Forked(int.from_bytes(line.recv(8)))

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**safe_path.environment(), "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
            )
        return ours

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._process.wait()


def bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Fork a tokenizer process for each end of a line that comes, until there can be no more."""
    import transformers.utils.chat_template_utils  # noqa: F401

    from phase6_integration import grammar_checker  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, bury)
    line = socket.socket(fileno=int(sys.argv[1]))
    while True:
        said, ends, *_ = socket.recv_fds(line, 1, 1)
        if not said:
            return
        if pid := os.fork():
            os.close(ends[0])
            line.send(pid.to_bytes(8))
            continue
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        line.close()
        sys.argv[1] = str(ends[0])
        with contextlib.suppress(EOFError, ConnectionError):
            tokenizer_process.main()
        os._exit(0)


if __name__ == "__main__":
    main()
