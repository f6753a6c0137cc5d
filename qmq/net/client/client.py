"""The asyncio client: sends, consumers, lists of subjects."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import weakref
from collections.abc import AsyncIterator, Generator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, Unpack

import msgpack

from qmq.durations import Duration
from qmq.errors import InvalidOption, QmqError, UsageError
from qmq.format.build import (
    NO_HEADER,
    SHORT_KEY,
    SHORT_KEY_OVERHEAD,
    AnyHeader,
    Keys,
    are_short_keys,
    either_of,
    headers_of,
    make_header,
    ordered_headers_of,
    unique_headers_of,
    with_unique,
)
from qmq.format.ids import MessageId
from qmq.format.lanes import ordered_kind_of
from qmq.format.unique import hash_of
from qmq.names import check_prefix
from qmq.net.client.admin.admin import Admin
from qmq.net.client.admin.listing import Listing
from qmq.net.client.admin.results import SubjectInfo
from qmq.net.client.broker_link import Link, sequence_in
from qmq.net.client.brokers import Brokers
from qmq.net.client.consumer.consumer import Consumer
from qmq.net.client.consumer.multi_broker import make_puller
from qmq.net.client.find.consumer_trace import ConsumerTrace, trace_consumer
from qmq.net.client.find.finder import STOP_AFTER, Finder, search_terms
from qmq.net.client.find.get import get
from qmq.net.client.find.requests import BrokerSource
from qmq.net.client.find.stored_message import StoredMessage
from qmq.net.client.find.trace import Trace, trace
from qmq.net.client.group_settings import GroupSettings, OnDifference, terms_of
from qmq.net.client.options import (
    NO_JSON,
    Body,
    ClientOptions,
    Durability,
    Priority,
    bodies_of,
    body_of,
    deliver_at_of,
    expire_at_of,
    is_flush,
    json_body_of,
    lane_of,
    producer_id_of,
)
from qmq.net.client.producer.accumulator import ORDERED_OVERHEAD, Accumulator, Appendable
from qmq.net.client.producer.batch import MESSAGE_OVERHEAD
from qmq.net.client.producer.receipts import Receipt, Receipts
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Mode

log = logging.getLogger("qmq.client")

#: After a cancellation, closing waits this long, in seconds, for queued messages.
CANCELLED_FLUSH: Final = 1.0
_SUBJECTS_AT_ONCE: Final = 1_000
#: Bytes of a message with a short order key, or key, beside its body and the key.
_ORDERED_OVERHEAD: Final = ORDERED_OVERHEAD + SHORT_KEY_OVERHEAD
_KEYED_OVERHEAD: Final = MESSAGE_OVERHEAD + SHORT_KEY_OVERHEAD
_NO_RUNS: Final[dict[str, Appendable]] = {}


class ClientParts(NamedTuple):
    """The parts of a client."""

    options: ClientOptions
    accumulator: Accumulator
    brokers: Brokers
    listing: Listing


def make_parts(options: ClientOptions) -> ClientParts:
    """Return the parts of a client that is not connected; its producer id is random, or that of its name."""
    accumulator = Accumulator(options.flush, options.linger, options.max_queued_bytes)
    brokers = Brokers(options, accumulator)
    return ClientParts(options, accumulator, brokers, Listing(brokers))


class Client:
    """A client of one broker or several. ``qmq.connect`` makes it; use it with ``async with``, in one thread."""

    def __init__(self, parts: ClientParts) -> None:
        self._options, self._accumulator, self._brokers, self._listing = parts
        self._flush = self._options.flush
        self._awaited = False  # connected by ``await``, and in no block yet
        #: Lists and changes groups, their consumers and dead letters.
        self.admin = Admin(self._brokers, self._listing)

    async def __aenter__(self) -> Self:
        """Connect, unless ``await`` has done so. Raises ConnectionLost if no broker answers in time (``wait``), or the
        error with which a broker refuses the client.
        """
        if not (self._awaited and self._brokers.is_open):
            await self._brokers.open()
            _clients.add(self)
        self._awaited = False
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Connect without a block; ``close`` ends the client. Raises as ``async with`` does."""
        return self._connected().__await__()

    async def _connected(self) -> Self:
        await self.__aenter__()
        self._awaited = True
        return self

    async def close(self) -> None:
        """Leave the consumers that are open, send all queued messages, then close, as the end of ``async with`` does;
        do nothing if it is closed.

        Raises SendFailed if some messages could not be sent.
        """
        if self._brokers.is_open:
            await self.__aexit__(None, None, None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the consumers that are open, send all queued messages, then close. Raises SendFailed if some failed,
        unless the block ends by an error.
        """
        try:
            if self._brokers.was_left_open:
                pass  # the program, or its loop, is at its end
            elif error is None:
                await self._brokers.leave_consumers(None)
                await self.flush()
            elif self._brokers.is_open:
                try:
                    async with asyncio.timeout(None if isinstance(error, Exception) else CANCELLED_FLUSH):
                        await self._brokers.leave_consumers(error)
                        await self.flush()
                except (QmqError, TimeoutError) as failure:
                    log.error("while the client closed because of %r: %r", error, failure)
        finally:
            _clients.discard(self)
            await self._brokers.aclose()

    def __del__(self) -> None:
        """Send what a client that was left open has, and close it: its heartbeats would keep its messages from other
        consumers.
        """
        brokers = getattr(self, "_brokers", None)  # None if the options were refused
        if brokers is None or not brokers.is_open or sys.is_finalizing():
            return
        try:
            brokers.ready().call_soon_threadsafe(brokers.leave)
        except RuntimeError:  # the loop is closed, and has ended all of it
            brokers.log_unsent()
        brokers.left_open()

    def _forked(self) -> None:
        """Become a client that is not connected, in the child of a fork: socket and queue belong to the parent."""
        for link in self._brokers.links:
            link.give_up_sockets()
        _of_the_parent.append(self._brokers)
        self.__init__(make_parts(self._options))  # type: ignore[misc]  # a client that is not connected

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send(
        self,
        subject: str,
        body: Body | None = None,
        *,
        json: Any = NO_JSON,
        key: str | None = None,
        keys: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay: Duration | None = None,
        deliver_at: float | datetime | None = None,
        expires_in: Duration | None = None,
        priority: Priority | None = None,
        order_key: str | None = None,
        unique: str | None = None,
        durability: Durability | None = None,
    ) -> Receipt:
        """Send one message; return its receipt once it is stored.

            await client.send("shop.order.created", json={"id": "order-4421"}, key="order-4421")
            await client.send("shop.order.paid", b"...", keys=["order-4421", "user-7"])
            await client.send("shop.reminder", b"...", delay="2h", expires_in="1d")
            await client.send("shop.mail", b"...", priority="high")
            await client.send("shop.order.changed", b"...", order_key="order-4421")
            await client.send("shop.charge", b"...", unique="order-4421-charge")

        Its body is *body*, or the value *json* as JSON with the property content-type: application/json, which
        ``Message.json`` reads. *key*, or each of up to 16 *keys*, names what it is about, in 1 to 1,024 bytes of UTF-8;
        one that is given twice counts once. It is delivered *delay* after it was stored, or at *deliver_at* (seconds
        since 1970, or an aware datetime): at most 731 days (two years) ahead, and never early by the broker's clock.
        *expires_in* after it was stored, or fell due, it becomes a dead letter of groups to which it was not handed
        out.

        A group gets messages of a higher *priority* first ("low", "normal", "high", or 0, 1, 2). Messages of a subject
        with one *order_key* (1 to 1,024 bytes of UTF-8) are handed out in the order in which they were stored, the next
        one only when those before it are acknowledged or dead. With several brokers, those of one order key go to the
        same broker; while it is away such sends wait for it, and fail after ``send_timeout``.

        A message of a subject with the same *unique* text (1 to 1,024 bytes of UTF-8) as one that was sent within the
        broker's ``unique_for_ms`` (1 h) is not stored again: the receipt says ``duplicate``, and has the id of the
        first. With several brokers, a text goes to one of them, as an order key does, which decides if there are both.

        A send is written at once while nothing is on its way; concurrent sends go as one batch. Raises UsageError,
        InvalidName, InvalidOption, MessageTooLarge, TypeError before it is sent; SendFailed if it was not stored;
        SendUnknown if it may be stored or not. A send that is cancelled may still be stored.
        """
        if body is None:
            body, properties = json_body_of(json, properties)
        elif json is not NO_JSON:
            raise UsageError("give either a body or json, not both")
        due = deliver_at_of(delay, deliver_at) if delay is not None or deliver_at is not None else 0
        plain = key is keys is None and not tags and not properties and not due and expires_in is None
        plain = plain and priority is order_key is None
        if plain and unique is durability is None and type(body) is bytes:
            if self._accumulator.unfinished:
                joined: asyncio.Future[Receipt] = self._brokers.ready().create_future()
                if self._accumulator.add_plain(subject, body, joined):
                    return await joined
            else:
                alone = self._brokers.send_now(subject, body)
                if alone is not None:
                    return await alone
        header = NO_HEADER
        if not plain:
            expire_at = 0 if expires_in is None else expire_at_of(expires_in)
            lane = lane_of(priority)
            header = make_header(either_of(key, keys), tags, properties, due, expire_at, lane, order_key)
        if unique is not None:
            self._accumulator.check_unique()
            hashed = hash_of(unique)
            if plain and durability is None and type(body) is bytes:
                if self._accumulator.unfinished:
                    joined = self._brokers.ready().create_future()
                    if self._accumulator.add_unique(subject, body, hashed, self._flush, joined):
                        return await joined
                else:
                    alone = self._brokers.send_unique_now(subject, body, hashed)
                    if alone is not None:
                        return await alone
            header = with_unique(header, hashed)
        flush = self._flush if durability is None else is_flush(durability)
        body = body_of(body)
        loop = self._brokers.ready()
        future: asyncio.Future[Receipt] = loop.create_future()
        if self._accumulator.add(subject, body, header, flush, future, loop.time(), unique):
            self._brokers.want_turn()
        return await future

    async def send_many(
        self,
        subject: str,
        bodies: Sequence[Body],
        *,
        keys: Sequence[Keys] | None = None,
        tags: Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay: Duration | None = None,
        deliver_at: float | datetime | None = None,
        expires_in: Duration | None = None,
        priority: Priority | None = None,
        order_key: str | None = None,
        order_keys: Sequence[str] | None = None,
        unique: Sequence[str] | None = None,
        durability: Durability | None = None,
    ) -> Receipts:
        """Send messages of one subject; return their receipts once all are stored.

            await client.send_many("shop.order.created", [b"1", b"2"], keys=["order-1", "order-2"], tags=["eu"])

        *keys* has a key, a list of keys, or None for each body, *order_keys* an order key, and *unique* a unique text
        for each; *tags*, *properties*, *priority* and *order_key* are those of all. The messages go as one batch, or as
        several if they are too large for one; each batch is stored as a whole or not at all, but for repeats of unique
        texts. Raises as ``send``; ``failures`` of SendFailed name the messages by index.
        """
        flush = self._flush if durability is None else is_flush(durability)
        packed = bodies_of(bodies)
        times = deliver_at_of(delay, deliver_at), expire_at_of(expires_in)
        lane = lane_of(priority)
        header = make_header(None, tags, properties, *times, lane, order_key)
        headers: Sequence[AnyHeader] | None = None
        if order_keys is not None:
            if order_key is not None:
                raise InvalidOption("give either order_key, for all bodies, or order_keys, one for each")
            headers = ordered_headers_of(order_keys, len(packed), keys, tags, properties, *times, lane)
            header = header._replace(lane=ordered_kind_of(lane))
        elif keys is not None:
            is_simple = header is NO_HEADER and type(keys) in (list, tuple) and len(keys) == len(packed)
            if is_simple and keys and are_short_keys(keys):
                headers = list(keys)  # type: ignore[arg-type]  # all are text
            else:
                headers = headers_of(keys, len(packed), header, tags, properties, order_key)
        if unique is not None:
            self._accumulator.check_unique()
            headers = unique_headers_of(unique, len(packed), header, headers)
        loop = self._brokers.ready()
        if not packed:
            return Receipts(())
        future: asyncio.Future[Receipts] = loop.create_future()
        self._accumulator.add_many(subject, packed, flush, future, loop.time(), header, headers, unique)
        self._brokers.want_turn()
        return await future

    def send_nowait(
        self,
        subject: str,
        body: Body | None = None,
        *,
        json: Any = NO_JSON,
        key: str | None = None,
        keys: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay: Duration | None = None,
        deliver_at: float | datetime | None = None,
        expires_in: Duration | None = None,
        priority: Priority | None = None,
        order_key: str | None = None,
        unique: str | None = None,
        durability: Durability | None = None,
    ) -> int:
        """Queue one message; return its ticket, by which SendFailed of a later ``flush`` names it.

        Raises QueueFull if ``max_queued_bytes`` are queued, or the errors that ``send`` raises before it sends.
        """
        if body is None:
            body, properties = json_body_of(json, properties)
        elif json is not NO_JSON:
            raise UsageError("give either a body or json, not both")
        if (
            keys is None
            and tags is None
            and properties is None
            and durability is None
            and delay is None
            and deliver_at is None
            and expires_in is None
            and priority is None
            and unique is None
            and type(body) is bytes
        ):
            accumulator = self._accumulator
            text: str
            if order_key is None:
                if key is None:
                    text, runs, overhead = "", accumulator.plain, MESSAGE_OVERHEAD
                else:
                    text, runs, overhead = key, accumulator.keyed, _KEYED_OVERHEAD
            else:
                text, runs, overhead = order_key, accumulator.ordered if key is None else _NO_RUNS, _ORDERED_OVERHEAD
            run = runs.get(subject)
            if run is not None:
                bodies, tickets, headers = run
                if headers is None or (type(text) is str and 0 < len(text) < SHORT_KEY and text.isascii()):
                    room = accumulator.room - len(body) - len(text) - overhead
                    if room >= 0:
                        accumulator.room = room
                        if headers is not None:
                            headers.append(text)
                        bodies.append(body)
                        accumulator.ticket = ticket = accumulator.ticket + 1
                        tickets.append(ticket)
                        return ticket
            elif runs is accumulator.plain and (ticket := accumulator.add_single(subject, body)):
                return ticket
        flush = self._flush if durability is None else is_flush(durability)
        body = body_of(body)
        due = deliver_at_of(delay, deliver_at) if delay is not None or deliver_at is not None else 0
        expire_at = 0 if expires_in is None else expire_at_of(expires_in)
        all_keys = key if keys is None else either_of(key, keys)
        lane = lane_of(priority)
        header = make_header(all_keys, tags, properties, due, expire_at, lane, order_key)
        if unique is not None:
            self._accumulator.check_unique()
            hashed = hash_of(unique)
            if header is NO_HEADER:
                self._accumulator.check_nowait(subject, len(body), len(hashed))
                if ticket := self._accumulator.append_unique_nowait(subject, body, hashed, flush):
                    return ticket
            header = with_unique(header, hashed)
        elif ticket := self._accumulator.append_nowait(subject, body, header, flush):
            return ticket
        loop = self._brokers.ready()
        self._accumulator.check_nowait(subject, len(body), len(header.packed))
        ticket = self._accumulator.add_nowait(subject, body, header, flush, loop.time(), unique)
        self._brokers.want_turn()
        return ticket

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message by the id of its receipt; return whether it was in time, so is never delivered.

        Raises InvalidOption for an invalid id, BrokersMissed if a broker that did not answer may have the message.
        """
        MessageId.parse(message_id)
        return await self.admin.cancel(message_id)

    async def get(self, message_id: str) -> StoredMessage:
        """Return the stored message with that id, or a copy that keeps the id: one that was delayed, restored, handed
        over, or kept for a group.

            message = await client.get(receipt.id)

        Looking changes nothing. Raises InvalidOption for an invalid id; UnknownMessage if no broker has the message, or
        keeps it no more; BrokersMissed if a broker that did not answer may have it; StorageError if it cannot be read.
        """
        return await get(self._brokers, self._listing, message_id)

    def find(
        self,
        prefix: str = "",
        *,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        contains: str | None = None,
        newest: bool = False,
        limit: int | None = 100,
        stop_after: Duration | None = STOP_AFTER,
        cursor: str | None = None,
    ) -> Finder:
        """Return the stored messages of a prefix or subject, the oldest first, or with *newest* the newest.

            async for message in client.find("shop.", key="order-4421"):
                print(message.subject, message.stored_at, message.body)

        *key*: those with this key; *since*, *until*: those stored at or after the first, and before the second time,
        aware datetimes; *contains*: those with this text in their body, a key, a tag or a property. It ends after
        *limit* messages, and after *stop_after* (both may be None): ``Finder.is_complete`` says whether that was all,
        and ``Finder.cursor`` is what another call goes on with.

        Looking changes nothing. Messages of groups alone (kept for their retries, or handed over) are found by key.
        Raises UsageError (InvalidName, InvalidOption) at once. The loop raises BrokersMissed if no broker answers, and
        StorageError if a disk fails; ``Finder.missed`` names single brokers that did not answer.
        """
        terms = search_terms(
            prefix, key=key, since=since, until=until, contains=contains, newest=newest, limit=limit,
            stop_after=stop_after, cursor=cursor,
        )  # fmt: skip
        return Finder(terms, self._sources)

    def _sources(self) -> list[BrokerSource]:
        timeout = self._options.admin_timeout
        reach_timeout = min(timeout, self._brokers.patience())
        return [BrokerSource(link, timeout, reach_timeout) for link in self._brokers.links]

    async def trace(self, message_id: str) -> Trace:
        """Return what has become of a message: its state in each group, and what happened to it there.

            trace = await client.trace(receipt.id)
            print({group.group: group.state for group in trace.groups})

        The states are those that the broker acts on; the events come from its pull log, which is kept for
        ``pull_log_keep_ms``. Looking changes nothing. Raises InvalidOption for an invalid id; UnknownMessage if no
        broker here ever had the message; BrokersMissed if a broker that did not answer may have it; StorageError if it
        cannot be read.
        """
        return await trace(self._brokers, self._listing, message_id)

    async def trace_consumer(self, name: str, *, since: datetime | None = None, limit: int = 1_000) -> ConsumerTrace:
        """Return what a consumer did: what it was given, acked, nacked, released and rejected, and when it left.

            for event in (await client.trace_consumer("worker-7")).events:
                print(event.time, event.kind, event.subject, event.sequence, event.count)

        *name* is the id of a consumer, or the name that its program gave to ``connect`` (else its app), so it may be
        several. *since*: an aware datetime; else as far as the pull logs are kept (``pull_log_keep_ms``). Each broker
        returns its last *limit* events, up to 1,000. Looking changes nothing. Raises InvalidOption, and BrokersMissed
        if no broker answers.
        """
        return await trace_consumer(self._brokers, self._listing, name, since, limit)

    async def drain(self) -> None:
        """Wait while the queue is so full that more would not be sent faster. Call it between ``send_nowait``."""
        if self._accumulator.is_crowded():
            while not self._accumulator.is_drained():
                await self._brokers.batch_end()
        elif self._accumulator.has_sealed():
            await asyncio.sleep(0)

    async def flush(self) -> None:
        """Wait until all queued messages are stored.

        Raises SendFailed if messages of ``send_nowait`` are not; each failure is reported once.
        """
        future: asyncio.Future[None] = self._brokers.ready().create_future()
        self._brokers.outcomes.flush(future)
        self._brokers.want_turn()
        await future
        error = self._brokers.outcomes.take_failure()
        if error is not None:
            raise error

    async def last_sequence(self, producer: str | None = None) -> int | None:
        """Return the producer sequence (from 0) of the last stored message of a producer by name, or of this client;
        None if the broker knows none.

        A job that sends numbered messages in order can resume after it. The broker forgets a producer some time after
        its last send (``producer_ttl_ms``). Raises InvalidOption for a client of several brokers, as messages that move
        from one to another get other sequences.
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
        start: Literal["first", "new"] | datetime | int | None = None,
        mode: Mode = "reliable",
        tags: Sequence[str] | None = None,
        look: bool = False,
        on_difference: OnDifference = "warn",
        **settings: Unpack[GroupSettings],
    ) -> Consumer:
        """Return a consumer of *group*, or one that reads without a group; use it with ``async with``.

        A prefix ends with a dot (or is empty: all subjects); any other name is a subject. *start* is "first", "new"
        (behind the last message), an aware datetime or a sequence. Without it a new group begins at the first stored
        message; a consumer without a group, and a new member of a broadcast, begin behind the last one. Raises
        InvalidName, InvalidOption.

        The *mode* of a group never changes: "reliable", "at_most_once" (no acks, and no message comes again) or
        "broadcast" (each consumer id gets every message). *tags* (the group takes only messages with one of these) and
        other *settings* apply to a new group. If an existing one has other values, *on_difference* says what
        to do: "warn" logs them, "raise" raises GroupMismatch, "apply" changes the group's settings.

        A group follows all prefixes that its consumers have ever asked for, until ``admin.set_group`` changes them.
        With *look* it follows no more than before: the group must exist (UnknownGroup), and messages come of those
        prefixes that it follows already. If none is acknowledged, all are handed out again.
        """
        terms = terms_of(group, mode, {"tags": tags, **settings}, looks=look, on_difference=on_difference)
        puller = make_puller(self._brokers, prefixes, group, consumer, start, terms)
        return Consumer(puller, self._brokers.consumers, self)

    async def subjects(self, prefix: str = "") -> AsyncIterator[SubjectInfo]:
        """Yield the subjects of *prefix* in the order of their creation, broker by broker. Brokers that do not answer
        within ``admin_timeout`` seconds are left out, and named by ``admin.missed``. Raises BrokersMissed if none
        answers.
        """
        for link in await self._listing.begin():
            after: int | None = 0
            while after is not None:
                page = await self._listing.page(link, list_subjects(link, prefix, after))
                infos, after = page or ([], None)
                for info in infos:
                    yield info


async def list_subjects(link: Link, prefix: str, after: int) -> tuple[list[SubjectInfo], int | None]:
    """Return some subjects of *prefix* from *after* (at first 0) on, and the next *after* (None: there are no more).
    Raises TimeoutError.
    """
    meta = {"prefix": check_prefix(prefix), "after": after, "limit": _SUBJECTS_AT_ONCE}
    content = msgpack.unpackb((await link.answer(FrameKind.SUBJECTS, meta)).payload)
    broker = str(link.address)
    rows = [
        SubjectInfo(name, first, following, messages, delayed, broker, *by_lanes)
        for name, first, following, messages, delayed, *by_lanes in content["rows"]
    ]
    return rows, content["after"]


#: Connected clients; in the child of a fork they belong to the parent.
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: References, so that the child of a fork does not close the parent's sockets.
_of_the_parent: list[Brokers] = []


def _forked() -> None:
    for client in list(_clients):
        client._forked()
    _clients.clear()


os.register_at_fork(after_in_child=_forked)
