"""The client without asyncio: the same client, driven on a loop in a background thread. Usable after fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from qmq.errors import ConnectionLost
from qmq.format.build import make_header
from qmq.net.client.admin import Admin
from qmq.net.client.client import SubjectInfo, list_subjects
from qmq.net.client.consumer.multi_broker import make_puller
from qmq.net.client.group_settings import GroupSettings, terms_of
from qmq.net.client.options import Body, ClientOptions, Durability, body_of, deliver_at_of, expire_at_of
from qmq.net.client.producer.receipts import Receipt, Receipts
from qmq.net.client.sync.admin import SyncAdmin
from qmq.net.client.sync.consumer import SyncConsumer
from qmq.net.client.sync.loop_thread import ClientThread
from qmq.net.protocol.types import Mode


class SyncClient:
    """A client of one broker for code without asyncio. Made by ``qmq.connect_sync``, used as ``with``; for any thread.

    In the child of a fork it connects anew at the first call, with another producer id; what the parent has queued, and
    its consumers' messages, stay the parent's.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._session: ClientThread | None = None
        #: Groups, their consumers and dead letters.
        self.admin = SyncAdmin(self._administer)

    def _administer(self, call: Callable[[Admin], Coroutine[Any, Any, Any]]) -> Any:
        session = self._here()
        return session.run(call(session.client.admin))

    def __enter__(self) -> Self:
        """Connect. Raises ConnectionLost when no address answers, and what a broker refuses us with."""
        self._session = ClientThread(self._options)
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

    def _here(self) -> ClientThread:
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
                session = self._session = ClientThread(self._options)
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
        session = self._here()
        parts = session.parts
        for number in [parts.brokers.links.index(link) for link in session.run(parts.listing.begin())]:
            after: int | None = 0
            while after is not None:
                session = self._here()  # in the child of a fork: another one
                parts = session.parts
                link = parts.brokers.links[number]
                page = session.run(parts.listing.page(link, list_subjects(link, prefix, after)))
                infos, after = page or ([], None)
                yield from infos

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
    ) -> SyncConsumer:
        """Take part in *group*, or follow alone without one; used as ``with``. See ``Client.subscribe``."""
        terms = terms_of(group, mode, {"tags": tags, **settings}, looks=look)
        return SyncConsumer(self._here, lambda brokers: make_puller(brokers, prefixes, group, consumer, start, terms))


#: Sessions that a fork copied. Their loops share an epoll with the parent's, so nothing here may close or collect them.
_inherited: list[ClientThread] = []
_making = threading.Lock()


def _forked() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)
