"""The asyncio client: sends, consumers, lists of subjects."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, Unpack

import msgpack

from qmq.errors import ConnectionLost, InvalidOption, QmqError
from qmq.format.build import NO_HEADER, make_header
from qmq.format.ids import MessageId
from qmq.names import check_prefix
from qmq.net.client.admin import Admin, Listing
from qmq.net.client.broker_link import Link, sequence_in
from qmq.net.client.cluster import Brokers
from qmq.net.client.consumer.consumer import Consumer
from qmq.net.client.consumer.multi_broker import make_puller
from qmq.net.client.group_settings import GroupSettings, terms_of
from qmq.net.client.options import (
    Body,
    ClientOptions,
    Durability,
    bodies_of,
    body_of,
    deliver_at_of,
    expire_at_of,
    is_flush,
    producer_id_of,
)
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.batch import MESSAGE_OVERHEAD
from qmq.net.client.producer.receipts import Receipt, Receipts
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Mode

log = logging.getLogger("qmq.client")

#: How long closing waits for what is queued when the client's block ends by a cancellation, in seconds.
CANCELLED_FLUSH: Final = 1.0
_SUBJECTS_AT_ONCE: Final = 1_000


class SubjectInfo(NamedTuple):
    """One subject: its messages have sequences from ``first_sequence`` up to, not including, ``next_sequence``."""

    name: str
    first_sequence: int
    next_sequence: int
    messages: int
    #: Messages that are to be delivered to it later.
    delayed: int
    broker: str


class ClientParts(NamedTuple):
    """What a client is made of."""

    options: ClientOptions
    accumulator: Accumulator
    brokers: Brokers
    listing: Listing


def make_parts(options: ClientOptions) -> ClientParts:
    """The parts of a client that is not connected yet; its producer id is its own, or its name's."""
    accumulator = Accumulator(options.flush, options.linger, options.max_queued_bytes)
    brokers = Brokers(options, accumulator)
    return ClientParts(options, accumulator, brokers, Listing(brokers))


