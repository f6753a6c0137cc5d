"""The broker's check, stamping, and what lies on disk: whole, flipped, cut short, and lied about with fitting sums."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBatch, MessageTooLarge
from qmq.format import batch as batch_module
from qmq.format.batch import (
    BatchLimits,
    check_batch,
    entries_of,
    entry_of,
    gather_lengths,
    mark_of,
    parse_header,
    runs_of,
    stamp,
    stored_names,
    validate_stored,
    validate_stored_header,
)
from qmq.format.layout import BATCH_HEADER_SIZE, ENTRY, ENTRY_DTYPE, HAS_DELIVER_AT, RUN, RUN_SIZE
from qmq.format.pieces import read_answer
from tests.format.contents import (
    LIMITS,
    POSITION,
    SECRET,
    STORE,
    STORED_US,
    Contents,
    Sent,
    batch_of,
    contents,
    expected,
    first_sequences_of,
    flips,
    plain,
    received,
    refused,
    reseal,
    rich,
    set_header,
    set_run,
    stored,
    with_table,
)

BOTH_ROADS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

SHAPES: dict[str, Contents] = {
    "one message": [[Sent("a.b", b"hello")]],
    "one empty message": [[Sent("a", b"")]],
    "three messages": [plain("a.b", 3)],
    "many messages": [plain("a.b", 17, 1)],
    "keys and tags": [rich("a", 2)],
    "one message a run": [plain(f"s.{number}", 1) for number in range(3)],
    "several runs": [plain("a", 2), rich("b", 1), plain("c", 3)],
}
shapes = pytest.mark.parametrize("runs", SHAPES.values(), ids=list(SHAPES))


@BOTH_ROADS
@given(runs=contents())
def test_round_trip(road: str, runs: Contents) -> None:
    view = batch_of(runs)
    checked = check_batch(view, LIMITS)
    assert checked.names == tuple(run[0].subject for run in runs)
    assert (checked.run is None) == (len(runs) > 1)
    assert (checked.runs is None) == (len(runs) == 1)
    kept = stored(runs)
    assert validate_stored(kept, POSITION, SECRET, STORE) == parse_header(kept)
    found, damaged = read_answer(kept)
    assert (received(found), damaged) == (expected(runs), [])


@shapes
def test_every_flipped_bit_is_refused(runs: Contents) -> None:
    view = batch_of(runs)
    assert refused(view) == ""
    assert [bit for bit, flipped in flips(view) if not refused(flipped)] == []


@shapes
def test_every_flipped_bit_on_disk_is_found(runs: Contents) -> None:
    view = stored(runs)
    validate_stored(view, POSITION, SECRET, STORE)
    for bit, flipped in flips(view):
        with pytest.raises(BadBatch):
            validate_stored(flipped, POSITION, SECRET, STORE)
        if bit < 8 * parse_header(view).data_start:
            with pytest.raises(BadBatch):
                validate_stored_header(flipped, POSITION, SECRET, STORE)


@shapes
def test_every_cut_is_refused(runs: Contents) -> None:
    view, kept = batch_of(runs), stored(runs)
    for size in range(len(view)):
        assert refused(view[:size])
        with pytest.raises(BadBatch, match="cut short"):
            validate_stored(kept[:size], POSITION, SECRET, STORE)
    longer = memoryview(bytearray(bytes(view) + b"\0"))
    assert "sizes do not add up" in refused(longer)
    validate_stored(memoryview(bytes(kept) + b"what comes next"), POSITION, SECRET, STORE)


# ---------------------------------------------------------------------------------------------------------------------
# Lies whose checksums fit


def put(layout: str, place: Callable[[memoryview], int], value: int) -> Callable[[memoryview], None]:
    return lambda view: struct.pack_into(layout, view, place(view), value)


def data_place(offset: int) -> Callable[[memoryview], int]:
    return lambda view: parse_header(view).data_start + offset


def wrap_lengths(view: memoryview) -> None:
    """Two lengths whose sum is right only in 32 bits."""
    start = parse_header(view).data_start
    first, second = struct.unpack_from("<II", view, start)
    struct.pack_into("<II", view, start, 0xFFFFFFFF, (first + second + 1) & 0xFFFFFFFF)


ONE_RUN_LIES: dict[str, tuple[Callable[[memoryview], object], str]] = {
    "no magic": (lambda view: set_header(view, magic=1), "not a batch of version 1"),
    "a newer version": (lambda view: set_header(view, version=2), "not a batch of version 1"),
    "a reserved byte": (lambda view: set_header(view, reserved=1), "unknown flags"),
    "a reserved flag": (lambda view: set_header(view, flags=HAS_DELIVER_AT), "unknown flags"),
    "a flag without its column": (lambda view: set_header(view, flags=1), "do not sum|sum to|does not add up"),
    "no runs": (lambda view: set_header(view, runs=0), "sizes do not add up"),
    "more runs than bytes": (lambda view: set_header(view, runs=0xFFFFFFFF), "sizes do not add up"),
    "a table past the end": (lambda view: set_header(view, table_size=0xFFFFFFFF), "sizes do not add up"),
    "an empty table": (lambda view: set_header(view, table_size=0), "the table|run 0"),
    "a larger size": (lambda view: set_header(view, size=len(view) + 1), "sizes do not add up"),
    "more messages": (lambda view: set_header(view, messages=4), "does not add up"),
    "no messages": (lambda view: set_header(view, messages=0), "does not add up"),
    "a mark": (lambda view: set_header(view, mark=b"12345678"), "the mark is the store's"),
    "a subject that is not there": (lambda view: set_run(view, 0, subject=1), "run 0 is not valid"),
    "a lane": (lambda view: set_run(view, 0, lane=1), "run 0 is not valid"),
    "a run flag": (lambda view: set_run(view, 0, flags=1), "run 0 is not valid"),
    "a reserved run field": (lambda view: set_run(view, 0, reserved=1), "run 0 is not valid"),
    "a run that begins later": (lambda view: set_run(view, 0, offset=1), "run 0 is not valid"),
    "a run of no messages": (lambda view: (set_run(view, 0, count=0), set_header(view, messages=0)), "does not add up"),
    "a run of fewer": (lambda view: (set_run(view, 0, count=2), set_header(view, messages=2)), "lengths of run 0"),
    "a run of more": (lambda view: (set_run(view, 0, count=4), set_header(view, messages=4)), "does not add up"),
    "a run of far more": (
        lambda view: (set_run(view, 0, count=0xFFFFFFFF), set_header(view, messages=0xFFFFFFFF)),
        "does not add up",
    ),
    "a shorter run": (lambda view: set_run(view, 0, size=38), "does not add up"),
    "a length too long": (put("<I", data_place(0), 4), "lengths of run 0 sum to 10, its payload has 9"),
    "a length too short": (put("<I", data_place(8), 2), "lengths of run 0 sum to 8, its payload has 9"),
    "lengths that wrap around": (wrap_lengths, "lengths of run 0"),
    "a header longer than its message": (put("<H", data_place(14), 4), "lengths of run 0"),
}


@pytest.mark.parametrize(("lie", "reason"), ONE_RUN_LIES.values(), ids=list(ONE_RUN_LIES))
def test_lies_about_one_run_are_refused(road: str, lie: Callable[[memoryview], object], reason: str) -> None:
    view = batch_of([plain("a.b", 3)])
    lie(view)
    size = parse_header(view).data_start
    if size <= len(view):
        reseal(view)
    with pytest.raises(BadBatch, match=reason):
        check_batch(view, LIMITS)


RUNS_LIES: dict[str, tuple[Callable[[memoryview], object], str]] = {
    "a subject that is not there": (lambda view: set_run(view, 1, subject=3), "a subject that the table does not have"),
    "a subject twice": (lambda view: set_run(view, 1, subject=0), "two runs of one batch have the same subject"),
    "a lane": (lambda view: set_run(view, 2, lane=1), "reserved field"),
    "a run flag": (lambda view: set_run(view, 2, flags=0x8000), "reserved field"),
    "a reserved run field": (lambda view: set_run(view, 0, reserved=1), "reserved field"),
    "runs that overlap": (lambda view: set_run(view, 1, offset=0), "do not lie one after another"),
    "a gap between runs": (lambda view: set_run(view, 2, offset=90), "do not lie one after another"),
    "a run past the end": (lambda view: set_run(view, 2, size=0xFFFFFFFF), "do not lie one after another"),
    "sizes that wrap around": (
        lambda view: (set_run(view, 0, size=0xFFFFFFFF), set_run(view, 1, offset=0xFFFFFFFF)),
        "do not lie one after another",
    ),
    "an empty run": (lambda view: set_run(view, 0, count=0), "do not have 6 messages"),
    "more messages": (lambda view: set_header(view, messages=7), "do not have 7 messages"),
    "a count that wraps around": (lambda view: set_run(view, 0, count=0xFFFFFFFF), "do not have 6 messages"),
    "a run shorter than its columns": (
        lambda view: (set_run(view, 0, count=4), set_run(view, 2, count=1)),
        "shorter than its columns",
    ),
    "counts that are moved": (lambda view: (set_run(view, 0, count=1), set_run(view, 2, count=4)), "shorter|lengths"),
    "a length too long": (put("<I", data_place(0), 4), "lengths of a run"),
    "lengths that wrap around": (wrap_lengths, "lengths of a run"),
    "a header longer than its message": (put("<H", data_place(8), 4), "lengths of a run"),
}


@pytest.mark.parametrize(("lie", "reason"), RUNS_LIES.values(), ids=list(RUNS_LIES))
def test_lies_about_several_runs_are_refused(lie: Callable[[memoryview], object], reason: str) -> None:
    view = batch_of([plain("a", 2), plain("b", 1), plain("c", 3)])
    lie(view)
    with pytest.raises(BadBatch, match=reason):
        check_batch(reseal(view), LIMITS)


def test_a_run_checksum_of_its_own_must_fit_too() -> None:
    for runs in ([plain("a", 2)], [plain("a", 2), plain("b", 1)]):
        view = batch_of(runs)
        set_run(view, len(runs) - 1, crc=5)
        assert "checksum of" in refused(reseal(view, run_crcs=False))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (msgpack.packb({"subjects": ["a"] * 2}), "names a subject twice"),
        (msgpack.packb({"subjects": "ab"}), "not a flat msgpack map"),
        (msgpack.packb({"subjects": [b"a", b"b"]}), "not a flat msgpack map"),
        (msgpack.packb({"subjects": ["a"]}), "the table does not have|is not valid"),
        (msgpack.packb({"subjects": [["a"], ["b"]]}), "not a flat msgpack map"),
        (b"\x91" * 800, "not a flat msgpack map"),
        (b"\xc0" * 3_000, r"a table of 3000 bytes is too large for \d runs"),
    ],
)
def test_lying_tables_are_refused(table: bytes, reason: str) -> None:
    for runs in ([plain("a", 1), plain("b", 2)], [plain("a", 1), *([plain("b", 1)] if b"\xa1a" in table else [])]):
        view = with_table(batch_of(runs), table)
        with pytest.raises(BadBatch, match=reason):
            check_batch(view, LIMITS)


def verdict(view: memoryview, few: int, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "FEW", few)
        return refused(view)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(runs=contents(max_runs=3, max_count=4), data=st.data())
def test_any_lie_is_refused_or_harmless(runs: Contents, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of records and columns are changed at will, checksums fit: what passes can be read to the last message."""
    view = batch_of(runs)
    header = parse_header(view)
    places = [*range(16, 24), *range(BATCH_HEADER_SIZE, BATCH_HEADER_SIZE + RUN_SIZE * header.runs)]
    places += range(header.data_start, len(view))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places))
        view[place] = data.draw(st.sampled_from([0, 1, 2, view[place] ^ 1, (view[place] + 1) & 255, 255]))
    if parse_header(view).data_start > len(view):
        assert refused(view)
        return
    reseal(view)
    reason = verdict(view, 0, monkeypatch)
    assert reason == verdict(view, 1 << 40, monkeypatch)
    if reason:
        return
    found, damaged = read_answer(view)
    assert damaged == []
    assert sum(run.count for run in found) == header.messages
    for run in found:
        assert sum(map(len, run.bodies())) + int(run.header_sizes().sum()) == len(run.payload)


