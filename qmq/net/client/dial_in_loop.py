"""Connect to a host of several addresses in an event loop, as ``dial`` does without one."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence

from qmq.net.client.address import Address
from qmq.net.client.dial import NEXT_AFTER_S, Route, Routes, joined, look_up
from qmq.net.client.look_ups import LOOK_UPS
from qmq.net.client.tasks import begin_task


async def routes_to(address: Address, routes: Routes, loop: asyncio.AbstractEventLoop) -> list[Route]:
    """Return the routes to a host in the order in which to try them. Raises OSError."""
    try:
        found = look_up(address, socket.AI_NUMERICHOST)  # needs no thread
    except socket.gaierror:
        found = await LOOK_UPS.of(address)
    return routes.of(found)


async def dial_in_loop(routes: Sequence[Route], loop: asyncio.AbstractEventLoop) -> socket.socket:
    """Return a socket that is connected to the first of *routes* that answers. Raises OSError."""
    waiting, errors = deque(routes), list[OSError]()
    tasks: set[asyncio.Task[socket.socket]] = set()
    try:
        while waiting or tasks:
            if waiting:
                tasks.add(begin_task(_connected(waiting.popleft(), loop), loop, "qmq-dial"))
            timeout = NEXT_AFTER_S if waiting else None
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    tasks.discard(task)
                    return task.result()
                tasks.discard(task)
                if not isinstance(error, OSError):
                    raise error
                errors.append(error)
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close)
    raise joined(errors)


async def _connected(route: Route, loop: asyncio.AbstractEventLoop) -> socket.socket:
    sock = route.new_socket()
    try:
        await loop.sock_connect(sock, route[3])
    except BaseException:
        sock.close()
        raise
    return sock


def _close(task: asyncio.Task[socket.socket]) -> None:
    """Close the socket of a route that was too late."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
