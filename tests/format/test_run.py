"""Runs in a client: columns, bodies, headers, cuts."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format.batch import parse_header
from qmq.format.build import MessageHeader, RunContent, build_batch, fold_of, make_header
from qmq.format.hashing import check_of, key_hash, tag_bits
from qmq.format.layout import HAS_DELIVER_AT, HAS_KEY_HASH, HAS_TAGS
from qmq.format.pieces import read_answer, stored_runs
from qmq.format.run import Run, cut_data, read_header, undecodable, why_undecodable
from tests.format.contents import (
    CREATED_US,
    POSITION,
    PRODUCER,
    STORE,
    STORED_US,
    Contents,
    contents,
    expected,
    plain,
    received,
    rich,
    stored,
)

BOTH_ROADS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


#: Headers with nothing but a short key, or a short order key.
SHORT_HEADERS = {msgpack.packb({name: ["x" * size]}) for name in "ko" for size in (1, 30, 31)}


def only_run(runs: Contents) -> Run:
    (run,), damaged = read_answer(stored(runs))
    assert damaged == []
    return run


@BOTH_ROADS
@given(runs=contents(max_runs=1))
def test_fields_and_columns(road: str, runs: Contents) -> None:
    run = only_run(runs)
    sents = runs[0]
    assert (run.subject, run.count, run.lane, run.run_flags, run.ordinal) == (sents[0].subject, len(sents), 0, 0, 0)
    assert (run.position, run.partition, run.store_id) == (POSITION, 3, STORE)
    assert (run.stored_at_us, run.created_at_us) == (STORED_US, CREATED_US)
    headers = [make_header(sent.keys, sent.tags, dict(sent.properties)) for sent in sents]
    assert run.header_sizes().tolist() == [len(header.packed) for header in headers]
    assert run.lengths().tolist() == [
        len(header.packed) + len(sent.body) for header, sent in zip(headers, sents, strict=True)
    ]
    tags, keys = run.column(HAS_TAGS), run.column(HAS_KEY_HASH)
    assert (tags is None, keys is None) == (not run.flags & HAS_TAGS, not run.flags & HAS_KEY_HASH)
    if tags is not None:
        assert tags.tolist() == [tag_bits(sent.tags) for sent in sents]
    if keys is not None:
        assert keys.tolist() == [key_hash(sent.keys[0]) if sent.keys else 0 for sent in sents]
    assert run.column(HAS_DELIVER_AT) is None
    assert bytes(run.payload) == b"".join(
        header.packed + sent.body for header, sent in zip(headers, sents, strict=True)
    )
    assert run.checks().tolist() == [
        check_of(header.packed + sent.body, fold_of(len(header.packed), header.tags, header.key))
        for header, sent in zip(headers, sents, strict=True)
    ]


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17])
def test_bodies_all_at_once_and_one_by_one(road: str, count: int) -> None:
    for sents in (plain("a", count), rich("a", count)):
        run = only_run([sents])
        assert [run.body(index) for index in reversed(range(count))] == [sent.body for sent in reversed(sents)]
        assert only_run([sents]).bodies() == [sent.body for sent in sents]
        headers = [only_run([sents]).header(index) for index in range(count)]
        assert [header.get("k", []) for header in headers] == [list(sent.keys) for sent in sents]


def test_a_header_is_unpacked_once() -> None:
    run = only_run([rich("a", 2)])
    assert run.header(1) is run.header(1)


@BOTH_ROADS
@given(runs=contents(max_runs=1, max_count=8))
def test_every_slice_is_a_run_of_its_own(road: str, runs: Contents) -> None:
    run = only_run(runs)
    everything = expected(runs)
    for start in range(run.count):
        for stop in range(start + 1, run.count + 1):
            part = run.slice(start, stop)
            assert part.count == stop - start
            assert received([part]) == everything[start:stop]
            assert part.checks().tolist() == run.checks().tolist()[start:stop]


def test_cut_data_takes_views_of_what_lies_there() -> None:
    run = only_run([rich("a", 5)])
    slices = cut_data(run.data, run.flags, run.count, 1, 3)
    assert [len(column) for column in slices[:-1]] == [8, 4, 8, 8, 16]
    assert all(column.obj is run.data.obj for column in slices)


# ---------------------------------------------------------------------------------------------------------------------
# Hostile headers: the broker does not look into them


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"\xc1", "is not valid msgpack"),
        (b"\x81\xa1k", "is not valid msgpack"),
        (b"\x80\x80", "is not valid msgpack"),
        (b"\x91" * 5_000, "is not valid msgpack"),
        (b"\xa1\xff", "is not valid msgpack"),
        (b"\xdf\xff\xff\xff\xff", "is not valid msgpack"),
        (msgpack.packb({1: "a"}), "is not valid msgpack"),
        (msgpack.packb([1]), "is not a map"),
        (msgpack.packb("k"), "is not a map"),
        (msgpack.packb({"k": "abc"}), "'k' is not made of text"),
        (msgpack.packb({"k": []}), "'k' is not made of text"),
        (msgpack.packb({"k": [1]}), "'k' is not made of text"),
        (msgpack.packb({"k": None}), "'k' is not made of text"),
        (msgpack.packb({"t": {"a": "b"}}), "'t' is not made of text"),
        (msgpack.packb({"t": [["a"]]}), "'t' is not made of text"),
        (msgpack.packb({"p": ["a"]}), "'p' is not made of text"),
        (msgpack.packb({"p": {"a": 1}}), "'p' is not made of text"),
        (msgpack.packb({"p": {"a": {}}}), "'p' is not made of text"),
        (msgpack.packb({"p": {b"a": "b"}}), "'p' is not made of text"),
    ],
)
def test_a_hostile_header_is_a_clear_error(packed: bytes, reason: str) -> None:
    made = build_batch(
        [RunContent("a.b", [b"body"] * 2, [MessageHeader(packed, 0, 0)] * 2)],
        created_at_us=1,
        producer_id=PRODUCER,
        producer_sequence=1,
    )
    (run,), _ = read_answer(memoryview(b"".join(made)))
    assert run.bodies() == [b"body"] * 2
    with pytest.raises(BadBatch, match=f"message 0{{12}}.*1 of 'a.b': its header.*{reason}"):
        run.header(1)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_header_or_refused(packed: bytes) -> None:
    try:
        header = read_header(packed)
    except BadBatch:
        return
    assert all(isinstance(text, str) for name in ("k", "t") for text in header.get(name, []))
    assert all(isinstance(text, str) for pair in header.get("p", {}).items() for text in pair)


def test_fields_of_later_versions_are_left_in() -> None:
    assert read_header(msgpack.packb({"k": ["a"], "z": [1, 2]})) == {"k": ["a"], "z": [1, 2]}
    assert read_header(b"") == {}


# --- headers that cannot be decoded ----------------------------------------------------------------------------------

packed_headers = st.one_of(
    st.just(b""),
    st.text(max_size=40).map(lambda key: msgpack.packb({"k": [key]})),
    st.sampled_from(
        [b"\x81\xa1k\x91", b"\x81\xa1k\x91\xa1", b"\x81\xa1k\x91\xa1\xff", b"\x81\xa1k\x91\xa1aa", b"\xc0"]
    ),
    st.binary(max_size=12),
    st.just(msgpack.packb({"t": ["x"], "p": {"a": "b"}})),
)


@given(st.lists(packed_headers, min_size=1, max_size=40))
def test_headers_that_cannot_be_decoded_are_found(headers: list[bytes]) -> None:
    contents = [RunContent("a", [b"body"] * len(headers), [MessageHeader(packed, 0, 0) for packed in headers])]
    parts = build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=0)
    batch = memoryview(b"".join(parts))
    (run,) = stored_runs(batch, parse_header(batch))
    expected = []
    for index, packed in enumerate(headers):
        try:
            read_header(packed)
        except BadBatch:
            expected.append(index)
    assert undecodable(run) == expected
    for index in expected:
        assert str(run.id(index)) in why_undecodable(run, index)


def can_decode(packed: bytes) -> bool:
    try:
        read_header(packed)
    except BadBatch:
        return False
    return True


short_headers = st.sampled_from([b"", *sorted(SHORT_HEADERS)])


@given(st.lists(st.lists(st.one_of(short_headers, packed_headers), min_size=1, max_size=12), min_size=2, max_size=12))
def test_headers_of_several_runs_are_looked_at_together(runs: list[list[bytes]]) -> None:
    contents = [
        RunContent(f"a{at}", [b"body" * at] * len(run), [MessageHeader(packed, 0, 0) for packed in run])
        for at, run in enumerate(runs)
    ]
    parts = build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=0)
    batch = memoryview(b"".join(parts))
    for run, headers in zip(stored_runs(batch, parse_header(batch)), runs, strict=True):
        assert undecodable(run) == [index for index, packed in enumerate(headers) if not can_decode(packed)]
        is_plain = all(packed == b"" or packed in SHORT_HEADERS for packed in headers)
        assert run.is_decodable or not is_plain, "a run with nothing but short keys is not looked at again"


def test_lengths_that_lead_out_of_the_batch_are_harmless() -> None:
    contents = [RunContent(name, [b"body"] * 3, [make_header("key")] * 3) for name in ("a", "b")]
    batch = bytearray(b"".join(build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=0)))
    header = parse_header(memoryview(batch))
    for run in stored_runs(memoryview(bytes(batch)), header):
        assert run.is_decodable
    for offset in range(header.data_start, header.data_start + 8):  # the lengths of the first two
        damaged = bytearray(batch)
        damaged[offset] = 0xFF
        (first, second) = stored_runs(memoryview(damaged), header)
        assert second.is_decodable
        assert not first.is_decodable, "its lengths lead elsewhere"
