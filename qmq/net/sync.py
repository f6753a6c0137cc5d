"""The client without asyncio: the same client, driven on a loop in a background thread. Usable after fork."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from qmq.errors import ConnectionLost, InvalidOption
from qmq.format.build import MessageHeader, make_header
from qmq.format.run import Run
from qmq.net.brokers import Brokers
from qmq.net.client import Client, SubjectInfo, list_subjects, make_parts
from qmq.net.everywhere import AdminOfAll
from qmq.net.feed import Feed
from qmq.net.gathering import BATCH_BYTES
from qmq.net.group_settings import GroupSettings, Mode, terms_of
from qmq.net.merging import MergedPuller, make_puller
from qmq.net.messages import Message, MessageBatch, messages_of
from qmq.net.options import Body, ClientOptions, Durability, body_of, is_flush
from qmq.net.outgoing import MESSAGE_OVERHEAD
from qmq.net.pulling import Puller
from qmq.net.receipts import Receipt, Receipts
from qmq.net.sync_admin import SyncAdmin
from qmq.net.timing import deliver_at_of, expire_at_of

T = TypeVar("T")

_Queued = tuple[str, bytes, MessageHeader, bool]


class Session:
    """A thread with a loop, and a connected client in it: what a process has, and its forks do not."""

    def __init__(self, options: ClientOptions) -> None:
        self.pid = os.getpid()
        self.parts = make_parts(options)
        self.client = Client(self.parts)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ticket = 0
        self._queued: list[_Queued] = []  # by send_nowait, for the loop to take
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmq-client", daemon=True)
        self._thread.start()
        try:
            self.run(self.client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait; an interrupt of the wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def queue(self, subject: str, body: bytes, header: MessageHeader, durability: Durability | None) -> int:
        """As Client.send_nowait. The loop is woken once for all messages that it has not taken yet."""
        flush = self.parts.options.flush if durability is None else is_flush(durability)
        size = len(body) + len(header.packed) + MESSAGE_OVERHEAD
        with self._lock:
            self.parts.brokers.ready()
            self.parts.gathering.check_nowait(subject, len(body), len(header.packed), self._queued_bytes)
            self._ticket += 1
            ticket = self._ticket
            self._queued.append((subject, body, header, flush))
            self._queued_bytes += size
            if len(self._queued) == 1:
                self._loop.call_soon_threadsafe(self._take_queued)
        return ticket

    def _take_queued(self) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
            self._queued_bytes = 0
            # Under the lock, so that no message is in neither of the two counts.
            now = self._loop.time()
            for message in queued:
                self.parts.gathering.add_nowait(*message, now)
        self.parts.brokers.want_turn()

    def drain(self) -> None:
        """As Client.drain."""
        if self._queued_bytes > BATCH_BYTES or self.parts.gathering.is_crowded(self._queued_bytes):
            self.run(self.client.drain())

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the client, as at the end of its block, and end the thread."""
        try:
            self.run(self.client.__aexit__(kind, error, traceback))
        finally:
            self._stop()

    def _stop(self) -> None:
        try:
            self.run(_end_tasks())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end_tasks() -> None:
    """Cancel what still runs in the loop, and let transports close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


class SyncClient:
    """A client of one broker for code without asyncio. Made by ``qmq.connect_sync``, used as ``with``; for any thread.

    In the child of a fork it connects anew at the first call, with another producer id; what the parent has queued, and
    its consumers' messages, stay the parent's.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._session: Session | None = None
        #: Groups, their consumers and dead letters.
        self.admin = SyncAdmin(self._administer)

    def _administer(self, call: Callable[[AdminOfAll], Coroutine[Any, Any, Any]]) -> Any:
        session = self._here()
        return session.run(call(session.client.admin))

    def __enter__(self) -> Self:
        """Connect. Raises ConnectionLost when no address answers, and what a broker refuses us with."""
        self._session = Session(self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send what is queued, then close. Raises SendFailed for what failed, unless the block ends by an error."""
        session, self._session = self._session, None
        if session is None:
            return
        if session.pid == os.getpid():
            session.close(kind, error, traceback)
        else:
            _inherited.append(session)

    def _here(self) -> Session:
        """This process's session. Raises ConnectionLost outside of the client's block."""
        session = self._session
        if session is not None and session.pid == os.getpid():
            return session
        with _making:
            session = self._session
            if session is None:
                raise ConnectionLost(
                    "the client is not connected; use it inside `with qmq.connect_sync(...) as client`"
                )
            if session.pid != os.getpid():
                _inherited.append(session)
                session = self._session = Session(self._options)
            return session

    def send(
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
        """Send one message; returns once it is stored. Raises as ``Client.send``."""
        session = self._here()
        return session.run(
            session.client.send(
                subject,
                body,
                key=key,
                tags=tags,
                properties=properties,
                delay=delay,
                deliver_at=deliver_at,
                expire=expire,
                durability=durability,
            )
        )

    def send_many(
        self,
        subject: str,
        bodies: Sequence[Body],
        *,
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        expire: float | None = None,
        durability: Durability | None = None,
    ) -> Receipts:
        """Send messages of one subject; returns their receipts once all are stored. Raises as ``Client.send_many``."""
        session = self._here()
        return session.run(
            session.client.send_many(
                subject, bodies, delay=delay, deliver_at=deliver_at, expire=expire, durability=durability
            )
        )

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
        """Queue one message; returns its ticket. Raises as ``Client.send_nowait``."""
        header = make_header(key, tags, properties, deliver_at_of(delay, deliver_at), expire_at_of(expire))
        return self._here().queue(subject, body_of(body), header, durability)

    def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message: True when it was in time. See ``Client``."""
        session = self._here()
        return session.run(session.client.cancel(message_id))

    def drain(self) -> None:
        """Wait while so much is queued that more would not make anything faster."""
        self._here().drain()

    def flush(self) -> None:
        """Wait until all that was queued is acknowledged. Raises SendFailed, which reports each failure once."""
        session = self._here()
        session.run(session.client.flush())

    def last_sequence(self, producer: str | None = None) -> int | None:
        """The number of the last message stored of a producer by name, or of this client. See ``Client``."""
        session = self._here()
        return session.run(session.client.last_sequence(producer))

    def subjects(self, prefix: str = "") -> Iterator[SubjectInfo]:
        """As ``Client.subjects``."""
        brokers = self._here().parts.brokers
        for link in self._here().run(brokers.reached()):
            number = brokers.links.index(link)
            after: int | None = 0
            while after is not None:
                session = self._here()  # in the child of a fork: another one
                page, after = session.run(list_subjects(session.parts.brokers.links[number], prefix, after))
                yield from page

    def subscribe(
        self,
        *prefixes: str,
        group: str | None = None,
        consumer: str | None = None,
        start: Literal["first", "last"] | datetime | int | None = None,
        mode: Mode = "reliable",
        tags: Sequence[str] | None = None,
        **settings: Unpack[GroupSettings],
    ) -> SyncConsumer:
        """Take part in *group*, or follow alone without one; used as ``with``. See ``Client.subscribe``."""
        terms = terms_of(group, mode, {"tags": tags, **settings})
        return SyncConsumer(self._here, lambda brokers: make_puller(brokers, prefixes, group, consumer, start, terms))


class SyncMessage(Message):
    """A message of a ``SyncConsumer``: the same, but its verdicts are plain calls, and it is used as ``with``."""

    __slots__ = ()

    def ack(self) -> None:
        """As ``Message.ack``."""
        holder = self._run.holder
        if holder is not None:
            owner = holder.owner
            owner.crossing.ack(holder, self._number, owner.loop.call_soon_threadsafe)

    def nack(self, delay: float | None = None, reason: str = "") -> None:  # type: ignore[override]  # waits by itself
        """As ``Message.nack``."""
        self._wait(super().nack(delay, reason))

    def reject(self, reason: str) -> None:  # type: ignore[override]  # likewise
        """As ``Message.reject``."""
        self._wait(super().reject(reason))

    def release(self) -> None:
        """As ``Message.release``."""
        holder = self._run.holder
        if holder is not None:
            owner = holder.owner
            owner.loop.call_soon_threadsafe(owner.release, holder, self._number, self._number + 1)

    def _wait(self, verdict: Coroutine[Any, Any, None]) -> None:
        holder = self._run.holder
        if holder is None:
            verdict.close()
            raise InvalidOption("who follows alone has no group to hand a message back to")
        asyncio.run_coroutine_threadsafe(verdict, holder.owner.loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """As ``Message.__aexit__``."""
        if error is None:
            self.ack()
            return False
        holder = self._run.holder
        if holder is None:
            return False
        if not isinstance(error, Exception):
            self.release()
            return False
        self._wait(holder.owner.failed(holder, self._number, error, (self._run, self._index)))
        return True


class SyncConsumer:
    """Takes messages of a group, or follows alone. Made by ``SyncClient.subscribe``, used as ``with``.

    In the child of a fork it subscribes anew at the first call.
    """

    def __init__(self, here: Callable[[], Session], make: Callable[[Brokers], Puller | MergedPuller]) -> None:
        """*here* gives the session of the process it is called in."""
        self._here = here
        self._make = make
        self._session = here()
        self._puller = make(self._session.parts.brokers)
        self._feed = Feed(self._puller, SyncMessage)

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._puller.id

    @property
    def damaged(self) -> int:
        """Pieces of answers that were left out because nobody can read them: rotten, or made wrong by their sender."""
        return self._puller.damaged

    @property
    def on_error(self) -> Callable[[Exception], object] | None:
        """Called with the error for each such piece, when it is set. What it raises is logged."""
        return self._puller.on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._puller.on_error = call

    def __enter__(self) -> Self:
        """Subscribe; waits while no broker can be reached. Raises what the broker refuses it with."""
        self._session.run(self._puller.enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave: the broker forgets the subscription."""
        if self._session.pid == os.getpid():
            self._session.run(self._puller.leave())

    def pull(self, max_count: int = 100, min_count: int = 1, timeout: float | None = None) -> list[SyncMessage]:
        """Up to *max_count* messages, once *min_count* are there; what is there, maybe [], after *timeout* seconds."""
        return messages_of(self._pull(max_count, min_count, timeout), SyncMessage)

    def pull_batch(self, max_count: int = 10_000, min_count: int = 1, timeout: float | None = None) -> MessageBatch:
        """As ``pull``, but as columns: no object per message."""
        return MessageBatch(self._pull(max_count, min_count, timeout))

    def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced, which says how many were refused."""
        if self._session.pid == os.getpid():
            self._session.run(self._puller.flush())

    def __iter__(self) -> Iterator[SyncMessage]:
        """Message after message, without end; waits while there are none."""
        while True:
            self._come_here()
            yield from self._feed.ready
            self._session.run(self._feed.refill())

    def _pull(self, max_count: int, min_count: int, timeout: float | None) -> list[Run]:
        self._come_here()
        return self._session.run(self._feed.pull(max_count, min_count, timeout))

    def _come_here(self) -> None:
        """Be subscribed in this process."""
        session = self._here()
        if session is not self._session:
            puller = self._make(session.parts.brokers)
            puller.on_error = self._puller.on_error
            session.run(puller.enter())
            self._session, self._puller, self._feed = session, puller, Feed(puller, SyncMessage)


#: Sessions that a fork copied. Their loops share an epoll with the parent's, so nothing here may close or collect them.
_inherited: list[Session] = []
_making = threading.Lock()


def _forked() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)
