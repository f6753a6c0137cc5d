"""Effects of the broker to connections: who gets an answer, and one write for all that a turn has for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from qmq.broker.ports import effects
from qmq.broker.ports.effects import Effect
from qmq.errors import BadBatch, InvalidName, InvalidOption, MessageTooLarge, UnknownSubscription
from qmq.net.protocol import frames as wire
from qmq.net.server import answers
from qmq.net.server.admission import Holdings
from qmq.net.server.connection import Connection
from qmq.net.server.penance import ANSWER_S, Penance

log = logging.getLogger("qmq.server")

#: What a right client does not cause.
_WRONG: Final = (BadBatch, InvalidName, InvalidOption, MessageTooLarge, UnknownSubscription)

#: Acknowledgements that are part of one answer with messages.
_MOST_JOINED: Final = 64

Work = effects.SyncWanted | effects.ReadWanted | effects.CheckWanted | effects.FetchWanted


class Answering:
    """The connections that the broker knows, and what the turn has for them. *work* is told what the broker wants."""

    def __init__(self, store_id: bytes, holdings: Holdings, penance: Penance, work: Callable[[Work], None]) -> None:
        self._store_id = store_id
        self._holdings = holdings
        self._penance = penance
        #: by number
        self.connections: dict[int, Connection] = {}
        self._answered: list[Connection] = []  # with answers in this turn
        self._waited: list[Connection] = []  # those of them that get messages: they are written to first
        self._joining: list[Connection] = []  # with acknowledgements that wait for messages of this turn
        self._wrong: dict[Connection, int] = {}  # what was wrong of theirs in this turn
        #: Effects so far that changed what a checkpoint keeps.
        self.changes = 0
        self._carry_out: dict[type, Callable[[Any], object]] = {
            effects.Sent: self._sent,
            effects.Messages: self._messages,
            effects.Subscribed: self._subscribed,
            effects.Unsubscribed: partial(self._answer, encode=answers.unsubscribed),
            effects.Acked: self._acked,
            effects.HandedBack: self._handed_back,
            effects.HandedOver: self._handed_over,
            effects.Restored: self._restored,
            effects.HeartbeatSeen: partial(self._answer, encode=answers.heartbeat_seen),
            effects.Administered: partial(self._answer, encode=answers.administered),
            effects.LastSequenceIs: partial(self._answer, encode=answers.last_sequence),
            effects.Claimed: partial(self._answer, encode=answers.claimed),
            effects.SubjectList: partial(self._answer, encode=answers.subject_list),
            effects.Refused: self.refused,
            effects.SyncWanted: work,
            effects.ReadWanted: work,
            effects.CheckWanted: work,
            effects.FetchWanted: work,
            effects.SegmentList: partial(self._answer, encode=answers.segment_list),
            effects.BatchList: partial(self._answer, encode=answers.batch_list),
            effects.LogBytes: self._log_bytes,
            effects.Reported: partial(self._answer, encode=answers.reported),
        }

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Turn effects into answers, or have the work done."""
        for effect in effects:
            try:
                self._carry_out[type(effect)](effect)
            except Exception:
                log.exception("could not carry out %s", type(effect).__name__)

    def put(self, connection: Connection, answer: bytes) -> None:
        """Have it written at the end of the turn."""
        if not connection.answers:
            self._answered.append(connection)
        connection.answers.append(answer)

    def refused(self, effect: effects.Refused) -> None:
        """A request is refused; when that is the client's fault, its connection waits."""
        connection = self._answer(effect, lambda refused: wire.encode_error(refused.request, refused.error))
        if connection is not None and isinstance(effect.error, _WRONG):
            self._wrong[connection] = self._wrong.get(connection, 0) + 1

    def write(self) -> None:
        """Each connection gets its answers in one write. Who sent what was wrong is not read from for a while."""
        if self._joining:
            self._end_joining()
        answered, self._waited, self._answered = self._waited + self._answered, [], []
        for connection in answered:
            try:
                connection.write()
            except Exception:
                log.exception("could not write to connection %d", connection.number)
                connection.abort()
        if self._wrong:
            for connection, count in self._wrong.items():
                self._penance.charge(connection.took_s + count * ANSWER_S)
                if not connection.ended:
                    connection.read_little()
                    self._penance.wait(connection)
            self._wrong.clear()

    # --- one kind of effect each -------------------------------------------------------------------------------------

    def _sent(self, effect: effects.Sent) -> None:
        self.changes += 1
        connection = self.connections.get(effect.connection)
        if connection is not None:
            self._count_off(connection)
            self.put(connection, answers.sent(effect, self._store_id))

    def _messages(self, effect: effects.Messages) -> None:
        if effect.messages:
            self.changes += 1
        connection = self.connections.get(effect.connection)
        if connection is not None:
            self._count_off(connection)
            if not connection.answers:
                self._waited.append(connection)
            acked = connection.acked
            connection.answers += (answers.messages(effect, acked), *effect.buffers)
            if acked:
                connection.acked = []

    def _log_bytes(self, effect: effects.LogBytes) -> None:
        connection = self._answer(effect, answers.log_bytes)
        if connection is not None and len(effect.data):
            connection.answers.append(effect.data)

    def _subscribed(self, effect: effects.Subscribed) -> None:
        self.changes += 1
        self._answer(effect, answers.subscribed)

    def _acked(self, effect: effects.Acked) -> None:
        self.changes += 1
        connection = self.connections.get(effect.connection)
        if connection is None:
            return
        self._count_off(connection)
        if effect.joins and len(connection.acked) < _MOST_JOINED:
            if not connection.acked:
                self._joining.append(connection)
            connection.acked.append(effect.request)
        else:
            self.put(connection, answers.acked(effect.request, effect.refused))

    def _end_joining(self) -> None:
        """No messages came for these in this turn."""
        for connection in self._joining:
            for request in connection.acked:
                self.put(connection, answers.acked(request, 0))
            connection.acked = []
        self._joining.clear()

    def _handed_back(self, effect: effects.HandedBack) -> None:
        self.changes += 1
        self._answer(effect, answers.handed_back)

    def _handed_over(self, effect: effects.HandedOver) -> None:
        self.changes += 1
        self._answer(effect, answers.handed_over)

    def _restored(self, effect: effects.Restored) -> None:
        self.changes += 1
        self._answer(effect, answers.restored)

    def _answer(self, effect: Any, encode: Callable[[Any], bytes]) -> Connection | None:
        connection = self.connections.get(effect.connection)
        if connection is not None:
            self._count_off(connection)
            connection.listings.discard(effect.request)
            self.put(connection, encode(effect))
        return connection

    def _count_off(self, connection: Connection) -> None:
        connection.in_flight -= 1
        self._holdings.requests(-1)
