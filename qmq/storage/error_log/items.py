"""Items in memory and on disk, where all take slots of one size, and their reasons lie behind them.

    slot of an item:    the fields of its dtype; the last is the crc32c of the bytes before, in the slot
    slots of a reason:  size of the text u16 | text without zero bytes | zeros, cut into slots, each with its crc32c

An item on disk has the number of its reason's first slot (0: none), and in memory the text itself. The items of one
stretch that have the same reason share its slots.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.format.layout import REASON_BYTES, RETRY_DTYPE

Items = npt.NDArray[np.void]
Form = np.dtype[Any]

CRC_SIZE: Final = 4
_SIZE: Final = struct.Struct("<H")
_COUNT: Final = struct.Struct("<I")
_NO_ITEMS: Final = _COUNT.pack(0)
#: Items that share reasons. A reader of a block of items finds the reasons of these close together.
_STRETCH: Final = 128
#: Stands for a reason whose bytes are rotten, or name no reason.
LOST_REASON: Final = b"(the reason cannot be read)"


@functools.cache
def in_memory(form: Form) -> Form:
    """Return the dtype in memory of items that have *form* on disk: it has reasons as bytes objects."""
    fields = form.names or ()
    return np.dtype([(name, "O" if name == "reason" else form[name]) for name in fields])


#: Retries and dead letters in memory.
RETRY_ITEMS: Final = in_memory(RETRY_DTYPE)


def fixed_part(items: Items, form: Form) -> Items:
    """Return items in their form on disk, without reasons and checksums."""
    if items.dtype == form:
        return items
    rows = np.zeros(len(items), form)
    for name in form.names or ():
        if name not in ("reason", "crc"):
            rows[name] = items[name]
    return rows


def reasons_of(items: Items) -> list[bytes]:
    """Return the reason of each item, empty where the items have none."""
    if "reason" not in (items.dtype.names or ()):
        return [b""] * len(items)
    return [reason or b"" for reason in items["reason"].tolist()]


def with_reasons(rows: Items, reasons: Sequence[bytes]) -> Items:
    """Return rows of the disk as items in memory, with these reasons."""
    form = in_memory(rows.dtype)
    if form == rows.dtype:
        return rows
    items = np.zeros(len(rows), form)
    for name in form.names or ():
        items[name] = reasons if name == "reason" else rows[name]
    return items


def to_slots(items: Items, form: Form) -> bytes:
    """Return items as they are on disk, with the slots of their reasons behind them."""
    rows, room = fixed_part(items, form).copy(), form.itemsize - CRC_SIZE
    texts = list[bytes]()
    if "reason" in (form.names or ()):
        numbers = list[int]()
        reasons = reasons_of(items)
        for start in range(0, len(reasons), _STRETCH):
            known = {b"": 0}
            for reason in reasons[start : start + _STRETCH]:
                if reason not in known:
                    known[reason] = len(rows) + len(texts)
                    text = _SIZE.pack(len(reason)) + reason
                    texts += [text[at : at + room].ljust(room, b"\0") for at in range(0, len(text), room)]
                numbers.append(known[reason])
        rows["reason"] = numbers
    return b"".join((seal(rows).tobytes(), *(text + crc32c(text).to_bytes(CRC_SIZE, "little") for text in texts)))


def slots_of_reason(room: int) -> int:
    """Return how many slots with *room* bytes the longest reason takes."""
    return -(-(_SIZE.size + REASON_BYTES) // room)


def reason_in(slots: Items, at: int, lost: set[int]) -> bytes:
    """Return the reason whose first slot is ``slots[at]``; *slots* are in the form of items.

    LOST_REASON when one of its slots is in *lost*, is missing, or was made zeros by a repair, which found it rotten.
    """
    room = slots.dtype.itemsize - CRC_SIZE
    if at in lost or not 0 <= at < len(slots):
        return LOST_REASON
    (size,) = _SIZE.unpack_from(slots[at].tobytes())
    end = at + -(-(_SIZE.size + size) // room)
    if not size or end > len(slots) or any(slot in lost for slot in range(at, end)):
        return LOST_REASON
    text = b"".join(slot.tobytes()[:room] for slot in slots[at:end])[_SIZE.size : _SIZE.size + size]
    return LOST_REASON if b"\0" in text else text


def pack_items(items: Items, form: Form) -> bytes:
    """Return items for a checkpoint or a record: their number, u32, then their slots."""
    if not len(items):
        return _NO_ITEMS
    return _COUNT.pack(len(items)) + to_slots(items, form)


def unpack_items(data: bytes, form: Form) -> Items:
    """Return the items that ``pack_items`` packed. Raises ValueError."""
    if len(data) < _COUNT.size:
        raise ValueError("items begin with their number")
    (count,) = _COUNT.unpack_from(data)
    slots = np.frombuffer(data, form, offset=_COUNT.size)
    if count > len(slots):
        raise ValueError(f"{count} items have only {len(slots)} slots")
    rows = slots[:count]
    if "reason" not in (form.names or ()):
        return rows
    texts = {number: reason_in(slots, number, set()) for number in set(rows["reason"].tolist()) - {0}}
    texts[0] = b""
    return with_reasons(rows, [texts[number] for number in rows["reason"].tolist()])


def seal(rows: Items) -> Items:
    """Give rows of the disk their checksums; return *rows*."""
    step = rows.dtype.itemsize
    size, data = step - CRC_SIZE, memoryview(rows.tobytes())
    rows["crc"] = [crc32c(data[start : start + size]) for start in range(0, len(data), step)]
    return rows


def sound(rows: Items) -> npt.NDArray[np.bool_]:
    """Return which slots fit their checksums."""
    step = rows.dtype.itemsize
    size, data = step - CRC_SIZE, memoryview(rows.tobytes())
    found: npt.NDArray[np.bool_] = rows["crc"] == [
        crc32c(data[start : start + size]) for start in range(0, len(data), step)
    ]
    return found
