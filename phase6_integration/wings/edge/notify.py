"""Notifier: tells systemd the state of this service (sd_notify), over the datagram socket that NOTIFY_SOCKET names."""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping

PATIENCE = 1.0  # seconds that systemd may leave its queue full, before a message is lost
logger = logging.getLogger("nanoserve")


class Notifier:
    """Sends READY=1, STOPPING=1 and the like. Without NOTIFY_SOCKET it does nothing."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Removes the variables, so that the engine process does not speak for this one."""
        address = environment.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address  # abstract, or a path
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        ours = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        self._interval = int(microseconds) / 2e6 if ours else None  # seconds: twice in each period

    def send(self, state: str) -> None:
        if self._address:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                    end.settimeout(PATIENCE)
                    end.sendto(state.encode(), self._address)
            except OSError as error:
                logger.warning("systemd was not notified of %s: %s", state, error)

    async def beat(self) -> None:
        """Send WATCHDOG=1 as often as systemd asks for it, until cancelled: this event loop runs."""
        while self._interval:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self._interval)
