"""Look-ups of hosts in threads, at most one for each host at a time.

A name server that hangs holds a thread for as long as the system tries, often for ever, and clients try again all the
time. So a try joins the look-up of its host that still runs, of whichever client of the process that is.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from qmq.net.client.address import Address
from qmq.net.client.dial import look_up

#: Threads for look-ups of a process: so many hosts may hang before no other can be looked up.
MOST_LOOK_UPS: Final = 64

Addresses = Sequence[tuple[Any, ...]]
Host = tuple[str, int]


class LookUps:
    """The look-ups of a process that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # What to call with the result, for each host.
        self._running: dict[Host, list[Callable[[Addresses | BaseException], None]]] = {}

    async def of(self, address: Address) -> Addresses:
        """Return what the system knows of the host. Raises OSError, also where too many look-ups hang, and RuntimeError
        if the system has no more threads.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Addresses] = loop.create_future()

        def settle(result: Addresses | BaseException) -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        def came(result: Addresses | BaseException) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result)

        self._join((address.host, address.port), came, address)
        try:
            return await future
        finally:
            self._leave((address.host, address.port), came)

    def _join(self, host: Host, came: Callable[[Addresses | BaseException], None], address: Address) -> None:
        with self._lock:
            waiting = self._running.get(host)
            if waiting is not None:
                waiting.append(came)
                return
            if len(self._running) >= MOST_LOOK_UPS:
                raise OSError(f"the look-ups of {MOST_LOOK_UPS} other hosts hang; check the name servers")
            self._running[host] = [came]
            try:
                # The end of the program does not wait for a name server.
                threading.Thread(target=self._work, args=(host, address), name="qmq-look-up", daemon=True).start()
            except BaseException:
                del self._running[host]
                raise

    def _leave(self, host: Host, came: Callable[[Addresses | BaseException], None]) -> None:
        """Call *came* no more, as nobody waits: a look-up that hangs must not keep each try."""
        with self._lock, suppress(ValueError):
            self._running.get(host, []).remove(came)

    def _work(self, host: Host, address: Address) -> None:
        result: Addresses | BaseException
        try:
            result = look_up(address)
        except BaseException as error:
            result = error
        with self._lock:
            waiting = self._running.pop(host, [])
        for came in waiting:
            came(result)

    def forget(self) -> None:
        """[in the child of a fork] Forget the look-ups: their threads are the parent's."""
        self.__init__()  # type: ignore[misc]  # the lock may be held by one of them


#: The look-ups of this process.
LOOK_UPS: Final = LookUps()
os.register_at_fork(after_in_child=LOOK_UPS.forget)
