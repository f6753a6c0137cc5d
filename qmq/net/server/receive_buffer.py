"""Where received bytes land: one buffer that all connections share, so that an idle connection holds none. No I/O.

The frames of one turn of the loop lie in the receive_buffer one after another and stay there, as views, until ``reset`` at the
end of the turn. A frame that is not complete when its bytes end stays where it is while its connection goes on reading;
when another connection reads first it is moved: into a buffer of exactly its size when it is large, so that it is not
copied again, else into a small one that is put back in front of the bytes that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from qmq.net.protocol.frames import FRAME, FRAME_SIZE

#: Takes what a socket holds in one read, and several such reads in a turn. Frames of 1 MB took 19 % less processor time
#: with 8 MiB than with 2 MiB, and no less with 16 MiB; frames of 110 KB do not care.
RECEIVE_BUFFER_BYTES: Final = 8 << 20
#: An partial_frame frame over this gets a buffer of its own when it must leave the receive_buffer.
SMALL_BYTES: Final = 64 << 10
#: With less room than this the turn is run at once.
_LEAST_ROOM: Final = 256 << 10


class PartialFrame:
    """The frame that a connection has received a part of: in ``part``, or in ``whole`` up to ``filled``, or nothing."""

    __slots__ = ("filled", "buffered", "part", "on_buffered", "whole")

    def __init__(self, on_buffered: Callable[[int], None] = lambda size: None) -> None:
        """*tell* is called with the bytes that are buffered for it outside of the receive_buffer, 0 when it is complete."""
        self.on_buffered = on_buffered
        self.buffered = 0
        self.part = b""
        self.whole: memoryview | None = None
        self.filled = 0

    def set_buffered(self, size: int) -> None:
        """So many bytes are buffered for it now."""
        if size != self.buffered:
            self.buffered = size
            self.on_buffered(size)


class ReceiveBuffer:
    """Hands out room to receive into and gives back what was received, each connection's frames in one piece."""

    def __init__(self, size: int = RECEIVE_BUFFER_BYTES) -> None:
        self._bytes = memoryview(bytearray(size))
        self._size = size
        self._tail = 0
        #: whose partial_frame frame is bytes [start, tail), if anyone's
        self._owner: PartialFrame | None = None
        self._start = 0

    @property
    def short(self) -> bool:
        """There is little room left: ``reset`` is due."""
        return self._size - self._tail < _LEAST_ROOM

    def room(self, partial_frame: PartialFrame) -> memoryview:
        """Where the next bytes of a connection go. Holds until ``received`` or the next ``room``."""
        if partial_frame.whole is not None:
            return partial_frame.whole[partial_frame.filled :]
        if self._owner is not partial_frame:
            self._move_out()
            part = partial_frame.part
            if part:
                self._start = self._tail
                self._tail += len(part)
                self._bytes[self._start : self._tail] = part
                self._owner, partial_frame.part = partial_frame, b""
        return self._bytes[self._tail :]

    def received(self, partial_frame: PartialFrame, count: int) -> memoryview | None:
        """*count* bytes came into the last ``room``: the bytes that begin with the connection's next frame.

        None while a large frame is not complete. Else ``keep`` must follow.
        """
        whole = partial_frame.whole
        if whole is not None:
            partial_frame.filled += count
            return whole if partial_frame.filled == len(whole) else None
        if self._owner is not partial_frame:
            self._owner, self._start = partial_frame, self._tail
        self._tail += count
        return self._bytes[self._start : self._tail]

    def consume(self, partial_frame: PartialFrame, used: int) -> None:
        """Frames of *used* bytes were complete in what ``received`` gave; what follows is partial_frame."""
        if partial_frame.whole is not None:
            partial_frame.whole, partial_frame.filled = None, 0
            partial_frame.set_buffered(0)
            return
        if used:
            partial_frame.set_buffered(0)
        self._start += used
        rest = self._tail - self._start
        if not rest:
            self._owner = None
        elif rest >= FRAME_SIZE and self._frame_size() > self._size // 2:
            self._move_out()

    def forget(self, partial_frame: PartialFrame) -> None:
        """The connection is gone, and what it did not finish with it."""
        if self._owner is partial_frame:
            self._owner, self._tail = None, self._start
        partial_frame.part, partial_frame.whole, partial_frame.filled = b"", None, 0
        partial_frame.set_buffered(0)

    def reset(self) -> None:
        """The turn is over: nobody looks at its frames any more."""
        if self._owner is None:
            self._tail = 0
            return
        rest = self._tail - self._start
        if rest <= SMALL_BYTES or self._start + self._frame_size() + _LEAST_ROOM > self._size:
            self._bytes[:rest] = self._bytes[self._start : self._tail]
            self._start, self._tail = 0, rest

    def _move_out(self) -> None:
        owner = self._owner
        if owner is None:
            return
        part = self._bytes[self._start : self._tail]
        size = self._frame_size() if len(part) >= FRAME_SIZE else 0
        if size > SMALL_BYTES:
            owner.whole = np.empty(size, np.uint8).data
            owner.whole[: len(part)] = part
            owner.filled = len(part)
            owner.set_buffered(size)
        else:
            owner.part = bytes(part)
            owner.set_buffered(len(part))
        self._owner, self._tail = None, self._start

    def _frame_size(self) -> int:
        """What the header of the partial_frame frame says; it was checked when the frames before it were split off."""
        size: int = FRAME.unpack_from(self._bytes, self._start)[0]
        return size
