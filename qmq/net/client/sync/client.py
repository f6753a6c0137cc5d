"""The client without asyncio: it runs a ``Client`` on an event loop in a background thread, and survives forks."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from qmq.durations import Duration
from qmq.errors import UsageError
from qmq.format.build import Keys, either_of, make_header, with_unique
from qmq.format.unique import hash_of
from qmq.net.client.admin.admin import Admin
from qmq.net.client.admin.results import SubjectInfo
from qmq.net.client.client import list_subjects
from qmq.net.client.consumer.multi_broker import make_puller
from qmq.net.client.find.consumer_trace import ConsumerTrace
from qmq.net.client.find.finder import STOP_AFTER
from qmq.net.client.find.stored_message import StoredMessage
from qmq.net.client.find.trace import Trace
from qmq.net.client.group_settings import GroupSettings, OnDifference, terms_of
from qmq.net.client.options import (
    NO_JSON,
    Body,
    ClientOptions,
    Durability,
    Priority,
    body_of,
    deliver_at_of,
    expire_at_of,
    json_body_of,
    lane_of,
)
from qmq.net.client.producer.receipts import Receipt, Receipts
from qmq.net.client.sync.admin import SyncAdmin
from qmq.net.client.sync.consumer import SyncConsumer
from qmq.net.client.sync.finder import SyncFinder
from qmq.net.client.sync.loop_thread import ClientThread, check_threads
from qmq.net.protocol.types import Mode


class SyncClient:
    """A client of one broker or several, for code without asyncio, and for any thread.

    ``qmq.connect_sync`` makes it. Use it with ``with``; without a block it connects at its first call, and ``close``
    ends it.

    In the child of a fork it connects again at the first call, with another producer id. Queued sends, and messages of
    consumers, stay with the parent.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._thread: ClientThread | None = None
        self._is_closed = False
        #: Held while a thread is made.
        self._making = threading.Lock()
        _clients.add(self)
        #: Groups, their consumers and dead letters.
        self.admin = SyncAdmin(self._administer)

    def _administer(self, call: Callable[[Admin], Coroutine[Any, Any, Any]]) -> Any:
        thread = self._current_thread()
        return thread.run(call(thread.client.admin))

    def __enter__(self) -> Self:
        """Connect, unless a call has done so. Raises ConnectionLost if no broker answers in time (``wait``), or the
        error with which a broker refuses the client.
        """
        self._is_closed = False
        self._current_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the consumers that are open, send all queued messages, then close. Raises SendFailed if some failed,
        unless the block ends by an error.
        """
        with self._making:
            thread, self._thread, self._is_closed = self._thread, None, True
        if thread is None:
            return
        if thread.pid == os.getpid():
            thread.close(kind, error, traceback)
        else:
            _inherited.append(thread)

    def close(self) -> None:
        """Leave the consumers that are open, send all queued messages, then close, as the end of ``with`` does; do
        nothing if it is closed.

        Raises SendFailed if some messages could not be sent.
        """
        self.__exit__(None, None, None)

    def _current_thread(self) -> ClientThread:
        """Return the client thread of this process, made at the first call. Raises UsageError if it is closed."""
        thread = self._thread
        if thread is not None and thread.pid == os.getpid():
            return thread
        with self._making:
            thread = self._thread
            if self._is_closed:
                raise UsageError("the client is closed; call connect_sync for another")
            if thread is not None and thread.pid != os.getpid():
                _inherited.append(thread)
                thread = None
            if thread is None:
                check_threads()
                thread = self._thread = ClientThread(self._options)
            return thread

    def send(
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
        """Send one message; return once it is stored. Raises as ``Client.send``."""
        thread = self._current_thread()
        return thread.run(
            thread.client.send(
                subject,
                body,
                json=json,
                key=key,
                keys=keys,
                tags=tags,
                properties=properties,
                delay=delay,
                deliver_at=deliver_at,
                expires_in=expires_in,
                priority=priority,
                order_key=order_key,
                unique=unique,
                durability=durability,
            )
        )

    def send_many(
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
        """Send messages of one subject; return their receipts once all are stored. Raises as ``Client.send_many``."""
        thread = self._current_thread()
        return thread.run(
            thread.client.send_many(
                subject,
                bodies,
                keys=keys,
                tags=tags,
                properties=properties,
                delay=delay,
                deliver_at=deliver_at,
                expires_in=expires_in,
                priority=priority,
                order_key=order_key,
                order_keys=order_keys,
                unique=unique,
                durability=durability,
            )
        )

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
        """Queue one message; return its ticket. Raises as ``Client.send_nowait``."""
        if body is None:
            body, properties = json_body_of(json, properties)
        elif json is not NO_JSON:
            raise UsageError("give either a body or json, not both")
        times = deliver_at_of(delay, deliver_at), expire_at_of(expires_in)
        lane = lane_of(priority)
        header = make_header(either_of(key, keys), tags, properties, *times, lane, order_key)
        if unique is not None:
            header = with_unique(header, hash_of(unique))
        return self._current_thread().queue(subject, body_of(body), header, durability, unique)

    def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message; return whether it was in time. See ``Client.cancel``."""
        thread = self._current_thread()
        return thread.run(thread.client.cancel(message_id))

    def get(self, message_id: str) -> StoredMessage:
        """Return the stored message with that id. See ``Client.get``."""
        thread = self._current_thread()
        return thread.run(thread.client.get(message_id))

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
    ) -> SyncFinder:
        """Return the stored messages of a prefix or subject: ``for message in client.find(...)``. See
        ``Client.find``.
        """
        thread = self._current_thread()
        finder = thread.client.find(
            prefix, key=key, since=since, until=until, contains=contains, newest=newest, limit=limit,
            stop_after=stop_after, cursor=cursor,
        )  # fmt: skip
        return SyncFinder(finder, thread.run)

    def trace(self, message_id: str) -> Trace:
        """Return what has become of a message in each group. See ``Client.trace``."""
        thread = self._current_thread()
        return thread.run(thread.client.trace(message_id))

    def trace_consumer(self, name: str, *, since: datetime | None = None, limit: int = 1_000) -> ConsumerTrace:
        """Return what a consumer did. See ``Client.trace_consumer``."""
        thread = self._current_thread()
        return thread.run(thread.client.trace_consumer(name, since=since, limit=limit))

    def drain(self) -> None:
        """Wait while the queue is so full that more messages would not be sent faster. See ``Client.drain``."""
        self._current_thread().drain()

    def flush(self) -> None:
        """Wait until all queued messages are stored. Raises SendFailed, which reports each failure once."""
        thread = self._current_thread()
        thread.run(thread.client.flush())

    def _number_from(self, sequence: int) -> None:
        """Give the next message this producer sequence, below those that the broker has: it is a repeat. For Spark's
        tasks; call it while nothing is queued.
        """
        self._current_thread().parts.brokers.outcomes.next_sequence = sequence

    def last_sequence(self, producer: str | None = None) -> int | None:
        """Return the producer sequence of the last stored message. See ``Client.last_sequence``."""
        thread = self._current_thread()
        return thread.run(thread.client.last_sequence(producer))

    def subjects(self, prefix: str = "") -> Iterator[SubjectInfo]:
        """Yield the subjects of *prefix*. See ``Client.subjects``."""
        thread = self._current_thread()
        parts = thread.parts
        for number in [parts.brokers.links.index(link) for link in thread.run(parts.listing.begin())]:
            after: int | None = 0
            while after is not None:
                thread = self._current_thread()  # another one in the child of a fork
                parts = thread.parts
                link = parts.brokers.links[number]
                page = thread.run(parts.listing.page(link, list_subjects(link, prefix, after)))
                infos, after = page or ([], None)
                yield from infos

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
    ) -> SyncConsumer:
        """Return a consumer of *group*, or without a group; use it with ``with``. See ``Client.subscribe``."""
        terms = terms_of(group, mode, {"tags": tags, **settings}, looks=look, on_difference=on_difference)
        return SyncConsumer(
            self._current_thread, lambda brokers: make_puller(brokers, prefixes, group, consumer, start, terms)
        )


#: Client threads that a fork copied. Their loops share an epoll with the parent's, so they must not be closed or freed.
_inherited: list[ClientThread] = []
_clients: weakref.WeakSet[SyncClient] = weakref.WeakSet()


def _forked() -> None:
    for client in list(_clients):
        client._making = threading.Lock()  # another thread of the parent may have locked it


os.register_at_fork(after_in_child=_forked)
