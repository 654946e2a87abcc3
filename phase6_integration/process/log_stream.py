"""LogStream: a stderr with writes that never block.

stderr is often a pipe. If its reader stalls, the pipe fills up and the next write blocks for ever: an event loop, an
engine or a shutdown with it. Here a thread does the writing, from a buffer of limited size. What does not fit is
dropped and counted.
"""

import atexit
import contextlib
import io
import os
import threading
import time
from collections.abc import Callable

CAPACITY = 1 << 20  # characters
RETRY = 0.01  # seconds until the next write to a full pipe that does not block
DRAIN_TIMEOUT = 1.0  # seconds that the end of the process may wait for what is not written yet


class LogStream(io.TextIOBase):
    """Replaces sys.stderr. `on_dropped` is called with the number of lines that were dropped once writing goes on."""

    def __init__(self, descriptor: int, on_dropped: Callable[[int], object] | None = None) -> None:
        self.dropped = 0  # lines
        self._descriptor = descriptor
        self._on_dropped = on_dropped
        self._changed = threading.Condition()
        self._pending: list[str] = []
        self._size = 0  # characters that are not written yet
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.drain)

    def write(self, text: str) -> int:
        with self._changed:
            if self._size + len(text) > CAPACITY:
                self.dropped += max(text.count("\n"), 1)
            elif text:
                self._pending.append(text)
                self._size += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout: float = DRAIN_TIMEOUT) -> bool:
        """Wait until all text is written. False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._size, timeout)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _run(self) -> None:
        reported = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                text, self._pending = "".join(self._pending), []
            self._write(text.encode("utf-8", "backslashreplace"))
            with self._changed:
                self._size -= len(text)
                dropped = self.dropped - reported
                self._changed.notify_all()
            if dropped and self._on_dropped is not None:
                reported += dropped
                self._on_dropped(dropped)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nothing reads it any more
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # the process at its other end has made it non-blocking
                    time.sleep(RETRY)
