"""qmq/net/server/answering.py: in which order answers leave."""

from __future__ import annotations

from typing import Any

from qmq.broker import effects
from qmq.net.server.answering import Answering
from qmq.net.server.connection import Connection
from qmq.net.server.holdings import Holdings
from qmq.net.server.penance import Penance


class Noting(Connection):
    """Notes when it is written to, and how much."""

    def __init__(self, number: int, written: list[tuple[int, int]]) -> None:
        self.number = number
        self.in_flight = 1
        self.answers = []
        self.listings = set()
        self._written = written

    def write(self) -> None:
        self._written.append((self.number, len(self.answers)))
        self.answers = []


def answering(loop: Any = None) -> tuple[Answering, list[tuple[int, int]]]:
    made = Answering(b"store!", Holdings(1 << 20, Connection.unread_bytes), Penance(loop), lambda work: None)
    written: list[tuple[int, int]] = []
    for number in (1, 2, 3):
        made.connections[number] = Noting(number, written)
    return made, written


def test_messages_leave_before_receipts() -> None:
    made, written = answering()
    made.carry_out([effects.Sent(1, 1, 0, 1, 0, 0), effects.Messages(2, 1, [b"message"], 7, 1)])
    made.write()
    assert written == [(2, 2), (1, 1)]


def test_who_gets_several_answers_gets_them_in_one_write_and_in_their_order() -> None:
    made, written = answering()
    receipt, messages = effects.Sent(1, 1, 0, 1, 0, 0), effects.Messages(1, 2, [b"message"], 7, 1)
    made.carry_out([receipt, messages, effects.Sent(3, 1, 0, 1, 0, 0)])
    assert bytes(made.connections[1].answers[-1]) == b"message"
    made.write()
    made.write()
    assert written == [(1, 3), (3, 1)]
