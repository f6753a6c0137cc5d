"""The processes of the chaos run: writers, relays and consumers, which go on whatever is killed around them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
import warnings

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import qmq
from qmq.errors import QmqError
from qmq.sql import Inbox, Outbox
from qmq.sql.databases import database_of, engine_of, listener_of
from qmq.sql.relay import ClientSender, Relay

GROUP = "chaos"
SUBJECT = "chaos.order"
#: A relay that is frozen for longer loses its shards.
LEASE_S = 1.0
HOLD_S = 0.5
_PAUSE_S = 0.02
#: One transaction in so many is rolled back behind its send.
_UNDONE_OF = 8


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


class Undone(Exception):
    """A transaction is rolled back."""


def write(number: int, first: int, url: str, async_url: str, server: str) -> None:
    """Commit orders *number*:*first*, and so on, each with its message; writer 1 sends them itself as well."""
    _begin()
    if number % 2:
        asyncio.run(_write_async(number, first, async_url, server))
    else:
        _write(number, first, url)


def _write(number: int, sequence: int, url: str) -> None:
    engine, outbox = sa.create_engine(url), Outbox()
    while True:
        sequence += 1
        try:
            with engine.begin() as tx:
                tx.execute(_ORDER, {"writer": number, "sequence": sequence})
                with contextlib.suppress(Undone), tx.begin_nested():
                    outbox.send(tx, SUBJECT, b"of a savepoint", order_key=f"writer-{number}")
                    raise Undone
                outbox.send(tx, SUBJECT, json=[number, sequence], order_key=f"writer-{number}")
                if not random.randrange(_UNDONE_OF):
                    raise Undone
        except Undone:
            pass
        except (sa.exc.SQLAlchemyError, QmqError):
            time.sleep(_PAUSE_S)
        time.sleep(_PAUSE_S)


async def _write_async(number: int, sequence: int, url: str, server: str) -> None:
    engine = create_async_engine(url)
    async with qmq.connect(server, wait=3_600, send_timeout=5) as client:
        outbox = Outbox(client)
        while True:
            sequence += 1
            try:
                async with engine.begin() as tx:
                    await tx.execute(_ORDER, {"writer": number, "sequence": sequence})
                    await outbox.send(tx, SUBJECT, json=[number, sequence], order_key=f"writer-{number}")
                    if not random.randrange(_UNDONE_OF):
                        raise Undone
            except Undone:
                pass
            except (sa.exc.SQLAlchemyError, QmqError, OSError):
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(_PAUSE_S)


_ORDER = sa.text("INSERT INTO chaos_orders (writer, sequence) VALUES (:writer, :sequence)")
_DONE = sa.text("INSERT INTO chaos_done (writer, sequence) VALUES (:writer, :sequence)")


def relay(url: str, server: str) -> None:
    """Send what was committed."""
    _begin()

    async def main() -> None:
        engine = engine_of(url)
        database = database_of(engine)
        listener = listener_of(engine)
        async with qmq.connect(server, wait=3_600, send_timeout=5) as client:
            sending = Relay(database, ClientSender(client, HOLD_S), lease=LEASE_S, poll=0.05)
            if listener is None:
                await sending.run()
            else:
                with listener(sending.wake):
                    await sending.run()

    asyncio.run(main())


def consume(async_url: str, server: str) -> None:
    """Do the work of orders, each in one transaction with the inbox."""
    _begin()

    async def main() -> None:
        engine, inbox = create_async_engine(async_url), Inbox(group=GROUP)
        async with (
            qmq.connect(server, wait=3_600) as client,
            client.subscribe(
                SUBJECT, group=GROUP, max_attempts=60_000, max_session_expiries=255, retry_delays=["20ms"],
                reconnect_timeout="500ms",
            ) as consumer,
        ):  # fmt: skip
            async for message in consumer:
                with contextlib.suppress(sa.exc.SQLAlchemyError, QmqError, OSError):
                    async with message, engine.begin() as tx:
                        if await inbox.first_time(tx, message):
                            writer, sequence = message.json()
                            await tx.execute(_DONE, {"writer": writer, "sequence": sequence})

    while True:
        try:
            asyncio.run(main())
        except QmqError as error:
            if not error.retryable:
                raise
            time.sleep(_PAUSE_S)
