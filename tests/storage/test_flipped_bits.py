"""One flipped bit anywhere in any file: what it spoils is never delivered, verify names file and place, and after a
start everything else still is.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from crc32c import crc32c

from qmq.errors import BadBatch, BadBytes, ForeignFile
from qmq.format.batch import validate_stored
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    DERIVED_HEADER_SIZE,
    ENTRIES_MAGIC,
    IDENTITY_MAGIC,
    IDENTITY_VERSION,
    INDEX_MAGIC,
    ORDER_MAGIC,
    RUN_SIZE,
    SEGMENT_HEADER_SIZE,
)
from qmq.format.pieces import read_answer
from qmq.storage.consumer_log.header import parse_derived
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import unpack_envelope
from qmq.storage.message_log.segment import SegmentOwner, check_header
from qmq.storage.meta.identity import Identity, read_copies
from qmq.storage.meta.subjects import SUBJECTS_HEADER_SIZE, parse_records
from qmq.storage.meta.subjects import check_header as check_subjects_header
from qmq.storage.verify.batches import BatchColumns
from qmq.storage.verify.report import VerifyReport
from qmq.storage.verify.verify import verify
from tests.effort import every
from tests.storage.histories import (
    Batch,
    History,
    Message,
    Moment,
    kind_of,
    survive,
    write_files,
)

#: Every so manieth bit, half of them by default, is tried with a whole broker; each bit of what a checksum covers is
#: tried below, without one.
STRIDE: Final = {"store": 97, "checkpoint": 487, "subjects": 61, "index": 197, "entries": 487, "order": 97}
LONGEST: Final = ("checkpoint", "entries")


def flipped(data: bytes, bit: int) -> bytes:
    """*data* with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Spoiled(NamedTuple):
    """What one bit of a segment costs: the batch it lies in, and of that the messages that cannot be told good."""

    batch: Batch | None
    messages: set[Message]


def spoiled(moment: Moment, name: str, byte: int) -> Spoiled:
    """By the bytes of the log: a header, a run record or a table spoils the batch, a column or payload its run."""
    data = moment.files[name]
    for batch in moment.batches:
        file, start = batch.place(moment.files)
        if file != name or not start <= byte < start + batch.size:
            continue
        runs = len(batch.runs)
        data_start = BATCH_HEADER_SIZE + RUN_SIZE * runs + int.from_bytes(data[start + 12 : start + 16], "little")
        if byte - start < data_start:
            return Spoiled(batch, batch.messages)
        for number, run in enumerate(batch.runs):
            record = start + BATCH_HEADER_SIZE + RUN_SIZE * number
            offset, size = (int.from_bytes(data[record + at : record + at + 4], "little") for at in (12, 16))
            if offset <= byte - start - data_start < offset + size:
                return Spoiled(batch, set(run))
    return Spoiled(None, set())


def _faults(report: VerifyReport) -> dict[str, list[int | None]]:
    found: dict[str, list[int | None]] = {}
    for finding in report.findings:
        found.setdefault(str(finding.file.relative_to(report.directory)), []).append(finding.position)
    return found


def _try(history: History, directory: Path, moment: Moment, name: str, bit: int) -> None:
    """Flip one bit of a stopped store; verify, start, deliver."""
    byte = bit // 8
    write_files(directory, moment.files | {name: flipped(moment.files[name], bit)})
    loss = spoiled(moment, name, byte) if kind_of(name) == "messages" else Spoiled(None, set())
    matters = kind_of(name) != "messages" or byte < SEGMENT_HEADER_SIZE or loss.batch is not None
    before = verify(directory, Disk())
    if matters and not _is_made_again(moment, name):
        assert not before.is_good
        places = _faults(before)[name]
        if loss.batch is not None:
            assert loss.batch.place(moment.files)[1] in places, (places, byte)
    if kind_of(name) == "index" and byte < DERIVED_HEADER_SIZE:
        assert _faults(before)[name] == [0], "also of one that is made again"
    small = 1 if loss.messages else 6_000
    report, _ = survive(history, directory, moment, loss.messages, max_bytes=small, spoiled=loss.batch)
    if loss.messages:
        assert not report.is_good, "verify still says where it is"
    else:
        assert report.is_good, "\n".join(map(str, report.findings))


def _is_made_again(moment: Moment, name: str) -> bool:
    """Whether what is bad in a file is no fault: the lock, the index of a segment that goes on (made at each start)."""
    log, base = Path(name).parent, Path(name).stem
    last = max((Path(file).stem for file in moment.files if Path(file).parent == log), default="")
    return name == "lock" or (kind_of(name) == "index" and base == last)


@pytest.mark.parametrize(
    "kind",
    # Of the longest two no lines are counted: with some bits of the others all of them run.
    [*("store", "subjects", "index", "order"), *(pytest.param(kind, marks=pytest.mark.no_cover) for kind in LONGEST)],
)
def test_a_flipped_bit_outside_of_the_message_log_costs_nothing(history: History, quick: Path, kind: str) -> None:
    moment, tried, stride = history.stopped, 0, every(STRIDE[kind])
    for name in (name for name in moment.files if kind_of(name) == kind):
        for bit in range(tried % stride, 8 * len(moment.files[name]), stride):
            try:
                _try(history, quick / "flipped", moment, name, bit)
            except BaseException as error:
                error.add_note(f"bit {bit} of {name}")
                raise
            tried += 1
    print(f"{kind}: {tried} bits flipped")
    assert tried >= 10


