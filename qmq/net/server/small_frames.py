"""Small frames that are simple are handled as they are read, before any turn: see qmq/broker/short_way.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from crc32c import crc32c

from qmq.broker.ports.commands import Now, Pull
from qmq.format.batch import PLAIN_SIZE
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind, made
from qmq.net.server.admission import PULLS_A_TURN, Admission
from qmq.net.server.connection import ClientConnection
from qmq.net.server.options import Answers, ShortRules
from qmq.net.server.replies import ReplyWriter

#: Size, kind with flags and the size of meta, request.
_unpack_head: Final = struct.Struct("<IIQ").unpack_from
_SEND: Final = int(FrameKind.SEND)
_FLUSHED_SEND: Final = _SEND | frames.FLUSH << 8
_SENDS: Final = (_SEND, _FLUSHED_SEND)
_LEAST_SEND: Final = FRAME_SIZE + PLAIN_SIZE
#: An ack of one interval whose answer may wait: subscription, crc, start, end.
_ACK: Final = int(FrameKind.ACK) | frames.MAY_WAIT << 8
_ONE_ACK: Final = struct.Struct("<IIQQ")
_ACK_SIZE: Final = FRAME_SIZE + _ONE_ACK.size
_unpack_ack: Final = _ONE_ACK.unpack_from
_ACKED: Final = FRAME_SIZE + frames.ACK.size  # where the interval begins
_PULL: Final = int(FrameKind.PULL)
_PULL_SIZE: Final = FRAME_SIZE + frames.PULL.size
#: A whole PULL frame: size, kind, request, and the fields of frames.PULL.
_unpack_pull: Final = struct.Struct("<IIQIIIIIQ").unpack_from
#: The fields of a pull without a group, which expects nothing.
_NOT_EXPECTED: Final = frames.NOT_EXPECTED


class SmallFrames:
    """Takes frames the short way, and writes their answers."""

    def __init__(self, rules: ShortRules, replies: ReplyWriter, admission: Admission, max_requests: int) -> None:
        #: The broker's part of it.
        self.rules = rules
        self._replies = replies
        self._admission = admission
        self._max_requests = max_requests - 2  # of an ACK with a PULL, too
        #: Frames that were taken.
        self.served = 0
        #: PULLs of a read that were answered: a turn lets other connections come in between.
        self._answered = 0

    def take(self, connection: ClientConnection, view: memoryview, size: int, now: Now) -> int:
        """Handle the frames at the start of *view*, a read of *size* bytes and what is behind it, as far as all is
        simple, and write the answers. Return how many bytes these frames are.
        """
        rules = self.rules
        rules.is_unfinished = False
        self._answered = done = 0
        while size - done >= _ACK_SIZE:
            frame_size: int
            frame_size, head, request = _unpack_head(view, done)
            end = done + frame_size
            if end > size or not request or connection.in_flight >= self._max_requests:
                break
            if head in _SENDS:
                if frame_size < _LEAST_SEND or not connection.sends:
                    break
                batch, is_flush = view[done + FRAME_SIZE : end], head != _SEND
                answers = rules.send(connection.number, request, batch, frame_size - FRAME_SIZE, is_flush, now)
                if answers is None:
                    break
                if is_flush:
                    connection.in_flight += 1
                    self._admission.requests(1)
                else:
                    self._replies.answer_at_once(connection, answers)
                self.served += 1
            else:
                frame_size = self._take_of_consumer(connection, view, done, size, head, frame_size, request, now)
                if not frame_size:
                    break
                end = done + frame_size
            done = end
            if rules.is_unfinished:
                break
        if rules.is_sync_wanted:
            self._replies.carry_out(rules.take_syncs())  # the disk starts before any turn
        return done

    def _take_of_consumer(
        self, connection: ClientConnection, view: memoryview, at: int, stop: int, head: int, size: int, request: int,
        now: Now,
    ) -> int:  # fmt: skip
        """Handle an ACK, with the PULL that follows it before *stop* if there is one, or a PULL at *at* of *view*;
        return the bytes of what was done.
        """
        answers: Answers | None
        if self._answered >= PULLS_A_TURN:
            return 0
        if head == _ACK and size == _ACK_SIZE:
            number, crc, start, end = _unpack_ack(view, at + FRAME_SIZE)
            behind = at + _ACK_SIZE
            if crc32c(view[at + _ACKED : behind]) != crc:
                return 0
            pull = None
            if stop - behind >= _PULL_SIZE:
                pull_size, pull_head, *fields = _unpack_pull(view, behind)
                if pull_head == _PULL and pull_size == _PULL_SIZE and fields[0]:
                    pull = _pull_of(connection.number, fields)
            done, answers = self.rules.ack(connection.number, request, number, start, end, pull, now)
            size = _ACK_SIZE + _PULL_SIZE if done == 2 else _ACK_SIZE
        elif head == _PULL and size == _PULL_SIZE:
            done, answers = self.rules.pull(_pull_of(connection.number, _unpack_pull(view, at)[2:]), now)
        else:
            return 0
        if not done:
            return 0
        connection.in_flight += done
        self._admission.requests(done)
        self.served += done
        if answers is not None:
            self._answered += 1
            self._replies.answer_at_once(connection, answers)
        return size


def _pull_of(connection: int, fields: Sequence[int]) -> Pull:
    """Return the command of a PULL frame with these fields: request, and those of frames.PULL."""
    request, number, most, least, most_bytes, timeout_ms, expected = fields
    known = None if expected == _NOT_EXPECTED else expected
    return made(Pull, (connection, request, number, most, least, most_bytes, timeout_ms, known, False))
