"""The hashes of the keys of a batch are those of all its messages, found without reading headers where possible."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import example, given

from qmq.format import keys as keys_module
from qmq.format.batch import parse_header
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.format.copies.due import cut_due, join_singles, single_of
from qmq.format.copies.for_group import Origin, copied_batch, private_batch
from qmq.format.copies.restored import restored_batches
from qmq.format.hashing import key_hash
from qmq.format.keys import hashes_of
from qmq.format.layout import HAS_MORE_KEYS, MAX_KEYS
from qmq.format.pieces import piece_of_run, read_answer, stored_runs
from tests.format.contents import CREATED_US, PRODUCER, STORE, Contents, Sent, contents, plain, rich, stored

SEVERAL: Contents = [
    [Sent("a", b"1", ("x", "y"))],
    [Sent("b", b"2"), Sent("b", b"3", ("z",)), Sent("b", b"4", ("x", "z", "w"), ("vip",), (("p", "v"),))],
    [Sent("c", b"5", ("y",), ("vip",))],
]


def found_in(batch: memoryview | bytes | bytearray) -> list[tuple[int, int]]:
    hashes, ordinals = hashes_of(memoryview(batch))
    assert (hashes.dtype, ordinals.dtype) == (np.uint64, np.uint32)
    return list(zip(ordinals.tolist(), hashes.tolist(), strict=True))


def expected_of(runs: Contents) -> list[tuple[int, int]]:
    messages = [sent for run in runs for sent in run]
    return [(ordinal, key_hash(key)) for ordinal, sent in enumerate(messages) for key in sent.keys]


def batch(headers: list[MessageHeader]) -> memoryview:
    run = RunContent("a", [b"body"] * len(headers), headers)
    parts = build_batch([run], created_at_us=CREATED_US, producer_id=PRODUCER, producer_sequence=1)
    return memoryview(bytearray(b"".join(parts)))


@given(contents())
@example([plain("a", 3)])
@example([rich("a", 1)])
@example([rich("a", 40), plain("b", 2), rich("c", 17)])
@example(SEVERAL)
def test_all_keys_of_all_messages_are_found(runs: Contents) -> None:
    assert found_in(stored(runs)) == expected_of(runs)


def test_headers_are_read_only_of_messages_with_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[bytes]()
    monkeypatch.setattr(keys_module, "read_header", lambda packed: read.append(packed) or {"k": ["a", "b"]})
    assert found_in(stored([rich("a", 20)])) == expected_of([rich("a", 20)])
    assert read == []
    hashes_of(stored(SEVERAL))
    assert read == [make_header(("x", "y")).packed, make_header(("x", "z", "w"), ("vip",), {"p": "v"}).packed]


def test_headers_of_other_senders_are_read_as_they_are() -> None:
    later = msgpack.packb({"t": ["vip"], "k": ["a", "b"]})
    many = msgpack.packb({"k": [f"k{number}" for number in range(3 * MAX_KEYS)]})
    odd = [b"", b"\xc1junk", b"\x81", msgpack.packb({"k": "text"}), msgpack.packb({"p": {"a": "b"}}), later, many]
    found = found_in(batch([MessageHeader(packed, 0, 9, more_keys=True) for packed in odd]))
    firsts = [(ordinal, 9) for ordinal in range(len(odd))]
    more = [(6, key_hash(f"k{number}")) for number in range(1, MAX_KEYS)]
    assert found == [*firsts[:6], (5, key_hash("b")), (6, 9), *more]


def test_copies_say_that_they_have_several_keys() -> None:
    (run,) = stored_runs(one := stored([SEVERAL[0]]), parse_header(one))
    expected = [(0, key_hash("x")), (0, key_hash("y"))]
    assert found_in(one) == expected
    assert found_in(private_batch(run, 0, "g", PRODUCER, 1)) == expected
    assert found_in(copied_batch(run, "g", 0, Origin(1, 0))) == expected
    (restored,) = restored_batches([("a", run)], CREATED_US, 1 << 20)
    assert found_in(restored.buffer) == expected


def test_messages_that_fall_due_say_that_they_have_several_keys() -> None:
    delayed = batch([make_header("z", deliver_at=5), make_header(["x", "y"], deliver_at=5)])
    due = cut_due(delayed, 0, 2, 0x8000)
    assert due is not None
    assert found_in(due.buffer) == [(0, key_hash("z")), (1, key_hash("x")), (1, key_hash("y"))]
    singles = [single_of(batch([make_header(keys, deliver_at=5)])) for keys in ("z", ["x", "y"], None)]
    joined = join_singles([single for single in singles if single is not None], STORE, 0x8000)
    assert found_in(joined.buffer) == [(0, key_hash("z")), (1, key_hash("x")), (1, key_hash("y"))]


def test_pieces_say_that_they_have_several_keys() -> None:
    (run,), _ = read_answer(memoryview(b"".join(piece_of_run(stored(SEVERAL), 1, 1, 3)[0])))
    assert run.flags & HAS_MORE_KEYS
    assert [run.header(index)["k"] for index in range(2)] == [["z"], ["x", "z", "w"]]
