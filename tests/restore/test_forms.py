"""The form of an archive from which each message is restored: exactly one, whatever is archived meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qmq.archive.file_table import FileTable, ListedSegment
from qmq.archive.manifest import Manifest
from qmq.errors import InvalidOption
from qmq.intervals import Intervals
from qmq.restore.forms import assign, not_from_segments, settle
from qmq.restore.progress import RestoreProgress
from tests.archive import archives
from tests.broker_process import running_broker
from tests.restore.archived import check_restored, restoring, told
from tests.spark.parquet import archives as parquet
from tests.spark.parquet.archives import write_days

STORE = "7f0000015191"
LOG = f"{STORE}-0"


def segment(base: int, end: int) -> Manifest:
    return Manifest(STORE, 0, base, end, 1, 1, 1, 2, 9, 9, 9, 9, 9, 9, 9)


def listed(*spans: tuple[int, int]) -> FileTable:
    return FileTable(1, segments=tuple(ListedSegment(STORE, 0, base, end, 1) for base, end in spans))


def ranges(of: dict[str, Intervals]) -> list[tuple[int, int]]:
    return list(of.get(LOG, ()))


def begun() -> RestoreProgress:
    return RestoreProgress("72" * 16, [STORE], 5, STORE)


def assigned(progress: RestoreProgress, table: FileTable, segments: Sequence[Manifest] = ()) -> list[tuple[int, int]]:
    assign(progress, table, segments, "there")
    return ranges(progress.by_files)


def test_segments_come_first() -> None:
    progress = begun()
    assert assigned(progress, listed((0, 100), (100, 200)), [segment(100, 200)]) == [(0, 100)]
    assert ranges(progress.in_files) == [(0, 200)]
    assert assigned(begun(), listed((0, 100)), [segment(0, 60)]) == [(60, 100)]
    assert assigned(begun(), FileTable(), [segment(0, 60)]) == []


def test_what_was_chosen_stays() -> None:
    progress = begun()
    assigned(progress, listed((0, 100)))
    both = listed((0, 100), (100, 200))
    assert assigned(progress, both, [segment(0, 100), segment(100, 200)]) == [(0, 100)]
    assert ranges(not_from_segments(progress)) == [(0, 100)]
    progress.done[LOG] = Intervals()
    progress.done[LOG].add(300, 400)
    assert assigned(progress, listed((0, 400)), [segment(100, 200)]) == [(0, 100), (200, 300)]
    settle(progress)
    assert ranges(progress.done) == [(0, 100), (200, 400)]
    assert progress.by_files == {}
    assert assigned(progress, listed((0, 500)), [segment(100, 200)]) == [(400, 500)]


def test_a_form_that_went_is_refused() -> None:
    progress = begun()
    assigned(progress, listed((0, 200)), [segment(100, 200)])
    for table, segments in ((listed((100, 200)), [segment(0, 200)]), (listed((0, 200)), [])):
        with pytest.raises(InvalidOption, match="there lacks Parquet or segments that it had"):
            assign(progress, table, segments, "there")
    progress.done[LOG] = Intervals()
    progress.done[LOG].add(100, 200)
    assert assigned(progress, listed((0, 200))) == [(0, 100)]


async def test_an_archive_of_two_forms_is_restored_whole_and_once(tmp_path: Path) -> None:
    """One store is archived as Parquet, another as segments, and then each in the other form too."""
    for name, seed in (("a", 1), ("b", 2)):
        write_days(tmp_path / name, 1, 8, seed=seed)
    to = tmp_path / "archive"
    parquet.archive(tmp_path / "a", to)
    archives.archive(tmp_path / "b", to)
    async with running_broker(tmp_path / "target") as url:
        first = (await restoring(tmp_path, url).run()).counts.restored
        parquet.archive(tmp_path / "b", to, run="later")
        archives.archive(tmp_path / "a", to)
        assert (await restoring(tmp_path, url).run()).counts.restored == first
        write_days(tmp_path / "a", 1, 4, seed=3)
        parquet.archive(tmp_path / "a", to, run="last")
        wanted = [*told(tmp_path / "a", partitions=2), *told(tmp_path / "b", partitions=2)]
        assert (await restoring(tmp_path, url).run()).counts.restored == len(wanted) > first
    check_restored(wanted, tmp_path / "target")


async def test_positions_of_several_stores_that_are_the_same_are_refused(tmp_path: Path) -> None:
    """They are refused before anything is sent: rows do not say which store they come from."""
    to = tmp_path / "archive"
    write_days(tmp_path / "a", 1, 3)
    parquet.archive(tmp_path / "a", to)
    archives.archive(tmp_path / "a", to)
    (path,) = (to / "tables").iterdir()
    table = parquet.table_of(to)
    other = FileTable(
        1, table.files,
        (*table.segments, *(ListedSegment("0" * 12, *one_of(each)) for each in table.segments)),
    )  # fmt: skip
    path.write_bytes(other.pack())
    async with running_broker(tmp_path / "target") as url:
        with pytest.raises(InvalidOption, match="at the same positions"):
            await restoring(tmp_path, url).run()
    assert told(tmp_path / "target") == []


def one_of(segment: ListedSegment) -> tuple[int, int, int, int]:
    return segment.partition, segment.base, segment.end, segment.messages
