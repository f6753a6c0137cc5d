"""Tells systemd, or whatever else has set NOTIFY_SOCKET, how the service stands: sd_notify in a few lines.

The protocol is a datagram of ``NAME=value`` lines to a Unix socket; sd_notify(3) lists the names.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping


class ServiceManager:
    """The receiver of notices about this service. Without NOTIFY_SOCKET there is none, and all notices go nowhere."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take the variables of the protocol out of *environment*, so that no child process takes them for its own."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period_us = environment.pop("WATCHDOG_USEC", "")
        process = environment.pop("WATCHDOG_PID", "")
        if address.startswith("@"):  # a name in the abstract namespace
            address = "\0" + address[1:]
        self._address = address
        is_watched = address and period_us.isdecimal() and process in ("", str(os.getpid()))
        #: Seconds between two calls of ``watchdog``: half of the time after which systemd takes this process for hung.
        #: None if nobody asks for them.
        self.watchdog_s = int(period_us) / 2_000_000 if is_watched else None

    def ready(self, status: str) -> None:
        """Tell that the service serves, or that it has done with reloading."""
        self._notify("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Tell that the service reads its settings again; ``ready`` follows."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        """Tell that the service stops."""
        self._notify("STOPPING=1")

    def status(self, text: str) -> None:
        """Tell, in one line for people, what the service does."""
        self._notify(f"STATUS={text}")

    def watchdog(self) -> None:
        """Tell that the service is alive."""
        self._notify("WATCHDOG=1")

    def _notify(self, *lines: str) -> None:
        """Send one datagram. An error is ignored: a broker serves also when nobody hears of it."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass
