"""Consumers of groups that have left when their broker could not be told: it is told on the next connection.

Until then the heartbeats of other consumers of the same client keep such a one alive, and what it holds from others.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Final, NamedTuple

from qmq.errors import QmqError
from qmq.net import wire
from qmq.net.connection import ANSWER_TIMEOUT, Answer, Connection
from qmq.net.holding import Known
from qmq.net.wire import Kind

log = logging.getLogger("qmq.client")

#: So many are remembered; of more the first are forgotten, and expire by themselves once the client ends.
MOST_DEPARTURES: Final = 10_000


class Departure(NamedTuple):
    """A consumer that has left, what it had acknowledged, and its group: a member of a broadcast has its own."""

    store_id: bytes
    group: str
    consumer: str
    nonce: bytes
    known: Known | None


class Departures:
    """Of one link."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Departure] = {}  # by nonce

    def add(self, departure: Departure, connection: Connection | None) -> None:
        """Tell the broker, now if there is a *connection* to it."""
        self._waiting[departure.nonce] = departure
        if len(self._waiting) > MOST_DEPARTURES:
            del self._waiting[next(iter(self._waiting))]
        if connection is not None:
            self._tell(departure, connection)

    def connected(self, connection: Connection, store_id: bytes) -> None:
        """There is another connection, to that store."""
        for departure in list(self._waiting.values()):
            if departure.store_id == store_id:
                self._tell(departure, connection)
            else:
                del self._waiting[departure.nonce]  # nobody there has heard of it

    def _tell(self, departure: Departure, connection: Connection) -> None:
        who = {"group": departure.group, "consumer": departure.consumer}
        known = departure.known
        if known is not None and known.handled:
            handled = {"since_us": known.since_us, "generation": known.generation, "handled": list(known.handled)}
            _ask(connection, {"action": "handled", **who, **handled}, lambda answer: None)
        _ask(connection, {"action": "leave", **who, "nonce": departure.nonce}, partial(self._told, departure))

    def _told(self, departure: Departure, answer: Answer | QmqError) -> None:
        if isinstance(answer, QmqError):
            if answer.retryable:
                return  # on the next connection
            log.debug("consumer %s could not be signed off: %s", departure.consumer, answer)
        self._waiting.pop(departure.nonce, None)


def _ask(connection: Connection, meta: dict[str, Any], callback: Any) -> None:
    due = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
    connection.ask(Kind.ADMINISTER, callback, wire.pack_meta(meta), due=due)
