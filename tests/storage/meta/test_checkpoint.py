"""The content of checkpoints, and which are kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import StorageFailed, StorageFull
from qmq.format.layout import CHECKPOINT_MAGIC, CHECKPOINT_VERSION
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import FileState, pack_envelope, read_envelope
from qmq.storage.meta.checkpoint import (
    CheckpointClaims,
    PartitionClaim,
    SubjectsClaim,
    checkpoint_path,
    list_checkpoints,
    pack_numbers,
    read_checkpoint,
    write_checkpoint,
)
from qmq.storage.meta.gaps import Gaps
from qmq.storage.types import Hole, SegmentSpan
from tests.fake_disk import FakeDisk

U64 = st.integers(0, 2**64 - 1)
PAIRS = st.lists(st.tuples(U64, U64), max_size=4)
JOURNAL = st.none() | st.tuples(U64, U64, st.integers(0, 2**32 - 1))
PARTITIONS = st.builds(
    lambda position, spans, holes, journal: PartitionClaim(
        position, tuple(SegmentSpan(*span) for span in spans), tuple(Hole(*hole) for hole in holes), journal
    ),
    U64, PAIRS, PAIRS, JOURNAL,
)  # fmt: skip
SUBJECTS = st.lists(st.booleans(), max_size=5).flatmap(
    lambda are_forgotten: st.builds(
        lambda length, end, ends, firsts: SubjectsClaim(
            length,
            len(are_forgotten),
            ends,
            firsts,
            Gaps().pack(),
            pack_numbers(np.array(are_forgotten, np.bool_)),
            end,
        ),
        U64,
        U64,
        st.binary(min_size=8 * are_forgotten.count(False), max_size=8 * are_forgotten.count(False)),
        st.binary(min_size=8 * are_forgotten.count(False), max_size=8 * are_forgotten.count(False)),
    )
)
CLAIMS = st.builds(
    CheckpointClaims,
    number=st.integers(1, 10**9),
    created_at_us=U64,
    store_id=st.binary(min_size=6, max_size=6),
    sequence_base=U64,
    last_stored_at_us=U64,
    partitions=st.lists(PARTITIONS, max_size=3).map(tuple),
    subjects=SUBJECTS,
    state=st.dictionaries(st.text(max_size=8), st.binary(max_size=30), max_size=3),
)


def test_columns_have_all_numbers() -> None:
    are_forgotten = np.array([True, False, True, True, False, True])
    two = np.array([7, 9], "<u8").tobytes()
    claim = SubjectsClaim(32, 6, two, two, Gaps().pack(), pack_numbers(are_forgotten), 5)
    assert (claim.forgotten_count(), claim.forgotten_numbers().tolist()) == (4, [0, 2, 3, 5])
    assert [column.tolist() for column in claim.columns()] == [[0, 7, 0, 0, 9, 0]] * 2


@pytest.mark.parametrize("borders", [[1], [2, 1], [1, 1], [0, 2, 2, 4], [0, 7], [5, 2**32 - 1]])
def test_forgotten_numbers_that_make_no_sense_are_rot(borders: list[int]) -> None:
    claim = SubjectsClaim(32, 6, b"", b"", b"", np.array(borders, "<u4").tobytes())
    with pytest.raises(ValueError, match="forgotten"):
        claim.forgotten_count()


def claims(number: int) -> CheckpointClaims:
    return CheckpointClaims(number, 5, b"store1", 0, 7, (), SubjectsClaim(32, 0, b"", b"", Gaps().pack()), {})


@given(CLAIMS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, content: CheckpointClaims) -> None:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(FakeDisk(), path, content)
    found = read_checkpoint(Disk(), path, content.number)
    assert (found.state, found.claims, found.reason) == (FileState.GOOD, content, "")


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 5, 9):
        write_checkpoint(FakeDisk(), tmp_path, claims(number))
    assert list_checkpoints(Disk(), tmp_path) == [9, 5]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-", "checkpoint-x", "checkpoint-1.tmp", "checkpoint--1", "checkpoint-²", "Checkpoint-1"):
        (tmp_path / name).write_bytes(b"")
    write_checkpoint(FakeDisk(), tmp_path, claims(3))
    assert list_checkpoints(Disk(), tmp_path) == [3]
    with pytest.raises(StorageFailed):
        list_checkpoints(Disk(), tmp_path / "missing")


@pytest.mark.parametrize("operation", ["open", "pwritev", "fsync", "rename"])
def test_one_that_cannot_be_written_leaves_the_others(tmp_path: Path, operation: str) -> None:
    for number in (1, 2):
        write_checkpoint(FakeDisk(), tmp_path, claims(number))
    disk = FakeDisk("boot-1")
    disk.fail(operation, 1, 28)
    with pytest.raises(StorageFull, match="checkpoint-3"):
        write_checkpoint(disk, tmp_path, claims(3))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_an_old_one_that_cannot_be_removed_is_no_failure(tmp_path: Path) -> None:
    for number in (1, 2):
        write_checkpoint(FakeDisk(), tmp_path, claims(number))
    disk = FakeDisk("boot-1")
    disk.fail_always("unlink", 13)
    write_checkpoint(disk, tmp_path, claims(3))
    assert list_checkpoints(Disk(), tmp_path) == [3, 2, 1]
    write_checkpoint(FakeDisk(), tmp_path, claims(4))
    assert list_checkpoints(Disk(), tmp_path) == [4, 3]


@pytest.mark.parametrize("field", ["number", "store_id", "partitions", "subjects", "state", "last_stored_at_us"])
def test_one_that_lacks_a_field_is_rotten(tmp_path: Path, field: str) -> None:
    write_checkpoint(FakeDisk(), tmp_path, claims(1))
    path = checkpoint_path(tmp_path, 1)
    content = read_envelope(Disk(), path, CHECKPOINT_MAGIC, CHECKPOINT_VERSION).content
    assert content is not None
    del content[field]
    path.write_bytes(b"".join(pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content)))
    found = read_checkpoint(Disk(), tmp_path, 1)
    assert (found.state, found.claims) == (FileState.ROTTEN, None)
    assert f"{path} lacks a field" in found.reason


def test_fields_that_nobody_knows_are_passed_over(tmp_path: Path) -> None:
    span, hole = SegmentSpan(0, 64), Hole(64, 70)
    known = dataclasses.replace(claims(1), partitions=(PartitionClaim(70, (span,), (hole,), (0, 1, 2)),))
    write_checkpoint(FakeDisk(), tmp_path, known)
    path = checkpoint_path(tmp_path, 1)
    content = read_envelope(Disk(), path, CHECKPOINT_MAGIC, CHECKPOINT_VERSION).content
    assert content is not None
    for fields in (content, content["subjects"], content["partitions"][0]):
        fields["of_a_later_release"] = {"x": [1]}
    path.write_bytes(b"".join(pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content)))
    assert read_checkpoint(Disk(), tmp_path, 1).claims == known


def test_columns_of_another_length_are_rotten(tmp_path: Path) -> None:
    write_checkpoint(FakeDisk(), tmp_path, claims(1))
    path = checkpoint_path(tmp_path, 1)
    content = read_envelope(Disk(), path, CHECKPOINT_MAGIC, CHECKPOINT_VERSION).content
    assert content is not None
    content["subjects"]["count"] = 2
    path.write_bytes(b"".join(pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content)))
    assert read_checkpoint(Disk(), tmp_path, 1).state is FileState.ROTTEN
