"""The order in which answers are written."""

from __future__ import annotations

from typing import Any

from qmq.broker.ports import effects
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.protocol.messages import EMPTY_HEAD, decode_head
from qmq.net.server.admission import Admission, Throttle
from qmq.net.server.connection import ClientConnection
from qmq.net.server.replies import ReplyWriter


class Noting(ClientConnection):
    """Records when it is written to, and how much."""

    def __init__(self, number: int, written: list[tuple[int, int]]) -> None:
        self.number = number
        self.in_flight = 1
        self.answers = []
        self.acked = []
        self.listings = set()
        self._written = written

    def write(self) -> None:
        self._written.append((self.number, len(self.answers)))
        self.answers = []


def answering(loop: Any = None) -> tuple[ReplyWriter, list[tuple[int, int]]]:
    made = ReplyWriter(b"store!", Admission(1 << 20, ClientConnection.unread_bytes), Throttle(loop), lambda work: None)
    written: list[tuple[int, int]] = []
    for number in (1, 2, 3):
        made.connections[number] = Noting(number, written)
    return made, written


def frames_of(connection: ClientConnection) -> list[Frame]:
    return list(frames.split_frames(memoryview(b"".join(connection.answers)), 1 << 20))


def test_messages_leave_before_receipts() -> None:
    made, written = answering()
    made.carry_out([effects.Sent(1, 1, 0, 1, 0, 0), effects.PulledMessages(2, 1, [b"message"], 7, 1)])
    made.write()
    assert written == [(2, 2), (1, 1)]


def test_several_answers_are_one_write_in_their_order() -> None:
    made, written = answering()
    receipt, messages = effects.Sent(1, 1, 0, 1, 0, 0), effects.PulledMessages(1, 2, [b"message"], 7, 1)
    made.carry_out([receipt, messages, effects.Sent(3, 1, 0, 1, 0, 0)])
    assert bytes(made.connections[1].answers[-1]) == b"message"
    made.write()
    made.write()
    assert written == [(1, 3), (3, 1)]


def test_an_acknowledgement_that_joins_is_part_of_the_messages_that_follow_it() -> None:
    made, written = answering()
    acked = [effects.Acked(1, 6, 0, joins=True), effects.Acked(1, 9, 0, joins=True), effects.Acked(1, 10, 1)]
    made.carry_out([*acked, effects.PulledMessages(1, 2, [], 0, 0), effects.PulledMessages(1, 3, [], 0, 0)])
    refused, first, second = frames_of(made.connections[1])
    assert (refused.kind, refused.request) == (FrameKind.ACKED, 10)
    assert (first.kind, decode_head(first.meta).acked) == (FrameKind.MESSAGES, (6, 9))
    assert (second.kind, decode_head(second.meta)) == (FrameKind.MESSAGES, EMPTY_HEAD)
    made.write()
    assert written == [(1, 3)]


def test_an_ack_that_no_messages_follow_is_answered_at_the_end_of_the_turn() -> None:
    made, written = answering()
    made.carry_out([effects.Acked(1, 6, 0, joins=True), effects.PulledMessages(2, 2, [], 0, 0)])
    assert not made.connections[1].answers
    made.write()
    assert written == [(2, 1), (1, 1)]
    assert not made.connections[1].acked
    many = [effects.Acked(3, number, 0, joins=True) for number in range(1, 101)]
    made.carry_out([*many, effects.PulledMessages(3, 101, [], 0, 0)])
    *alone, messages = frames_of(made.connections[3])
    assert [frame.kind for frame in alone] == [FrameKind.ACKED] * 36
    assert len(decode_head(messages.meta).acked) == 64
