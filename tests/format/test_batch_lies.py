"""Lies about a batch whose checksums fit, as a hostile client would send them, are refused with the reason."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBatch, MessageTooLarge
from qmq.format import batch as batch_module
from qmq.format.batch import BatchLimits, check_batch, check_plain, parse_header
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    CREATED_AT_END_US,
    HAS_CREATED_AT,
    HAS_MORE_KEYS,
    HAS_ORIGIN_ID,
    PRODUCER_SEQUENCE_END,
    RUN_SIZE,
)
from qmq.format.pieces import read_answer
from qmq.format.table import names_of
from qmq.net.client.producer.receipts import utc_from_us
from tests.effort import part_of
from tests.format.contents import (
    LIMITS,
    Contents,
    batch_of,
    contents,
    plain,
    refused,
    reseal,
    set_header,
    set_run,
    table_with,
    with_table,
)


def put(layout: str, place: Callable[[memoryview], int], value: int) -> Callable[[memoryview], None]:
    return lambda view: struct.pack_into(layout, view, place(view), value)


def data_place(offset: int) -> Callable[[memoryview], int]:
    return lambda view: parse_header(view).data_start + offset


def wrap_lengths(view: memoryview) -> None:
    """Write two lengths whose sum is right only in 32 bits."""
    start = parse_header(view).data_start
    first, second = struct.unpack_from("<II", view, start)
    struct.pack_into("<II", view, start, 0xFFFFFFFF, (first + second + 1) & 0xFFFFFFFF)


ONE_RUN_LIES: dict[str, tuple[Callable[[memoryview], object], str]] = {
    "no magic": (lambda view: set_header(view, magic=1), "not a batch of version 1"),
    "a newer version": (lambda view: set_header(view, version=2), "not a batch of version 1"),
    "a reserved byte": (lambda view: set_header(view, reserved=1), "unknown flags"),
    "a reserved flag": (lambda view: set_header(view, flags=HAS_ORIGIN_ID), "unknown flags"),
    "times of creation": (lambda view: set_header(view, flags=HAS_CREATED_AT), "unknown flags"),
    "a flag without its column": (lambda view: set_header(view, flags=1), "do not sum|sum to|does not add up"),
    "several keys without hashes": (lambda view: set_header(view, flags=HAS_MORE_KEYS), "has no key hashes"),
    "no runs": (lambda view: set_header(view, runs=0), "sizes do not add up"),
    "more runs than bytes": (lambda view: set_header(view, runs=0xFFFFFFFF), "sizes do not add up"),
    "a table past the end": (lambda view: set_header(view, table_size=0xFFFFFFFF), "sizes do not add up"),
    "an empty table": (lambda view: set_header(view, table_size=0), "the table|run 0"),
    "a larger size": (lambda view: set_header(view, size=len(view) + 1), "sizes do not add up"),
    "more messages": (lambda view: set_header(view, messages=4), "does not add up"),
    "no messages": (lambda view: set_header(view, messages=0), "does not add up"),
    "the last producer sequence": (
        lambda view: set_header(view, producer_sequence=(1 << 64) - 3),
        "numbers are too large: producer sequence 18446744073709551613",
    ),
    "a producer sequence past the end": (
        lambda view: set_header(view, producer_sequence=PRODUCER_SEQUENCE_END - 2),
        "numbers are too large",
    ),
    "a year that no calendar has": (
        lambda view: set_header(view, created_at_us=CREATED_AT_END_US),
        "made at 253402300800000000 us",
    ),
    "a mark": (lambda view: set_header(view, mark=b"12345678"), "only the store makes the mark"),
    "a subject that is not there": (lambda view: set_run(view, 0, subject=1), "run 0 is not valid"),
    "a lane that is none": (lambda view: set_run(view, 0, lane=3), "run 0 is not valid"),
    "a slot past the last one": (lambda view: set_run(view, 0, lane=0x4000), "run 0 is not valid"),
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


@pytest.mark.parametrize("lie", [lie for lie, _ in ONE_RUN_LIES.values()], ids=list(ONE_RUN_LIES))
def test_a_batch_with_a_lie_is_not_plain(lie: Callable[[memoryview], object]) -> None:
    view = batch_of([plain("a.b", 3)])
    lie(view)
    if parse_header(view).data_start <= len(view):
        reseal(view)
    assert check_plain(view, len(view), LIMITS.max_message_bytes) is None


LONE_LIES: dict[str, Callable[[memoryview], object]] = {
    "a length too long": put("<I", data_place(0), 4),
    "a length too short": put("<I", data_place(0), 2),
    "a header longer than its message": put("<H", data_place(4), 4),
    "a run shorter than its columns": lambda view: set_run(view, 0, size=9),
    "a flag without its column": lambda view: set_header(view, flags=1),
}


@pytest.mark.parametrize("lie", LONE_LIES.values(), ids=list(LONE_LIES))
def test_a_lone_message_with_a_lie_is_not_plain(lie: Callable[[memoryview], object]) -> None:
    view = batch_of([plain("a.b", 1)])
    lie(view)
    assert check_plain(reseal(view), len(view), LIMITS.max_message_bytes) is None


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_plain_batch_says_what_the_whole_check_finds(count: int) -> None:
    view = batch_of([plain("a.b", count)])
    found, checked = check_plain(view, len(view), LIMITS.max_message_bytes), check_batch(view, LIMITS)
    header, run = checked.header, checked.run
    assert found is not None
    assert run is not None
    assert found[1:] == (
        count, header.created_at_us, header.producer_id, header.producer_sequence, header.data_crc, 0, run[6]
    )  # fmt: skip
    assert names_of(found.table) == checked.names
    assert check_plain(view, len(view), 1) is None  # a message over the limit
    for at in range(len(view)):
        broken = memoryview(bytearray(view))
        broken[at] ^= 16
        assert check_plain(broken, len(view), LIMITS.max_message_bytes) is None or at in range(40, 64), at


def test_the_last_numbers_that_are_taken() -> None:
    view = batch_of([plain("a.b", 3)])
    set_header(view, producer_sequence=PRODUCER_SEQUENCE_END - 3, created_at_us=CREATED_AT_END_US - 1)
    assert refused(reseal(view)) == ""
    assert utc_from_us(parse_header(view).created_at_us).year == 9999


RUNS_LIES: dict[str, tuple[Callable[[memoryview], object], str]] = {
    "a subject that is not there": (lambda view: set_run(view, 1, subject=3), "a subject that the table does not have"),
    "a subject twice": (lambda view: set_run(view, 1, subject=0), "two runs of one batch have the same subject"),
    "a lane that is none": (lambda view: set_run(view, 2, lane=0xFFF), "neither a priority nor a slot"),
    "a slot past the last one": (lambda view: set_run(view, 2, lane=0x4000), "neither a priority nor a slot"),
    "a subject and lane twice": (
        lambda view: (set_run(view, 0, subject=0, lane=1), set_run(view, 1, subject=0, lane=1)),
        "the same subject and lane",
    ),
    "a name without a run": (
        lambda view: (set_run(view, 0, subject=0, lane=1), set_run(view, 1, subject=0, lane=2)),
        "names a subject that no run has",
    ),
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
        (table_with({"subjects": ["a"] * 2}), "names a subject twice"),
        (table_with({"subjects": "ab"}), "not a flat msgpack map"),
        (table_with({"subjects": [b"a", b"b"]}), "not a flat msgpack map"),
        (table_with({"subjects": ["a", "b", "c"]}), r"the table names 3 subjects for [12] runs"),
        (table_with({"subjects": [["a"], ["b"]]}), "not a flat msgpack map"),
        (b"\x91" * 800, "first field of the table is not the source"),
        (msgpack.packb({"subjects": ["a", "b"]}), "first field of the table is not the source"),
        (b"\xc0" * 5_000, r"a table of 5000 bytes is too large for \d runs"),
    ],
)
def test_lying_tables_are_refused(table: bytes, reason: str) -> None:
    for runs in ([plain("a", 1), plain("b", 2)], [plain("a", 1)]):
        view = with_table(batch_of(runs), table)
        with pytest.raises(BadBatch, match=reason):
            check_batch(view, LIMITS)


def test_a_table_that_names_fewer_subjects_than_there_are_runs() -> None:
    view = with_table(batch_of([plain("a", 1), plain("b", 2)]), table_with({"subjects": ["a"]}))
    assert refused(view) == "a run names a subject that the table does not have, or uses a reserved field"


def verdict(view: memoryview, few: int, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "FEW", few)
        return refused(view)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=part_of(300))
@given(runs=contents(max_runs=3, max_count=4), data=st.data())
def test_any_lie_is_refused_or_harmless(runs: Contents, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of records and columns are changed at random, checksums fit: a batch that passes can be read to its end."""
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