@pytest.mark.parametrize("runs", [[plain("a", 3, 50)], [plain("a", 3, 50), plain("b", 1, 51)]])
def test_a_message_over_the_limit_is_refused_by_its_size(road: str, runs: Contents) -> None:
    view = batch_of(runs)
    longest = max(len(sent.body) for run in runs for sent in run)
    check_batch(view, BatchLimits(max_message_bytes=longest))
    with pytest.raises(MessageTooLarge, match=f"a message of {longest} bytes .* max_message_bytes of {longest - 1};"):
        check_batch(view, BatchLimits(max_message_bytes=longest - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Stamps and what lies on disk


@given(runs=contents(max_runs=3), position=st.integers(0, (1 << 63) - 1))
def test_stamps_are_what_was_given(runs: Contents, position: int) -> None:
    view = stored(runs, position)
    header = validate_stored(view, position, SECRET)
    assert (header.position, header.stored_at_us, header.partition, header.store_id) == (position, STORED_US, 3, STORE)
    assert header.mark == mark_of(SECRET, position, header.header_crc)
    assert runs_of(view, header)["first_sequence"].tolist() == first_sequences_of(runs)
    assert stored_names(view, header) == tuple(run[0].subject for run in runs)


def test_a_stamped_batch_is_no_batch_to_send() -> None:
    assert "the mark is the store's to make" in refused(stored([plain("a", 1)]))


@pytest.mark.parametrize(
    ("position", "secret", "store_id", "reason"),
    [
        (POSITION + 1, SECRET, STORE, "the batch says that it lies at 1099511627776 of store 7f0000015191"),
        (POSITION, bytes(16), STORE, "the mark is not this store's"),
        (POSITION, SECRET, b"\0" * 6, "of store 7f0000015191"),
    ],
)
def test_a_batch_of_another_place_or_store_is_refused(
    position: int, secret: bytes, store_id: bytes, reason: str
) -> None:
    view = stored([plain("a", 2)])
    for check in (validate_stored, validate_stored_header):
        with pytest.raises(BadBatch, match=reason):
            check(view, position, secret, store_id)


def test_a_stranger_cannot_make_a_mark() -> None:
    """A batch in a body with all fields right but the secret is not taken for one of the store's."""
    forged = stored([plain("a", 1)], secret=b"guess" + bytes(11))
    with pytest.raises(BadBatch, match="the mark is not this store's"):
        validate_stored_header(forged, POSITION, SECRET, STORE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"magic": 0}, "no batch begins here"),
        ({"version": 9}, "batch version 9 is not known; this one reads 1"),
        ({"runs": 0}, "sizes do not add up"),
        ({"size": 100}, "sizes do not add up"),
        ({"size": 1 << 30}, "cut short"),
        ({"created_at_us": 1}, "the checksum of header"),
    ],
)
def test_a_bad_header_says_what_is_wrong(change: dict[str, int], reason: str) -> None:
    view = stored([plain("a", 2)])
    set_header(view, **change)
    with pytest.raises(BadBatch, match=reason):
        validate_stored_header(view, POSITION, SECRET, STORE)


