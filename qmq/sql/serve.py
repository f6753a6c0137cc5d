"""Runs a relay as a program of its own: it waits for its broker, serves metrics, and ends by a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Final, NamedTuple

from qmq import connect
from qmq.errors import DatabaseFailed, InvalidOption, StorageFailed
from qmq.sql.metrics import metrics_text, serving_metrics
from qmq.sql.relay import HOLD_S, ClientSender, Relay, RelayDatabase

log = logging.getLogger("qmq.sql")

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
    database: RelayDatabase,
    options: RelayOptions,
    *,
    listener: Callable[[Callable[[], None]], AbstractContextManager[object]] | None = None,
    on_ready: Callable[[str], None],
) -> int:
    """Send rows until SIGTERM or Ctrl-C; return how many were sent. *listener* makes what wakes the relay. *on_ready*
    is called with the address of the metrics, or "", once a broker has answered.

    Raises InvalidOption, DatabaseFailed if the database is not as it must be, and StorageFailed if it cannot listen.
    """
    if options.lease < _LEAST_LEASE_S:
        raise InvalidOption(
            f"the lease must be at least {_LEAST_LEASE_S:g} s, not {options.lease:g}: sends may take a while"
        )
    address = None if options.metrics_listen is None else _address_of(options.metrics_listen)
    client = connect(options.server, name="qmq-outbox", wait=_FOREVER_S)
    relay = Relay(
        database, ClientSender(client, HOLD_S), lease=options.lease, poll=options.poll, keep=options.keep,
        remembered=options.unique_for / 2,
    )  # fmt: skip
    await relay.check()
    this, is_connected = asyncio.current_task(), False

    def stop() -> None:
        log.info("stopping")
        if is_connected:
            relay.stop()
        elif this is not None:
            this.cancel()

    async def metrics() -> str:
        try:
            backlog = await relay.backlog()
        except DatabaseFailed:
            backlog = None
        return metrics_text(relay.counts, backlog)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
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
            stack.enter_context(listener(relay.wake))
        on_ready(where)
        await relay.run()
    log.info("%d rows were sent", relay.counts.sent)
    return relay.counts.sent


def _address_of(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidOption(f"metrics are served on HOST:PORT such as 127.0.0.1:9464, not on {listen!r:.80}")
    return host.strip("[]"), int(port)
