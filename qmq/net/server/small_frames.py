"""Small frames that are simple are handled as they are read, before any turn: see qmq/broker/short_way.py."""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from qmq.broker.ports.commands import Now, Pull
from qmq.format.batch import PLAIN_SIZE
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind, made
from qmq.net.server.admission import Admission
from qmq.net.server.connection import ClientConnection
from qmq.net.server.options import ShortRules
from qmq.net.server.replies import ReplyWriter

#: Size, kind with flags and the size of meta, request.
_HEAD: Final = struct.Struct("<IIQ")
_SEND: Final = int(FrameKind.SEND)
_FLUSHED_SEND: Final = _SEND | frames.FLUSH << 8
_LEAST_SEND: Final = FRAME_SIZE + PLAIN_SIZE
#: An ack of one interval whose answer may wait, behind the header: subscription, crc, start, end.
_ACK: Final = int(FrameKind.ACK) | frames.MAY_WAIT << 8
_ONE_ACK: Final = struct.Struct("<IIQQ")
_ACK_SIZE: Final = FRAME_SIZE + _ONE_ACK.size
_ACKED: Final = FRAME_SIZE + frames.ACK.size  # where the interval begins
_PULL: Final = int(FrameKind.PULL)
_PULL_SIZE: Final = FRAME_SIZE + frames.PULL.size


class SmallFrames:
    """Takes frames the short way, and writes their answers."""

    def __init__(self, rules: ShortRules, replies: ReplyWriter, admission: Admission, max_requests: int) -> None:
        self._rules = rules
        self._replies = replies
        self._admission = admission
        self._max_requests = max_requests
        #: Frames that were taken.
        self.served = 0

    def take(self, connection: ClientConnection, view: memoryview, size: int, now: Now) -> int:
        """Handle the frames at the start of a read of *size* bytes, as far as all is simple; return how many bytes they
        are. The answers are written. The rules may have left work to a turn: ``is_unfinished`` says so.
        """
        done = 0
        while size - done >= _ACK_SIZE:
            frame_size, head, request = _HEAD.unpack_from(view, done)
            if frame_size > size - done or not request or connection.in_flight >= self._max_requests:
                break
            if head in (_SEND, _FLUSHED_SEND):
                if frame_size < _LEAST_SEND or not connection.sends:
                    break
                batch = view[done + FRAME_SIZE : done + frame_size]
                answers = self._rules.send(
                    connection.number, request, batch, frame_size - FRAME_SIZE, head == _FLUSHED_SEND, now
                )
                if answers is None:
                    break
                self._count(connection)
                self._replies.answer_at_once(answers)
            elif head == _ACK and frame_size == _ACK_SIZE:
                number, crc, start, end = _ONE_ACK.unpack_from(view, done + FRAME_SIZE)
                if crc32c(view[done + _ACKED : done + _ACK_SIZE]) != crc or not self._rules.ack(
                    connection.number, request, number, start, end, now
                ):
                    break
                self._count(connection)
            elif head == _PULL and frame_size == _PULL_SIZE:
                number, most, least, most_bytes, timeout_ms, expected = frames.PULL.unpack_from(view, done + FRAME_SIZE)
                known = None if expected == frames.NOT_EXPECTED else expected
                fields = connection.number, request, number, most, least, most_bytes, timeout_ms, known, False
                if not self._rules.wait(made(Pull, fields), now):
                    break
                self._count(connection)
            else:
                break
            done += frame_size
            self.served += 1
            if self._rules.is_unfinished:
                break
        return done

    @property
    def is_unfinished(self) -> bool:
        """Whether the rules have left work to a turn."""
        return self._rules.is_unfinished

    def _count(self, connection: ClientConnection) -> None:
        connection.in_flight += 1
        self._admission.requests(1)