def test_bad_data_is_found_by_the_whole_check_only() -> None:
    view = stored([plain("a", 2)])
    view[-1] ^= 1
    validate_stored_header(view, POSITION, SECRET, STORE)
    with pytest.raises(BadBatch, match="the checksum of the data is wrong"):
        validate_stored(view, POSITION, SECRET, STORE)


# ---------------------------------------------------------------------------------------------------------------------
# Entries


def test_entries_say_what_the_runs_say() -> None:
    runs = [plain("a", 2), rich("b", 1), plain("c", 3)]
    view = stored(runs)
    header = parse_header(view)
    records = runs_of(view, header)
    entries = entries_of(records, header.size, POSITION, STORED_US, np.array([7, 9, 8]))
    assert entries.dtype == ENTRY_DTYPE
    for number, (entry, record) in enumerate(zip(entries.tolist(), records.tolist(), strict=True)):
        subject = [7, 9, 8][number]
        assert entry == (
            record[8], POSITION, STORED_US, subject, record[4], number, 0, 3, 0, record[6], header.size,
        )  # fmt: skip


def test_one_run_makes_the_same_entry_on_both_roads() -> None:
    sent = batch_of([plain("a", 2)])
    checked = check_batch(sent, LIMITS)
    view = stored([plain("a", 2)])
    single = entry_of(checked, POSITION, STORED_US, 7, first_sequences_of([[]])[0])
    (many,) = entries_of(runs_of(view, parse_header(view)), len(view), POSITION, STORED_US, np.array([7])).tolist()
    assert single == many
    assert ENTRY.unpack(ENTRY.pack(*single)) == many


