"""Small frames that are simple are handled as they are read, before any turn: see qmq/broker/short_way.py."""

from __future__ import annotations

import struct
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
_HEAD: Final = struct.Struct("<IIQ")
_SEND: Final = int(FrameKind.SEND)
_FLUSHED_SEND: Final = _SEND | frames.FLUSH << 8
_LEAST_SEND: Final = FRAME_SIZE + PLAIN_SIZE
#: An ack of one interval whose answer may wait: subscription, crc, start, end.
_ACK: Final = int(FrameKind.ACK) | frames.MAY_WAIT << 8
_ONE_ACK: Final = struct.Struct("<IIQQ")
_ACK_SIZE: Final = FRAME_SIZE + _ONE_ACK.size
_ACKED: Final = FRAME_SIZE + frames.ACK.size  # where the interval begins
_PULL: Final = int(FrameKind.PULL)
_PULL_SIZE: Final = FRAME_SIZE + frames.PULL.size
#: The fields of a pull without a group, which expects nothing.
_NOT_EXPECTED: Final = frames.NOT_EXPECTED


class SmallFrames:
    """Takes frames the short way, and writes their answers."""

    def __init__(self, rules: ShortRules, replies: ReplyWriter, admission: Admission, max_requests: int) -> None:
        self._rules = rules
        self._replies = replies
        self._admission = admission
        self._max_requests = max_requests - 2  # of an ACK with a PULL, too
        #: Frames that were taken.
        self.served = 0
        #: PULLs of a read that were answered: a turn lets other connections come in between.
        self._answered = 0

    def take(self, connection: ClientConnection, view: memoryview, size: int, now: Now) -> int:
        """Handle the frames at the start of a read of *size* bytes, as far as all is simple, and write the answers.
        Return how many bytes these frames are.
        """
        self._rules.is_unfinished = False
        self._answered = done = 0
        while size - done >= _ACK_SIZE:
            frame_size: int
            frame_size, head, request = _HEAD.unpack_from(view, done)
            if frame_size > size - done or not request or connection.in_flight >= self._max_requests:
                break
            if head in (_SEND, _FLUSHED_SEND):
                if frame_size < _LEAST_SEND or not connection.sends:
                    break
                batch = view[done + FRAME_SIZE : done + frame_size]
                is_flush = head != _SEND
                answers = self._rules.send(
                    connection.number, request, batch, frame_size - FRAME_SIZE, is_flush, now
                )  # fmt: skip
                if answers is None:
                    break
                if is_flush:
                    connection.in_flight += 1
                    self._admission.requests(1)
                else:
                    self._replies.answer_at_once(connection, answers)
                self.served += 1
            else:
                frame_size = self._take_of_consumer(connection, view[done:size], head, frame_size, request, now)
                if not frame_size:
                    break
            done += frame_size
            if self._rules.is_unfinished:
                break
        return done

    @property
    def is_unfinished(self) -> bool:
        """Whether the last ``take`` has left work to a turn."""
        return self._rules.is_unfinished

    def _take_of_consumer(
        self, connection: ClientConnection, view: memoryview, head: int, size: int, request: int, now: Now
    ) -> int:  # fmt: skip
        """Handle an ACK, with the PULL that follows it if there is one, or a PULL at the start of *view*; return the
        bytes of what was done.
        """
        answers: Answers | None
        if self._answered >= PULLS_A_TURN:
            return 0
        if head == _ACK and size == _ACK_SIZE:
            number, crc, start, end = _ONE_ACK.unpack_from(view, FRAME_SIZE)
            if crc32c(view[_ACKED:_ACK_SIZE]) != crc:
                return 0
            pull = None
            if len(view) >= _ACK_SIZE + _PULL_SIZE:
                pull_size, pull_head, pull_request = _HEAD.unpack_from(view, _ACK_SIZE)
                if pull_head == _PULL and pull_size == _PULL_SIZE and pull_request:
                    pull = self._pull(connection, pull_request, view, _ACK_SIZE)
            done, answers = self._rules.ack(connection.number, request, number, start, end, pull, now)
            size = _ACK_SIZE + _PULL_SIZE if done == 2 else _ACK_SIZE
        elif head == _PULL and size == _PULL_SIZE:
            done, answers = self._rules.pull(self._pull(connection, request, view, 0), now)
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

    def _pull(self, connection: ClientConnection, request: int, view: memoryview, at: int) -> Pull:
        number, most, least, most_bytes, timeout_ms, expected = frames.PULL.unpack_from(view, at + FRAME_SIZE)
        known = None if expected == _NOT_EXPECTED else expected
        return made(Pull, (connection.number, request, number, most, least, most_bytes, timeout_ms, known, False))
