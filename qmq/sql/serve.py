"""Runs a relay as a program of its own: it waits for its broker, serves metrics, and ends by a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Final, NamedTuple

from qmq import connect
from qmq.errors import DatabaseFailed, InvalidOption, StorageFailed
from qmq.sql.metrics import metrics_text, serving_metrics
from qmq.sql.relay import HOLD_S, ClientSender, Relay, RelayCounts, RelayDatabase

log = logging.getLogger("qmq.sql")

#: Relays in one process.
RELAYS: Final = 2
#: A relay waits for its broker until it is stopped.
_FOREVER_S: Final = 1e9
_LEAST_LEASE_S: Final = 5 * HOLD_S


class RelayOptions(NamedTuple):
    """The options of a relay; times in seconds."""

    server: str | None = None
    poll: float = 0.1
    keep: float = 86_400.0
    lease: float = 15.0
    unique_for: float = 3_600.0
    metrics_listen: str | None = None


async def serve(
    databases: Sequence[RelayDatabase],
    options: RelayOptions,
    *,
    listener: Callable[[Callable[[], object]], AbstractContextManager[object]] | None = None,
    on_ready: Callable[[str], None],
) -> int:
    """Send rows until SIGTERM or Ctrl-C; return how many were sent. *databases* are the same one, by a connection each:
    while one relay waits for the database, another one waits for the broker. *listener* makes what wakes them.
    *on_ready* is called with the address of the metrics, or "", once a broker has answered.

    Raises InvalidOption, DatabaseFailed if the database is not as it must be, and StorageFailed if it cannot listen.
    """
    if options.lease < _LEAST_LEASE_S:
        raise InvalidOption(
            f"the lease must be at least {_LEAST_LEASE_S:g} s, not {options.lease:g}: sends may take a while"
        )
    address = None if options.metrics_listen is None else _address_of(options.metrics_listen)
    client = connect(options.server, name="qmq-outbox", wait=_FOREVER_S)
    counts = RelayCounts()
    relays = [
        Relay(
            database, ClientSender(client, HOLD_S), lease=options.lease, poll=options.poll, keep=options.keep,
            remembered=options.unique_for / 2, cleans=not number, counts=counts,
        ) for number, database in enumerate(databases)
    ]  # fmt: skip
    await relays[0].check()
    this, is_connected = asyncio.current_task(), False

    def stop() -> None:
        log.info("stopping")
        if is_connected:
            for relay in relays:
                relay.stop()
        elif this is not None:
            this.cancel()

    async def metrics() -> str:
        try:
            backlog = await relays[0].backlog()
        except DatabaseFailed:
            backlog = None
        return metrics_text(counts, backlog)

    for kind in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(kind, stop)
    async with AsyncExitStack() as stack:
        where = ""
        if address is not None:
            try:
                port = await stack.enter_async_context(serving_metrics(*address, metrics))
            except OSError as error:
                raise StorageFailed(f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}") from error
            where = f"http://{address[0]}:{port}/metrics"
        try:
            await stack.enter_async_context(client)
        except asyncio.CancelledError:
            return 0  # it is stopped before a broker has answered
        is_connected = True
        if listener is not None:

            def wake() -> None:
                for relay in relays:
                    relay.wake()

            stack.enter_context(listener(wake))
        on_ready(where)
        await asyncio.gather(*(relay.run() for relay in relays))
    log.info("%d rows were sent", counts.sent)
    return counts.sent


def _address_of(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidOption(f"metrics are served on HOST:PORT such as 127.0.0.1:9464, not on {listen!r:.80}")
    return host.strip("[]"), int(port)
