"""Notices that an engine with work has fallen silent."""

import asyncio
import time
from collections.abc import Callable

STANDSTILL = 1.0  # seconds that a timer may be late by


class Watchdog:
    """Barks once, when there is work and nothing has been heard for `limit` seconds. Until then it wakes up once in a
    limit, however much is heard."""

    def __init__(self, limit: float, *, working: Callable[[], bool], bark: Callable[[], None]) -> None:
        self.limit = limit
        self._working = working
        self._bark = bark
        self._heard = 0.0
        self._due = 0.0  # when it meant to look again
        self._timer: asyncio.Handle | None = None

    def start(self) -> None:
        self.hear()
        self._due = self._heard
        self._look()

    def hear(self) -> None:
        """A word, or the first work after a time without any: silence is counted from here."""
        self._heard = time.monotonic()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # region look
    def _look(self) -> None:
        now = time.monotonic()
        if now - self._due > STANDSTILL:
            # This process stood still itself: what was said meanwhile is yet to be heard.
            self._heard = now
        # region exercise 6.6
        silence = now - self._heard
        if self._working() and silence >= self.limit:
            self._bark()
            return
        wait = self.limit - silence if self._working() else self.limit
        # endregion
        self._due = now + wait
        self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    # endregion