def test_a_flipped_bit_in_the_message_log_costs_its_run_or_its_batch(history: History, quick: Path) -> None:
    moment, tried = history.stopped, Counter[str]()
    for name in (name for name in moment.files if kind_of(name) == "messages"):
        end = 8 * len(moment.files[name].rstrip(b"\0"))
        for bit in (
            *range(0, 8 * SEGMENT_HEADER_SIZE, every(101)),
            *range(8 * SEGMENT_HEADER_SIZE + tried["a run"], end, every(1_999)),
        ):
            try:
                _try(history, quick / "flipped", moment, name, bit)
            except BaseException as error:
                error.add_note(f"bit {bit} of {name}")
                raise
            loss = spoiled(moment, name, bit // 8)
            part = "a header" if loss.batch is None else "a batch" if loss.messages == loss.batch.messages else "a run"
            tried[part] += 1
    print(dict(tried))
    assert all(tried[part] for part in ("a header", "a batch", "a run")), tried


# --- each bit, without a broker --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def identity(history: History, quick: Path) -> Identity:
    write_files(quick / "identity", history.stopped.files)
    found = read_copies(Disk(), quick / "identity")[0].identity
    assert found is not None
    return found


def _one_of_each(moment: Moment) -> list[tuple[Batch, bytes]]:
    """A batch of one message, one of more in one run, and one of several runs, as they are stored."""
    shapes = {(len(batch.runs) > 1, len(batch.messages) > 1): batch for batch in moment.batches}
    placed = [(batch, *batch.place(moment.files)) for batch in shapes.values()]
    return [(batch, moment.files[file][start : start + batch.size]) for batch, file, start in placed]


def test_each_bit_of_a_batch_is_noticed(history: History, identity: Identity) -> None:
    """By recovery, and, every third, by verify; and to a client none brings anything that was not sent."""
    tried = 0
    for batch, data in _one_of_each(history.stopped):
        owner = SegmentOwner(identity.store_id, batch.partition)
        columns = BatchColumns(owner, identity.secret, lambda name, lane: 0)
        assert columns.good_prefix(memoryview(data), batch.position).size == len(data)
        for bit in range(8 * len(data)):
            bad = memoryview(bytearray(flipped(data, bit)))
            with pytest.raises(BadBatch):
                validate_stored(bad, batch.position, identity.secret, identity.store_id)
            if bit % 3 == 0:
                assert columns.good_prefix(bad, batch.position).size == 0
                assert _given(bad) <= batch.messages
            tried += 1
    print(f"{tried} bits flipped")
    assert tried > 3 * 8 * (BATCH_HEADER_SIZE + RUN_SIZE)


def _given(answer: memoryview) -> set[Message]:
    """The messages that a client takes out of an answer; none when it refuses it."""
    try:
        runs, _ = read_answer(answer)
    except BadBatch:
        return set()
    return {(run.subject, run.first_sequence + n, bytes(body)) for run in runs for n, body in enumerate(run.bodies())}


@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_each_bit_of_a_small_file_is_noticed(history: History, kind: str) -> None:
    magic, version = {
        "store": (IDENTITY_MAGIC, IDENTITY_VERSION),
        "checkpoint": (CHECKPOINT_MAGIC, CHECKPOINT_VERSION),
    }[kind]
    name, data = max((name, data) for name, data in history.stopped.files.items() if kind_of(name) == kind)
    assert unpack_envelope(data, magic, version, name)
    for bit in range(8 * len(data)):
        with pytest.raises(BadBytes):
            unpack_envelope(flipped(data, bit), magic, version, name)


@pytest.mark.parametrize(
    ("kind", "magic"), [("entries", ENTRIES_MAGIC), ("order", ORDER_MAGIC), ("index", INDEX_MAGIC)]
)
def test_each_bit_of_a_derived_file_is_noticed(history: History, kind: str, magic: bytes) -> None:
    name, data = next((name, data) for name, data in history.stopped.files.items() if kind_of(name) == kind)
    header = parse_derived(data[:DERIVED_HEADER_SIZE], magic, Path(name))
    assert header.sealed
    assert crc32c(data[DERIVED_HEADER_SIZE:]) == header.body_crc
    for bit in range(8 * len(data)):
        bad = flipped(data, bit)
        if bit >= 8 * DERIVED_HEADER_SIZE:
            assert crc32c(bad[DERIVED_HEADER_SIZE:]) != header.body_crc
            continue
        with pytest.raises((BadBytes, ForeignFile)):
            parse_derived(bad[:DERIVED_HEADER_SIZE], magic, Path(name))


def test_each_bit_of_the_registry_is_noticed(history: History, identity: Identity) -> None:
    """No number gets another name by it."""
    data = history.stopped.files["subjects"]
    names = parse_records(data).names
    for bit in range(8 * len(data)):
        bad = flipped(data, bit)
        if bit < 8 * SUBJECTS_HEADER_SIZE:
            with pytest.raises((BadBytes, ForeignFile)):
                check_subjects_header(bad, identity.store_id, Path("subjects"))
            continue
        found = parse_records(bad)
        assert found.damaged or found.end < len(data)
        assert all(name in (None, names[number]) for number, name in enumerate(found.names))


def test_each_bit_of_a_segment_header_is_noticed(history: History, identity: Identity) -> None:
    """It says then neither where the segment before ended nor that it belongs somewhere else."""
    name, data = next((name, data) for name, data in history.stopped.files.items() if kind_of(name) == "messages")
    owner, base = SegmentOwner(identity.store_id, int(name[4])), int(Path(name).stem, 16)
    assert check_header(data[:SEGMENT_HEADER_SIZE], Path(name), owner, base) == base
    for bit in range(8 * SEGMENT_HEADER_SIZE):
        assert check_header(flipped(data, bit)[:SEGMENT_HEADER_SIZE], Path(name), owner, base) is None
