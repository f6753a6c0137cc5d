"""Consumers of groups that have left when their broker could not be told: it is told on the next connection.

Until then the heartbeats of other consumers of the same client keep such a one alive, and what it holds from others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from qmq.errors import QmqError
from qmq.net.client.connection import ANSWER_TIMEOUT, Answer, BrokerConnection
from qmq.net.client.consumer.in_flight import KnownConsumer
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind

log = logging.getLogger("qmq.client")

#: So many are on their way to the broker at once, of all requests that it takes of a connection.
AT_ONCE: Final = 100


class Departure(NamedTuple):
    """A consumer that has left, what it had acknowledged, and its group: a member of a broadcast has its own."""

    store_id: bytes
    group: str
    consumer: str
    nonce: bytes
    known: KnownConsumer | None


class Departures:
    """Of one link."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Departure] = {}  # by nonce
        self._sent: set[bytes] = set()  # of these, on the connection that there is

    def add(self, departure: Departure, connection: BrokerConnection | None) -> None:
        """Tell the broker, now if there is a *connection* to it."""
        self._waiting[departure.nonce] = departure
        if connection is not None:
            self._tell_some(connection)

    def connected(self, connection: BrokerConnection, store_id: bytes) -> None:
        """There is another connection, to that store: no other has heard of its consumers."""
        self._waiting = {nonce: one for nonce, one in self._waiting.items() if one.store_id == store_id}
        self._sent.clear()
        self._tell_some(connection)

    def _tell_some(self, connection: BrokerConnection) -> None:
        left = (one for one in self._waiting.values() if one.nonce not in self._sent)
        for departure in list(islice(left, max(AT_ONCE - len(self._sent), 0))):
            self._sent.add(departure.nonce)
            self._tell(departure, connection)

    def _tell(self, departure: Departure, connection: BrokerConnection) -> None:
        who = {"group": departure.group, "consumer": departure.consumer}
        known = departure.known
        if known is not None and known.handled:
            handled = {"since_us": known.since_us, "generation": known.generation, "handled": list(known.handled)}
            _ask(connection, {"action": "handled", **who, **handled}, lambda answer: None)
        leave = {"action": "leave", **who, "nonce": departure.nonce}
        _ask(connection, leave, partial(self._told, departure, connection))

    def _told(self, departure: Departure, connection: BrokerConnection, answer: Answer | QmqError) -> None:
        if isinstance(answer, QmqError):
            if answer.retryable:
                return  # on the next connection
            log.debug("consumer %s could not be signed off: %s", departure.consumer, answer)
        self._waiting.pop(departure.nonce, None)
        self._sent.discard(departure.nonce)
        if not connection.closed:
            self._tell_some(connection)


def _ask(connection: BrokerConnection, meta: dict[str, Any], callback: Callable[[Answer | QmqError], None]) -> None:
    due = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
    connection.ask(FrameKind.ADMINISTER, callback, frames.pack_meta(meta), due=due)
