"""Watchdog: detects an engine that has requests but sends nothing."""

import asyncio
import time
from collections.abc import Callable

PAUSE = 1.0  # seconds a timer may be late before this process itself counts as paused


class Watchdog:
    """Calls `on_hang` once, when there is work and no message has arrived for `limit` seconds. A message only stores
    the time: the timer fires about once per limit, not once per message."""

    def __init__(self, limit: float, *, has_work: Callable[[], bool], on_hang: Callable[[], None]) -> None:
        self.limit = limit
        self._has_work = has_work
        self._on_hang = on_hang
        self._last_message = 0.0
        self._due = 0.0  # when the timer should fire
        self._timer: asyncio.Handle | None = None

    def start(self) -> None:
        self.reset()
        self._due = self._last_message
        self._check()

    def reset(self) -> None:
        """A message has arrived, or the first request after an idle time: count the silence from now."""
        self._last_message = time.monotonic()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # region check
    def _check(self) -> None:
        now = time.monotonic()
        if now - self._due > PAUSE:
            # This process was paused itself: messages of that time are still unread in the socket.
            self._last_message = now
        # region exercise 6.6
        silence = now - self._last_message
        if self._has_work() and silence >= self.limit:
            self._on_hang()
            return
        wait = self.limit - silence if self._has_work() else self.limit
        # endregion
        self._due = now + wait
        self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    # endregion
