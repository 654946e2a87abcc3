"""Watchdog: detects an engine that has requests but sends nothing, and an idle one that does not answer."""

import asyncio
import time
from collections.abc import Callable

PAUSE = 1.0  # seconds a timer may be overdue before this process counts as paused


class Watchdog:
    """Calls `on_hang` once: when there is work and no message has arrived for `limit` seconds, or when an idle engine
    has not answered a ping for `idle_limit` seconds. A message only stores the time: the timer fires about once per
    limit, the lower of the two, not once per message."""

    def __init__(
        self,
        limit: float,
        idle_limit: float,
        *,
        has_work: Callable[[], bool],
        ping: Callable[[], None],
        on_hang: Callable[[], None],
    ) -> None:
        self.limit = limit
        self.idle_limit = idle_limit
        self._has_work = has_work
        self._ping = ping
        self._on_hang = on_hang
        self._pinged = False  # and not answered yet
        self._since = 0.0  # the silence counts from here
        self._due = 0.0  # when the timer should fire
        self._timer: asyncio.Handle | None = None

    def start(self) -> None:
        self._due = self._since = time.monotonic()
        self._check()

    def heard(self) -> None:
        """A message has arrived."""
        self._pinged, self._since = False, time.monotonic()

    def work_begins(self) -> None:
        """The first request after an idle time: count the silence from now. An engine that owes an answer stays due."""
        if not self._pinged:
            self._since = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last message, or since one was due."""
        return time.monotonic() - self._since

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # region exercise 6.6
    def _check(self) -> None:
        """Ping an idle engine, report one that has been silent for too long, or set the timer for the next check."""
        now = time.monotonic()
        if now - self._due > PAUSE:
            # This process was paused: messages of that time are still unread in the socket.
            self._since = now
        if not self._has_work() and not self._pinged:
            self._pinged, self._since = True, now
            self._ping()
        limit = self.idle_limit if self._pinged else self.limit
        silence = now - self._since
        if silence >= limit:
            self._on_hang()
            return
        wait = min(limit - silence, self.limit, self.idle_limit)
        self._due = now + wait
        self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    # endregion
