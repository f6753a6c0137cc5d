"""What fuzzing has found, each as it was found."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from fuzz.files import Files
from qmq.errors import BadBatch, ProtocolError
from qmq.format.run import read_header
from qmq.format.table import names_of
from qmq.net.protocol.frames import unpack_meta
from tests.format.contents import with_source

#: Lists in lists, as deep as msgpack unpacks them, with more behind: its error holds, and would show, all of it.
NESTED_AND_MORE = b"\x91" * 1_000 + b"\x90" + b"more"


def test_a_deep_list_with_more_behind_it_is_refused_in_few_words() -> None:
    with pytest.raises(ProtocolError, match="extra data") as meta:
        unpack_meta(memoryview(NESTED_AND_MORE))
    with pytest.raises(BadBatch, match="extra data") as header:
        read_header(NESTED_AND_MORE)
    with pytest.raises(BadBatch, match="not a flat msgpack map") as table:
        names_of(with_source(NESTED_AND_MORE))
    assert max(len(str(caught.value)) for caught in (meta, header, table)) < 300


#: Each list says that it has 4,000 elements; the first of each is the next list.
COUNTS_THAT_LIE = b"\x81\xa1k" + (b"\xdc" + struct.pack(">H", 4_000)) * 1_000


def test_lists_that_say_more_than_they_have_get_no_room_for_it() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="not valid msgpack"):
            unpack_meta(memoryview(COUNTS_THAT_LIE))
        with pytest.raises(BadBatch, match="not valid msgpack"):
            read_header(COUNTS_THAT_LIE)
        with pytest.raises(BadBatch, match="not a flat msgpack map"):
            names_of(with_source(COUNTS_THAT_LIE))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


def test_a_checkpoint_that_does_not_say_how_far_it_knows_producers_is_started_from() -> None:
    files = Files()
    assert files.once(bytes.fromhex("fbff5180515345474d5400035180515345474d5405")) == 1
    files.close()
    assert (files.opened, files.refused) == (1, 0)
