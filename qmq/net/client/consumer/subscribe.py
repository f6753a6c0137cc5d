"""The subscription of a consumer at one broker, made again on each new connection."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from qmq.errors import (
    ConnectionLost,
    GroupMismatch,
    InvalidName,
    ProtocolError,
    QmqError,
    UnknownSubscription,
    UsageError,
)
from qmq.names import check_consumer, check_group, check_prefix
from qmq.net.client.backoff import Backoff, RefusalLog
from qmq.net.client.broker_link import Departure, Link
from qmq.net.client.connection import ANSWER_TIMEOUT, Answer, BrokerConnection
from qmq.net.client.consumer.ack_file import AckFile
from qmq.net.client.consumer.acks import AckSender
from qmq.net.client.consumer.solo_cursor import SoloCursor, without_covered
from qmq.net.client.group_settings import SubscriptionTerms, shown_settings
from qmq.net.client.options import Start, make_consumer_id, start_of
from qmq.net.client.tasks import begin_task
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import AGAIN, FOLLOW, LOOK, ConsumerState, KnownConsumer

log = logging.getLogger("qmq.client")

#: How often in a row to repeat a request that the broker calls invalid: it was valid, so a byte may have flipped.
MAX_DOUBTS: Final = 3

Subscribed = tuple[BrokerConnection, int]


class ConsumerSubscription:
    """Subscribes one consumer at one broker, and again after a reconnect."""

    def __init__(
        self,
        link: Link,
        prefixes: Sequence[str],
        group: str | None,
        consumer: str | None,
        start: Start,
        terms: SubscriptionTerms,
        is_transient: bool | None,
    ) -> None:
        """Make it without subscribing. *is_transient*: the broker forgets the consumer once it has left; None: forget
        it if it was not given an id.

        Raises InvalidName and InvalidOption.
        """
        if not prefixes:
            raise InvalidName('subscribe needs at least one subject or prefix; "" is everything')
        names = [check_prefix(prefix) for prefix in prefixes]
        #: The consumer's id.
        self.id = check_consumer(consumer) if consumer is not None else make_consumer_id()
        #: Sends acks and nacks; None for solo consumers and at_most_once groups, which send none.
        self.ack_sender = (
            AckSender(self.id, self.subscribed) if group is not None and terms.mode != "at_most_once" else None
        )
        self._prefixes = names if group is not None else without_covered(names)
        #: How far a solo consumer has come; None for a group.
        self.solo_cursor = SoloCursor(self._prefixes, None) if group is None else None
        #: The store of the last subscription.
        self.store_id: bytes | None = None
        #: Connection and number of the last subscription; the connection may be lost.
        self.current: Subscribed | None = None
        self.inside = False
        #: Whether the consumer was left because its client is closed.
        self.client_closes = False
        self._link = link
        self._group = check_group(group) if group is not None else None
        self._start = start_of(start)
        self._terms = terms
        self._warned_of_settings = False
        self._transient = consumer is None if is_transient is None else is_transient
        self._number = next(link.session_numbers)
        self._nonce = secrets.token_bytes(16)  # the same over reconnects: the broker recognises the subscriber by it
        #: The state that the ack file has from an earlier process, if any.
        self._saved: KnownConsumer | None = None
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[Answer] | None = None  # the answer to a SUBSCRIBE that was sent
        self._asked_store_id: bytes | None = None  # the store whose broker may know this consumer as present
        self._backoff = Backoff()
        self._refusals = RefusalLog(f"consumer {self.id} cannot subscribe yet")
        if self.ack_sender is not None:
            self.ack_sender.on_connected = self._begin
            if not self._transient and group is not None:
                self.ack_sender.ack_file = AckFile(group, self.id, self.ack_sender.snapshot)
            self.ack_sender.on_dropped.append(self.forget)

    async def enter(self) -> None:
        """Subscribe; wait while no broker can be reached. Raises the broker's refusal."""
        await self._subscribe()
        self.inside = True

    def leave(self, known: KnownConsumer | None = None) -> asyncio.Future[None]:
        """End the subscription in the background; the future is done when the broker has answered, or cannot answer.

        If the connection ends before the broker has answered, *known* goes to the broker later, with the departure.
        """
        self.inside = False
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # mark its exception as retrieved: no other code will
        self._task = None
        current, self.current = self.current, None
        asking, self._asking = self._asking, None  # the task that waits for it is cancelled, and undoes it
        asked_at, self._asked_store_id = self._asked_store_id, None
        departure = self._departure(asked_at, known) if asked_at is not None else None
        if current is not None and not current[0].closed:
            return self._unsubscribe(*current, departure)
        if asking is None:
            self._depart(departure)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _unsubscribe(
        self, connection: BrokerConnection, subscription: int, departure: Departure | None
    ) -> asyncio.Future[None]:
        """Send UNSUBSCRIBE; if the connection ends before the answer, have the link send *departure* later."""
        done = asyncio.get_running_loop().create_future()

        def answered(answer: Answer | QmqError) -> None:
            if isinstance(answer, QmqError):
                log.debug("consumer %s did not unsubscribe: %r", self.id, answer)
                if answer.retryable:
                    self._depart(departure)
            if not done.done():
                done.set_result(None)

        due = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
        connection.ask(FrameKind.UNSUBSCRIBE, answered, payload=frames.UNSUBSCRIBE.pack(subscription), due=due)
        return done

    def _departure(self, store_id: bytes, known: KnownConsumer | None) -> Departure | None:
        """Return the departure to send if the connection is gone; None if the broker forgets the consumer with it."""
        if self.ack_sender is None or self._group is None:
            return None
        group = f"{self._group}@{self.id}" if self._terms.mode == "broadcast" else self._group
        return Departure(store_id, group, self.id, self._nonce, known)

    def _depart(self, departure: Departure | None) -> None:
        if departure is not None:
            self._link.depart(departure)

    def not_subscribed(self) -> QmqError:
        """Return the error for calls before ``enter`` and after ``leave``."""
        if self.client_closes:
            return UsageError("the client is closed; call connect for another")
        return UnknownSubscription(
            f"consumer {self.id} is not subscribed; use it inside `async with client.subscribe(...) as consumer`"
        )

    def forget(self) -> None:
        """Have the next call subscribe again."""
        self.current = None

    @property
    def is_current(self) -> bool:
        """Whether there is a subscription on the connection in use."""
        return self.current is not None and self.current[0] is self._link.connection

    async def subscribed_by(self, deadline: float | None) -> Subscribed | None:
        """Return connection and subscription, after subscribing on a new connection; None at the deadline.

        Raises errors that a retry cannot mend.
        """
        while not self.is_current:
            if not self.inside:
                raise self.not_subscribed()
            self._begin()
            task = self._task  # other tasks may wait for it too
            assert task is not None
            left = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                return None
            if self._task is task:
                self._task = None
            if not task.cancelled():
                task.result()
        return self.current

    async def subscribed(self) -> Subscribed:
        """Return connection and subscription as soon as there are any. Raises errors that a retry cannot mend."""
        subscribed = await self.subscribed_by(None)
        assert subscribed is not None
        return subscribed

    def _begin(self) -> None:
        """Start to subscribe in the background, unless there is a subscription or a task that makes one."""
        if self._task is not None and self._task.done() and not self._task.cancelled() and not self._task.exception():
            self._task = None
        if self._task is None and self.inside and not self.is_current:
            self._task = begin_task(self._subscribe(), asyncio.get_running_loop(), "qmq-subscribe")

    async def _subscribe(self) -> None:
        """Subscribe as soon as the broker can be reached. Raises errors that a retry cannot mend."""
        doubts = 0
        while True:
            connection = await self._link.connected()
            try:
                await self._subscribe_on(connection)
                return
            except QmqError as error:
                # This request was damaged on the way, or another one on the connection was.
                is_doubtful = type(error) is ProtocolError
                doubts += is_doubtful
                if not error.retryable and not (is_doubtful and doubts < MAX_DOUBTS):
                    raise
                self._refusals.came(error)
            await asyncio.sleep(self._backoff.next_delay())

    async def _subscribe_on(self, connection: BrokerConnection) -> None:
        store_id, asked_at = self._link.store_id, asyncio.get_running_loop().time()
        if self.ack_sender is not None and self.ack_sender.ack_file is not None:
            self._saved = await self.ack_sender.ack_file.open(store_id) or self._saved
        answer = await self._ask(connection, self._subscribe_meta(store_id))
        subscription = _subscription_in(answer)
        if subscription is None:
            connection.abort(
                ConnectionLost(f"the connection to {connection.address} ends: its answer grants no subscription")
            )
            raise connection.end_error()
        if (differing := answer.meta.get("differing")) and not self._warned_of_settings:
            await self._take_difference(connection, subscription, differing)
        self.current = connection, subscription
        if self.ack_sender is not None:
            self._take_attempts(answer.meta)
            self.ack_sender.nack_sender.store_id = store_id
            self.ack_sender.joined(_consumer_state_in(answer))
            self._link.add_session(self.ack_sender, asked_at)
        self.store_id = store_id
        self._backoff.reset()
        start_us = answer.meta.get("start_us")
        if self.solo_cursor is not None and self.solo_cursor.floor_us is None and isinstance(start_us, int):
            self.solo_cursor.begin_at(start_us)

    def _take_attempts(self, meta: dict[str, Any]) -> None:
        """Take from the answer how often, and after which delays, the group tries a message, for logs and programs."""
        assert self.ack_sender is not None
        max_attempts, delays_us = meta.get("max_attempts"), meta.get("retry_delays_us")
        if type(max_attempts) is int and type(delays_us) is list and all(type(one) is int for one in delays_us):
            failures = self.ack_sender.failures
            failures.max_attempts, failures.retry_delays_us = max_attempts, delays_us

    async def _ask(self, connection: BrokerConnection, meta: dict[str, Any]) -> Answer:
        """Send SUBSCRIBE and return the answer. If this call is cancelled, an answer that still comes is undone."""
        loop = asyncio.get_running_loop()
        self._asking = asking = loop.create_future()

        def answered(answer: Answer | QmqError) -> None:
            if isinstance(answer, QmqError):
                asking.set_exception(answer)
            else:
                asking.set_result(answer)

        connection.ask(FrameKind.SUBSCRIBE, answered, frames.pack_meta(meta), due=loop.time() + ANSWER_TIMEOUT)
        store_id = self._link.store_id
        asked_before, self._asked_store_id = self._asked_store_id, store_id
        try:
            answer: Answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(partial(self._undo, connection, self._departure(store_id, None)))
            raise
        except QmqError as error:
            if not error.retryable:
                self._asked_store_id = asked_before
            self._asking = None
            raise
        self._asking = None
        return answer

    def _undo(self, connection: BrokerConnection, departure: Departure | None, asking: asyncio.Future[Answer]) -> None:
        """Unsubscribe from the subscription that a cancelled call was granted."""
        if asking.cancelled():
            return
        error = asking.exception()
        subscription = _subscription_in(asking.result()) if error is None else None
        if subscription is not None:
            self._unsubscribe(connection, subscription, departure)
        elif error is None or (isinstance(error, QmqError) and error.retryable):
            self._depart(departure)

    async def _take_difference(
        self, connection: BrokerConnection, subscription: int, differing: dict[str, Any]
    ) -> None:
        """Act, once, as *on_difference* says on a group that has other settings than the requested ones. Raises
        GroupMismatch if it says so.
        """
        shown = ", ".join(f"{name}={value!r}" for name, value in shown_settings(differing).items())
        if self._terms.on_difference == "raise":
            self._unsubscribe(connection, subscription, self._departure(self._link.store_id, None))
            raise GroupMismatch(
                f"group {self._group} exists with other settings than requested: {shown}; change them with "
                "`qmq groups set`, or subscribe with those, or with on_difference"
            )
        self._warned_of_settings = True
        if self._terms.on_difference == "apply":
            wanted = {name: value for name, value in self._terms.settings.items() if name in differing}
            await connection.request(
                FrameKind.ADMINISTER, {"action": "set_group", "group": self._group, "settings": wanted}
            )
            log.info("consumer %s: settings of group %s changed; they were: %s", self.id, self._group, shown)
        else:
            log.warning(
                "consumer %s: group %s exists with other settings than requested: %s; "
                "`qmq groups set` changes them", self.id, self._group, shown,
            )  # fmt: skip

    def _subscribe_meta(self, store_id: bytes) -> dict[str, Any]:
        """Return the meta of SUBSCRIBE."""
        start, solo_cursor = self._start, self.solo_cursor
        if solo_cursor is not None:
            if self.store_id is not None:
                solo_cursor.resume(store_id == self.store_id)
            if solo_cursor.floor_us is not None:
                start = ["time", solo_cursor.floor_us]
        meta: dict[str, Any] = {
            "group": self._group, "prefixes": self._prefixes, "consumer": self.id, "start": start
        }  # fmt: skip
        if self._group is not None:
            asks = LOOK if self._terms.looks else AGAIN if self.store_id == store_id else FOLLOW
            meta |= {"mode": self._terms.mode, "settings": dict(self._terms.settings), "asks": asks}
        if self.ack_sender is not None:
            meta |= {
                "nonce": self._nonce, "client": self._link.client_id, "session": self._number,
                "transient": self._transient,
            }  # fmt: skip
            known = self.ack_sender.known() or self._saved
            if known is not None:
                numbers = [*known[:4], *known.handled]
                meta |= {"known": numbers, "known_crc": frames.pack_numbers(numbers)[1]}
        return meta


def _subscription_in(answer: Answer) -> int | None:
    """Return the subscription number that the answer grants, or None."""
    number = answer.meta.get("subscription")
    return number if type(number) is int and 0 <= number < 1 << 32 else None


def _consumer_state_in(answer: Answer) -> ConsumerState:
    """Return the consumer state in the answer. Raises ProtocolError."""
    numbers = answer.meta.get("consumer_state")
    if (
        type(numbers) is not list
        or len(numbers) < len(ConsumerState._fields)
        or not all(type(one) is int for one in numbers)
    ):
        raise ProtocolError("the broker's answer has no consumer state")
    return ConsumerState(*numbers[: len(ConsumerState._fields)])
