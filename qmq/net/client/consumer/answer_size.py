"""How many bytes a pull asks for, by how long the last answers took on their way. No I/O."""

from __future__ import annotations

from typing import Final

#: Seconds on the way that an answer should take on a slow link.
_WANTED_S: Final = 1.0
#: An answer that took longer is followed by a smaller one, one that took less than the other by a larger one.
_LONG_S: Final = 2.0
_SHORT_S: Final = 0.5
_LEAST_BYTES: Final = 64 << 10
#: The first answer of a group that gets none twice.
_FIRST_BYTES: Final = 256 << 10
_MOST_BYTES: Final = 1 << 30


class AnswerSize:
    """The bound on the bytes of answers at one broker. What is on its way when a connection ends has to come again, or
    is lost; and acks and heartbeats wait behind it.
    """

    __slots__ = ("most",)

    def __init__(self, *, comes_once: bool) -> None:
        """*comes_once*: what is lost on its way does not come again."""
        #: The bound.
        self.most = _FIRST_BYTES if comes_once else _MOST_BYTES

    def came(self, size: int, seconds: float) -> None:
        """Adapt to an answer of *size* bytes, which came in for *seconds* if it was large."""
        if seconds > _LONG_S:
            self.most = max(int(size * _WANTED_S / seconds), _LEAST_BYTES)
        elif self.most < _MOST_BYTES and seconds < _SHORT_S and size > self.most // 2:
            self.most = min(2 * self.most, _MOST_BYTES)

    def lost(self, max_bytes: int) -> None:
        """Adapt to a connection that has ended before the answer to a pull for *max_bytes* came."""
        self.most = max(min(self.most, max_bytes) // 4, _LEAST_BYTES)