class Client:
    """A client of one broker or several. Made by ``qmq.connect``, used as ``async with``; not for several threads."""

    def __init__(self, parts: ClientParts) -> None:
        self._options, self._accumulator, self._brokers, self._listing = parts
        self._flush = self._options.flush
        #: Groups, their consumers and dead letters.
        self.admin = Admin(self._brokers, self._listing)

    async def __aenter__(self) -> Self:
        """Connect. Raises ConnectionLost when no address answers, and what a broker refuses us with."""
        await self._brokers.open()
        _clients.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send what is queued, then close. Raises SendFailed for what failed, unless the block ends by an error."""
        try:
            if error is None:
                await self.flush()
            elif self._brokers.is_open:
                try:
                    async with asyncio.timeout(None if isinstance(error, Exception) else CANCELLED_FLUSH):
                        await self.flush()
                except (QmqError, TimeoutError) as failure:
                    log.error("while the client closed because of %r: %r", error, failure)
        finally:
            _clients.discard(self)
            await self._brokers.aclose(ConnectionLost("the client is closed"))

    def __del__(self) -> None:
        """End what was left open: else its heartbeats would keep its messages from others."""
        brokers = getattr(self, "_brokers", None)  # none where options were refused
        if brokers is None or not brokers.is_open or sys.is_finalizing():
            return
        with suppress(RuntimeError):  # the loop is closed, with which all of it has ended
            brokers.ready().call_soon_threadsafe(brokers.close, ConnectionLost("the client was left open"))
        brokers.left_open()

    def _forked(self) -> None:
        """This process is a copy of the one that connected: the socket, and what is queued, are that one's."""
        _of_the_parent.append(self._brokers)
        self.__init__(make_parts(self._options))  # type: ignore[misc]  # a client that is not connected

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send(
        self,
        subject: str,
        body: Body,
        *,
        key: str | None = None,
        tags: Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        expire: float | None = None,
        durability: Durability | None = None,
    ) -> Receipt:
        """Send one message; returns once it is stored.

        It is delivered *delay* seconds after it was stored, or at *deliver_at* (seconds since 1970, or an aware
        datetime), at most 731 days (two years) ahead and never early by the broker's clock. *expire* seconds after it
        was stored, or fell due, it is a dead letter for groups that were not given it. Sends that are in flight
        together go as one batch. Raises InvalidName, InvalidOption, MessageTooLarge, TypeError before anything is sent;
        SendFailed when it was not stored; SendUnknown when nobody can say. A send that is cancelled may still be
        stored.
        """
        due = deliver_at_of(delay, deliver_at) if delay is not None or deliver_at is not None else 0
        plain = key is None and not tags and not properties and not due and expire is None
        header = NO_HEADER if plain else make_header(key, tags, properties, due, expire_at_of(expire))
        flush = self._flush if durability is None else is_flush(durability)
        body = body_of(body)
        loop = self._brokers.ready()
        future: asyncio.Future[Receipt] = loop.create_future()
        self._accumulator.add(subject, body, header, flush, future, loop.time())
        self._brokers.want_turn()
        return await future

    async def send_many(
        self,
        subject: str,
        bodies: Sequence[Body],
        *,
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        expire: float | None = None,
        durability: Durability | None = None,
    ) -> Receipts:
        """Send messages of one subject; returns their receipts once all are stored.

        They go as one batch, or as several when they are too large for one: only a batch is stored whole or not at all.
        Raises as ``send``; ``failures`` of SendFailed name the messages by index.
        """
        flush = self._flush if durability is None else is_flush(durability)
        header = make_header(None, None, None, deliver_at_of(delay, deliver_at), expire_at_of(expire))
        packed = bodies_of(bodies)
        loop = self._brokers.ready()
        if not packed:
            return Receipts(())
        future: asyncio.Future[Receipts] = loop.create_future()
        self._accumulator.add_many(subject, packed, flush, future, loop.time(), header)
        self._brokers.want_turn()
        return await future

    def send_nowait(
        self,
        subject: str,
        body: Body,
        *,
        key: str | None = None,
        tags: Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        expire: float | None = None,
        durability: Durability | None = None,
    ) -> int:
        """Queue one message; returns its ticket, by which SendFailed of a later ``flush`` names it.

        Raises QueueFull when more than ``max_queued_bytes`` are queued, else as ``send`` does before anything is sent.
        """
        plain = key is None and tags is None and properties is None and durability is None
        if plain and delay is None and deliver_at is None and expire is None and type(body) is bytes:
            accumulator = self._accumulator
            place = accumulator.plain.get(subject)
            if place is not None:
                room = accumulator.room - len(body) - MESSAGE_OVERHEAD
                if room >= 0:
                    accumulator.room = room
                    bodies, tickets = place
                    bodies.append(body)
                    accumulator.ticket = ticket = accumulator.ticket + 1
                    tickets.append(ticket)
                    return ticket
            elif ticket := accumulator.add_single(subject, body):
                return ticket
        flush = self._flush if durability is None else is_flush(durability)
        body = body_of(body)
        header = make_header(key, tags, properties, deliver_at_of(delay, deliver_at), expire_at_of(expire))
        loop = self._brokers.ready()
        self._accumulator.check_nowait(subject, len(body), len(header.packed))
        ticket = self._accumulator.add_nowait(subject, body, header, flush, loop.time())
        self._brokers.want_turn()
        return ticket

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message by its receipt's id: True when it was in time, and will never be delivered.

        Raises InvalidOption for what is no id; BrokersMissed when the broker that has it may be one not reached.
        """
        MessageId.parse(message_id)
        return await self.admin.cancel(message_id)

    async def drain(self) -> None:
        """Wait while so much is queued that more would not make anything faster. Call it between ``send_nowait``."""
        if self._accumulator.is_crowded():
            while not self._accumulator.is_drained():
                await self._brokers.batch_end()
        elif self._accumulator.has_sealed():
            await asyncio.sleep(0)

    async def flush(self) -> None:
        """Wait until all that was queued is acknowledged.

        Raises SendFailed when messages of ``send_nowait`` were not; each failure is reported once.
        """
        future: asyncio.Future[None] = self._brokers.ready().create_future()
        self._brokers.outcomes.flush(future)
        self._brokers.want_turn()
        await future
        error = self._brokers.outcomes.take_failure()
        if error is not None:
            raise error

    async def last_sequence(self, producer: str | None = None) -> int | None:
        """The number (from 0) of the last message stored of a producer by name, or of this client; None: none known.

        A job that numbers its messages itself and sends them in order resumes after it. The broker forgets a producer
        some time after its last send (``producer_ttl_ms``). Raises InvalidOption for a client of several brokers: what
        has moved from one to another has other numbers.
        """
        if len(self._brokers.links) > 1:
            raise InvalidOption("last_sequence needs a client of one broker: connect to the one that the job sends to")
        producer_id = self._brokers.outcomes.producer_id if producer is None else producer_id_of(producer)
        return sequence_in(await self._brokers.ask(FrameKind.LAST_SEQUENCE, payload=producer_id))

    # --- consuming ---------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        *prefixes: str,
        group: str | None = None,
        consumer: str | None = None,
        start: Literal["first", "last"] | datetime | int | None = None,
        mode: Mode = "reliable",
        tags: Sequence[str] | None = None,
        look: bool = False,
        **settings: Unpack[GroupSettings],
    ) -> Consumer:
        """Take part in *group*, or follow alone without one; used as ``async with``.

        A prefix ends with a dot (or is empty: everything), any other name is exactly that subject. *start* is "first",
        "last" (behind the last message), an aware datetime or a sequence; without it a new group begins at the first
        message kept, a follower and a new member of a broadcast behind the last. Raises InvalidName, InvalidOption.

        A group's *mode* is one for good: "reliable", "at_most_once" (nothing is acknowledged or comes again) or
        "broadcast" (each consumer id gets every message). *tags* (a group takes only messages with one of these) and
        other *settings* are for a new group; one that has others keeps them, which is logged.

        A group follows all that its consumers have ever asked for, until ``admin.set_group`` says otherwise. With
        *look* it follows nothing more by this: the group must be there (UnknownGroup), and what of the prefixes it
        follows is what comes. Acknowledge nothing then, and all of it is handed out again.
        """
        terms = terms_of(group, mode, {"tags": tags, **settings}, looks=look)
        return Consumer(make_puller(self._brokers, prefixes, group, consumer, start, terms), self)

    async def subjects(self, prefix: str = "") -> AsyncIterator[SubjectInfo]:
        """The subjects that *prefix* takes, in the order of their creation; of several brokers one after another, as
        far as they answer within ``admin_timeout`` seconds: ``admin.missed`` names the others. Raises BrokersMissed
        when none does.
        """
        for link in await self._listing.begin():
            after: int | None = 0
            while after is not None:
                page = await self._listing.page(link, list_subjects(link, prefix, after))
                infos, after = page or ([], None)
                for info in infos:
                    yield info


async def list_subjects(link: Link, prefix: str, after: int) -> tuple[list[SubjectInfo], int | None]:
    """Some subjects that *prefix* takes, from *after* (at first 0), and what to go on with (None: no more). Raises
    TimeoutError.
    """
    meta = {"prefix": check_prefix(prefix), "after": after, "limit": _SUBJECTS_AT_ONCE}
    content = msgpack.unpackb((await link.answer(FrameKind.SUBJECTS, meta)).payload)
    where = str(link.address)
    rows = [
        SubjectInfo(name, first, following, messages, delayed, where)
        for name, first, following, messages, delayed in content["rows"]
    ]
    return rows, content["after"]


#: Clients that are connected; in the child of a fork they are the parent's.
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: Kept so that nothing here closes what is the parent's.
_of_the_parent: list[Brokers] = []


def _forked() -> None:
    for client in list(_clients):
        client._forked()
    _clients.clear()


os.register_at_fork(after_in_child=_forked)