@example([[Sent("a", b"")]])
@given(contents())
def test_lengths_are_gathered_from_runs_wherever_they_lie(runs: Contents) -> None:
    view = batch_of(runs)
    header = parse_header(view)
    records = runs_of(view, header)
    lengths, header_sizes = gather_lengths(
        view[header.data_start :], records["offset"].astype(np.int64), records["count"]
    )
    found, _ = read_answer(view)
    assert lengths.tolist() == [length for run in found for length in run.lengths().tolist()]
    assert header_sizes.tolist() == [size for run in found for size in run.header_sizes().tolist()]
    assert RUN.size * header.runs == RUN_SIZE * len(runs)


def test_stamping_one_run_is_stamping_runs_of_one() -> None:
    """The struct road writes what the numpy road would."""
    view, other = batch_of([plain("a", 2)]), batch_of([plain("a", 2)])
    checked = check_batch(view, LIMITS)
    fields = {"position": 5, "stored_at_us": 6, "partition": 1, "store_id": STORE, "secret": SECRET}
    stamp(view, checked, first_sequences=77, **fields)  # type: ignore[arg-type]
    as_runs = checked._replace(run=None, runs=runs_of(other, checked.header))
    stamp(other, as_runs, first_sequences=np.array([77], np.uint64), **fields)  # type: ignore[arg-type]
    assert bytes(view) == bytes(other)
