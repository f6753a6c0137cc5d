"""What fuzzing has found, each as it was found."""

from __future__ import annotations

import pytest

from qmq.errors import BadBatch, ProtocolError
from qmq.format.run import read_header
from qmq.format.table import names_of
from qmq.net.wire import unpack_meta

#: Lists in lists, as deep as msgpack unpacks them, with more behind: its error holds, and would show, all of it.
NESTED_AND_MORE = b"\x91" * 1_000 + b"\x90" + b"more"


def test_a_deep_list_with_more_behind_it_is_refused_in_few_words() -> None:
    with pytest.raises(ProtocolError, match="extra data") as meta:
        unpack_meta(memoryview(NESTED_AND_MORE))
    with pytest.raises(BadBatch, match="extra data") as header:
        read_header(NESTED_AND_MORE)
    with pytest.raises(BadBatch, match="not a flat msgpack map") as table:
        names_of(NESTED_AND_MORE)
    assert max(len(str(caught.value)) for caught in (meta, header, table)) < 300
