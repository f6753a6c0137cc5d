"""Record layouts: the offsets of structs, dtypes and stamps agree, and golden files hold them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from qmq.format import layout
from qmq.format.batch import COLUMN_BYTES, Header
from qmq.format.layout import (
    BATCH_HEADER,
    DERIVED_HEADER,
    ENTRY,
    ENTRY_DTYPE,
    INDEX_DTYPE,
    INDEX_ENTRY,
    PIECE_HEADER,
    RUN,
    RUN_DTYPE,
    SEGMENT_HEADER,
)
from qmq.format.run import PieceHeader


def offsets_of(layout_: struct.Struct) -> list[int]:
    """Return the offset of each field of a struct."""
    places, offset, digits = [], 0, ""
    for letter in layout_.format[1:]:
        if letter.isdigit():
            digits += letter
            continue
        places.append(offset)
        offset += struct.calcsize(f"<{digits}{letter}")
        digits = ""
    assert offset == layout_.size
    return places


@pytest.mark.parametrize(("record", "dtype"), [(RUN, RUN_DTYPE), (ENTRY, ENTRY_DTYPE), (INDEX_ENTRY, INDEX_DTYPE)])
def test_struct_and_dtype_read_the_same_fields(record: struct.Struct, dtype: np.dtype[np.void]) -> None:
    values = tuple(range(1, len(dtype.names or ()) + 1))
    packed = record.pack(*values)
    assert np.frombuffer(packed, dtype)[0].tolist() == values
    assert dtype.itemsize == record.size


@pytest.mark.parametrize("record", [BATCH_HEADER, PIECE_HEADER, RUN, ENTRY, SEGMENT_HEADER, DERIVED_HEADER])
def test_wide_fields_are_aligned(record: struct.Struct) -> None:
    """So another language may lay a struct over them."""
    fields = [letter for letter in record.format[1:] if not letter.isdigit()]
    for letter, offset in zip(fields, offsets_of(record), strict=True):
        if letter != "s":
            assert offset % struct.calcsize(f"<{letter}") == 0


def test_stamps_hit_the_fields_they_are_for() -> None:
    places = dict(zip(Header._fields, offsets_of(BATCH_HEADER), strict=True))
    assert places["position"] == layout.STAMP_POSITION_OFFSET
    assert places["stored_at_us"] == layout.STAMP_POSITION_OFFSET + 8
    assert places["partition"] == layout.STAMP_STORE_OFFSET
    assert places["store_id"] == layout.STAMP_STORE_OFFSET + 2
    assert places["header_crc"] == layout.STAMP_SEAL_OFFSET == layout.HEADER_CRC_OFFSET == layout.BATCH_PREFIX_SIZE
    assert places["mark"] == layout.STAMP_SEAL_OFFSET + 4 == layout.BATCH_HEADER_SIZE - layout.MARK_SIZE
    assert RUN_DTYPE.fields is not None
    assert RUN_DTYPE.fields["first_sequence"][1] == layout.RUN_FIRST_SEQUENCE_OFFSET
    pieces = dict(zip(PieceHeader._fields, offsets_of(PIECE_HEADER), strict=True))
    assert pieces["header_crc"] == layout.PIECE_CRC_OFFSET == layout.PIECE_HEADER_SIZE - 4


def test_batches_and_pieces_agree_on_where_their_size_stands() -> None:
    """A reader uses it to go on behind bad bytes."""
    places = dict(zip(Header._fields, offsets_of(BATCH_HEADER), strict=True))
    pieces = dict(zip(PieceHeader._fields, offsets_of(PIECE_HEADER), strict=True))
    for name in ("magic", "version", "flags", "size"):
        assert places[name] == pieces[name]


def test_flags_are_one_bit_each_and_column_bytes_follow_them() -> None:
    flags = [flag for flag, _ in layout.OPTIONAL_COLUMNS]
    assert sorted(flags) == [1, 2, 4, 8, 16, 32, 128]
    assert layout.HAS_MORE_KEYS == 64, "it has no column"
    assert sum(flags) + layout.HAS_MORE_KEYS == layout.KNOWN_FLAGS
    of_the_broker = layout.HAS_CREATED_AT | layout.HAS_ORIGIN_ID | layout.HAS_SOURCE
    assert (layout.KNOWN_FLAGS, layout.SENT_FLAGS & of_the_broker) == (layout.SENT_FLAGS | of_the_broker, 0)
    assert COLUMN_BYTES[0] == 10
    assert COLUMN_BYTES[layout.HAS_TAGS] == 14
    assert COLUMN_BYTES[layout.HAS_KEY_HASH] == 18
    assert COLUMN_BYTES[63] == 10 + 4 + 8 + 8 + 8 + 8 + 16


def test_magics_differ() -> None:
    magics = [value for name, value in vars(layout).items() if name.endswith("_MAGIC")]
    assert len(magics) == len(set(magics)) >= 9
    assert all(len(magic) == 8 for magic in magics if isinstance(magic, bytes))
