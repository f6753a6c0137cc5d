"""Golden bytes are made and read the same in every version."""

from __future__ import annotations

import pytest

from qmq.broker.journal.record_bytes import unpack
from qmq.format.batch import check_batch, parse_header, validate_stored
from qmq.format.layout import ENTRY, SEGMENT_HEADER, SEGMENT_MAGIC
from qmq.format.pieces import read_answer
from qmq.format.source import ADDRESS_SIZE, SLOT_OFFSET
from tests.format.contents import LIMITS, POSITION, SECRET, STORE, STORED_US, expected, received
from tests.format.golden_cases import BATCHES, DIRECTORY, RECORDS, RICH, RUNS, cases


def golden(name: str) -> memoryview:
    return memoryview(bytearray((DIRECTORY / f"{name}.bin").read_bytes()))


@pytest.mark.parametrize(("name", "content"), cases().items(), ids=list(cases()))
def test_bytes_are_made_as_they_were(name: str, content: bytes) -> None:
    assert content == bytes(golden(name))


def test_every_file_has_its_recipe() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {f"{name}.bin" for name in cases()}


@pytest.mark.parametrize("name", BATCHES)
def test_golden_batches_are_taken_and_read(name: str) -> None:
    checked = check_batch(golden(f"batch-{name}"), LIMITS)
    assert checked.header.messages == sum(map(len, BATCHES[name]))
    header = validate_stored(golden(f"stored-{name}"), POSITION, SECRET, STORE)
    assert header.stored_at_us == STORED_US
    runs, damaged = read_answer(golden(f"stored-{name}"))
    assert damaged == []
    assert received(runs) == expected(BATCHES[name])


@pytest.mark.parametrize("name", RECORDS)
def test_golden_records_of_the_pull_log_are_read(name: str) -> None:
    kind, fields = RECORDS[name]
    assert unpack(kind, golden(f"pulls-{name}")) == (kind, fields)


def test_golden_pieces_are_read() -> None:
    runs, damaged = read_answer(golden("piece-whole"))
    assert (received(runs), damaged) == (expected(RUNS)[3:], [])
    runs, damaged = read_answer(golden("piece-cut"))
    assert (received(runs), damaged) == (expected(RICH)[3:], [])
    runs, damaged = read_answer(golden("piece-runs"))
    assert (received(runs), damaged) == (expected(RUNS)[:2] + expected(RUNS)[3:], [])


def test_a_stored_batch_differs_only_where_the_broker_stamps() -> None:
    for name in BATCHES:
        sent, kept = golden(f"batch-{name}"), golden(f"stored-{name}")
        runs = parse_header(sent).runs
        stamped = {*range(24, 40), *range(48, 56), *range(84, 96)}
        stamped |= {96 + 32 * run + offset for run in range(runs) for offset in range(24, 32)}
        slot = 96 + 32 * runs + SLOT_OFFSET
        stamped |= {*range(slot, slot + ADDRESS_SIZE)}
        assert {place for place in range(len(sent)) if sent[place] != kept[place]} <= stamped
        assert len(sent) == len(kept)


def test_golden_records_are_read() -> None:
    magic, version, partition, store_id, _, base, *_ = SEGMENT_HEADER.unpack(golden("segment-header"))
    assert (magic, version, partition, store_id, base) == (SEGMENT_MAGIC, 1, 3, STORE, POSITION)
    assert ENTRY.unpack(golden("consumer-log-entry"))[:3] == (5, POSITION, STORED_US)


def test_the_documentation_shows_a_golden_batch() -> None:
    """docs/FORMAT.md draws it byte by byte: offset, bytes, two spaces or more, meaning."""
    text = (DIRECTORY.parents[2] / "docs" / "FORMAT.md").read_text("utf-8")
    drawing = text.partition("### One message, byte by byte")[2].partition("```\n")[2].partition("```")[0]
    drawn = b""
    for line in drawing.splitlines():
        offset, shown = line.split(maxsplit=1)
        assert int(offset) == len(drawn)
        drawn += bytes.fromhex(shown.partition("  ")[0])
    assert drawn == bytes(golden("stored-one-message"))
