"""The cursor of a search: a text by which another search goes on where one ended."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq.errors import UsageError
from qmq.net.protocol.selection import Boundary

_VERSION: Final = 1
_MOST_CHARACTERS: Final = 10_000


class SourceCursor(NamedTuple):
    """Where the search of one store goes on, of the messages that were stored before ``upto_us``; None: it is done."""

    after: Boundary | None
    upto_us: int


def pack_cursor(search: Mapping[str, Any], sources: Mapping[bytes, SourceCursor]) -> str:
    """Return the cursor of a search, whose arguments are *search*, with a place for each store."""
    places = {
        store_id: [one.upto_us, *one.after] if one.after is not None else [one.upto_us]
        for store_id, one in sources.items()
    }
    packed = msgpack.packb([_VERSION, _digest(search), places])
    return base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def unpack_cursor(cursor: str, search: Mapping[str, Any]) -> dict[bytes, SourceCursor]:
    """Return the places of a cursor. Raises UsageError if it is none, or of a search with other arguments."""
    if not isinstance(cursor, str) or not 0 < len(cursor) <= _MOST_CHARACTERS:
        raise UsageError(f"cursor {cursor!r:.80} is none: give the one that a search has returned")
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        content = msgpack.unpackb(base64.urlsafe_b64decode(padded.encode("ascii")), strict_map_key=False)
        version, digest, places = content
        found = {store_id: _source_cursor(place) for store_id, place in places.items()}
    except (ValueError, TypeError, AttributeError, binascii.Error, msgpack.UnpackException):
        raise UsageError(f"cursor {cursor!r:.80} is none: give the one that a search has returned") from None
    if version != _VERSION or digest != _digest(search):
        raise UsageError("the cursor is of another search: give the same prefix, key, times, text and order")
    return found


def _source_cursor(place: list[int]) -> SourceCursor:
    upto_us, *after = place
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in place) or len(after) not in (0, 2):
        raise ValueError(place)
    return SourceCursor(Boundary(*after) if after else None, upto_us)


def _digest(search: Mapping[str, Any]) -> int:
    """Return a number that two searches with different arguments hardly share."""
    return crc32c(msgpack.packb(sorted(search.items())))
