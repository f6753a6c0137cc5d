"""The broker's check, stamping, and stored batches: whole, flipped, cut short. test_batch_lies.py has the lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format.batch import (
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
from qmq.format.layout import ENTRY, ENTRY_DTYPE, RUN, RUN_SIZE
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
    rich,
    set_header,
    stored,
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
# Stamps and stored batches


@given(runs=contents(max_runs=3), position=st.integers(0, (1 << 63) - 1))
def test_stamps_are_the_given_values(runs: Contents, position: int) -> None:
    view = stored(runs, position)
    header = validate_stored(view, position, SECRET)
    assert (header.position, header.stored_at_us, header.partition, header.store_id) == (position, STORED_US, 3, STORE)
    assert header.mark == mark_of(SECRET, position, header.header_crc)
    assert runs_of(view, header)["first_sequence"].tolist() == first_sequences_of(runs)
    assert stored_names(view, header) == tuple(run[0].subject for run in runs)


def test_a_stamped_batch_is_no_batch_to_send() -> None:
    assert "only the store makes the mark" in refused(stored([plain("a", 1)]))


@pytest.mark.parametrize(
    ("position", "secret", "store_id", "reason"),
    [
        (POSITION + 1, SECRET, STORE, "the batch says that it lies at 1099511627776 of store 7f0000015191"),
        (POSITION, bytes(16), STORE, "the mark is not this store's"),
        (POSITION, SECRET, b"\0" * 6, "of store 7f0000015191"),
    ],
)
def test_a_batch_of_another_position_or_store_is_refused(
    position: int, secret: bytes, store_id: bytes, reason: str
) -> None:
    view = stored([plain("a", 2)])
    for check in (validate_stored, validate_stored_header):
        with pytest.raises(BadBatch, match=reason):
            check(view, position, secret, store_id)


def test_an_untrusted_client_cannot_make_a_mark() -> None:
    """A batch in a body with all fields right but the secret is not taken for one of the store's."""
    forged = stored([plain("a", 1)], secret=b"guess" + bytes(11))
    with pytest.raises(BadBatch, match="the mark is not this store's"):
        validate_stored_header(forged, POSITION, SECRET, STORE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"magic": 0}, "no batch begins here"),
        ({"version": 9}, "the checksum of header"),
        ({"runs": 0}, "sizes do not add up"),
        ({"size": 100}, "sizes do not add up"),
        ({"size": 1 << 30}, "cut short"),
        ({"created_at_us": 1}, "the checksum of header"),
    ],
)
def test_a_bad_header_is_refused_with_the_reason(change: dict[str, int], reason: str) -> None:
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


def test_entries_agree_with_the_runs() -> None:
    runs = [plain("a", 2), rich("b", 1), plain("c", 3)]
    view = stored(runs)
    header = parse_header(view)
    records = runs_of(view, header)
    entries = entries_of(records, header, POSITION, STORED_US, np.array([7, 9, 8]))
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
    (many,) = entries_of(
        runs_of(view, parse_header(view)), parse_header(view), POSITION, STORED_US, np.array([7])
    ).tolist()
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
    """The struct path writes the same bytes as the numpy path."""
    view, other = batch_of([plain("a", 2)]), batch_of([plain("a", 2)])
    checked = check_batch(view, LIMITS)
    fields = {"position": 5, "stored_at_us": 6, "partition": 1, "store_id": STORE, "secret": SECRET}
    stamp(view, checked, first_sequences=77, **fields)  # type: ignore[arg-type]
    as_runs = checked._replace(run=None, runs=runs_of(other, checked.header))
    stamp(other, as_runs, first_sequences=np.array([77], np.uint64), **fields)  # type: ignore[arg-type]
    assert bytes(view) == bytes(other)
