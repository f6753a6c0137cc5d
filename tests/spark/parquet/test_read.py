"""Reading the Parquet files that the table of an archive lists, as segments are read; damages are reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from qmq.errors import BadBytes
from qmq_spark.parquet import files
from qmq_spark.parquet.read import missing, plan_files
from qmq_spark.read import Wanted
from tests.archive.orders import Row, rows_in, time_of
from tests.spark import reads
from tests.spark.parquet.archives import ALL, DAY_US, archive, read, table_of, write_days
from tests.storage.stores import NOW_US, Sender, close_cleanly, damage, open_store


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive of ``data`` beside it: several files a day, of several row groups. It is not changed."""
    directory = tmp_path_factory.mktemp("archived")
    write_days(directory / "data", 3, 15)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "GATHERED_BYTES", 12_000)
        patch.setattr(files, "OWN_BYTES", 4_000)
        patch.setattr(files, "GROUP_ROWS", 20)
        archive(directory / "data", directory / "archive")
    return directory / "archive"


@pytest.fixture(scope="module")
def rows(archived: Path) -> list[Row]:
    """Return every message of it."""
    return rows_in(archived.parent / "data")


@pytest.fixture
def own(archived: Path, tmp_path: Path) -> Path:
    """Return a copy of it, which may be changed."""
    return Path(shutil.copytree(archived, tmp_path / "own"))


_MIDDLE_US = NOW_US + DAY_US + 10


@pytest.mark.parametrize(
    ("wanted", "of_row"),
    [
        (Wanted(), lambda row: True),
        (
            Wanted(subjects=frozenset(("a", "hotel.order.paid"))),
            lambda row: row["subject"] in ("a", "hotel.order.paid"),
        ),
        (Wanted(prefixes=("hotel.",)), lambda row: row["subject"].startswith("hotel.")),
        (Wanted(partitions=frozenset([1])), lambda row: row["partition"] == 1),
        (Wanted(stored_until=_MIDDLE_US), lambda row: row["stored_at"] < time_of(_MIDDLE_US)),
        (Wanted(stored_from=_MIDDLE_US), lambda row: row["stored_at"] >= time_of(_MIDDLE_US)),
        (
            Wanted(stored_from=_MIDDLE_US, stored_until=_MIDDLE_US + 1, prefixes=("hotel.",)),
            lambda row: row["stored_at"] == time_of(_MIDDLE_US) and row["subject"].startswith("hotel."),
        ),
        (Wanted(created_from=NOW_US + 1), lambda row: False),
    ],
)
@pytest.mark.parametrize("part_bytes", [3_000, 1 << 20])
def test_takes_what_is_wanted_and_all_of_it(
    archived: Path, rows: list[Row], wanted: Wanted, of_row: Callable[[Row], bool], part_bytes: int
) -> None:
    found, damages = read(archived, wanted, part_bytes=part_bytes)
    assert found == [row for row in rows if of_row(row)]
    assert damages == []
    segments = reads.read(archived.parent / "data", wanted)[0]
    assert found == sorted(segments, key=lambda row: (row["partition"], row["position"]))


def test_chosen_columns(archived: Path, rows: list[Row]) -> None:
    names = ("position", "tags", "partition")
    chosen = [{name: row[name] for name in names} for row in rows]
    assert read(archived, schema=reads.schema_of(*names))[0] == chosen
    bodies = read(archived, Wanted(prefixes=("hotel.",)), reads.schema_of("body"))[0]
    assert len(bodies) == sum(row["subject"].startswith("hotel.") for row in rows)


def test_passes_over_files_and_row_groups_of_others(archived: Path) -> None:
    table = table_of(archived)
    everything = [piece.file for part in plan_files(table, ALL, 1 << 30) for piece in part]
    one_day = [
        piece.file for part in plan_files(table, Wanted(stored_until=NOW_US + DAY_US), 1 << 30) for piece in part
    ]
    assert everything == list(table.files)
    assert 0 < len(one_day) < len(everything)
    others = [piece.file for part in plan_files(table, Wanted(subjects=frozenset(["x"])), 1 << 30) for piece in part]
    assert all(file.subject is None for file in others)
    assert any(file.subject is not None for file in everything)


def test_parts_are_of_about_the_same_size(archived: Path) -> None:
    table = table_of(archived)
    parts = plan_files(table, ALL, 4_000)
    assert sum(piece.end - piece.start for part in parts for piece in part) == sum(file.size for file in table.files)
    assert max(sum(piece.end - piece.start for piece in part) for part in parts) <= 4_000
    assert len(parts) > 3


def test_what_no_table_lists_is_not_read(own: Path, rows: list[Row]) -> None:
    path = own / table_of(own).files[0].path
    path.with_name("of-a-killed-run.parquet").write_bytes(path.read_bytes())
    assert read(own)[0] == rows


def test_what_is_one_groups_alone_is_kept_apart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", partitions=2)
    sender = Sender(store)
    sender.stage(("~group~hotel", [b"1"]), ("hotel", [b"2"]))
    sender.write()
    close_cleanly(store)
    archive(tmp_path / "data", tmp_path / "archive")
    assert [row["subject"] for row in read(tmp_path / "archive", Wanted())[0]] == ["hotel"]
    assert sorted(row["subject"] for row in read(tmp_path / "archive", ALL)[0]) == ["hotel", "~group~hotel"]


@pytest.mark.parametrize("place", ["end", "middle", "cut", "longer", "other", "made-anew"])
def test_bad_bytes_are_told_of_and_the_others_read(own: Path, rows: list[Row], place: str) -> None:
    table = table_of(own)
    file = max(table.files, key=lambda file: file.messages)
    path, other = own / file.path, own / table.files[0].path
    data = bytearray(path.read_bytes())
    if place == "middle":
        data[len(data) // 3] ^= 1
    elif place == "end":
        data[-6] ^= 0x40
    elif place == "cut":
        del data[-1:]
    elif place == "longer":
        data += b"PAR1"
    elif place == "made-anew":
        pq.write_table(pq.read_table(path, partitioning=None), path)
        data = bytearray(path.read_bytes())
    else:
        data = bytearray(other.read_bytes()) if other != path else bytearray(len(data))
    path.write_bytes(data)
    for part_bytes in (1 << 20, 3_000):
        found, damages = read(own, part_bytes=part_bytes)
        (told,) = damages
        assert found == [row for row in rows if row in found]
        assert told.messages == len(rows) - len(found) > 0
        assert str(path) in str(told)
    assert len(found) >= len(rows) - file.messages


def test_no_flipped_bit_of_a_page_changes_a_message(own: Path, rows: list[Row]) -> None:
    """Some of them leave a page that can be decompressed, and has other bytes."""
    file = min(table_of(own).files, key=lambda file: file.size)
    path = own / file.path
    data, known = path.read_bytes(), {row["message_id"]: row for row in rows}
    footer = int.from_bytes(data[-8:-4], "little")
    struck = 0
    pages = len(data) - footer - 8
    for offset in [*range(4, 28, 6), *range(28, pages, pages // 4)]:  # a header of a page, which has no checksum
        path.write_bytes(data[:offset] + bytes((data[offset] ^ 4,)) + data[offset + 1 :])
        found, damages = read(own)
        assert [row for row in found if known.get(row["message_id"]) != row] == [], offset
        struck += bool(damages)
    assert struck >= 3, "many bytes are those of messages"


@pytest.mark.parametrize("other", [b"pOsition", b"p\xefsition"])
def test_a_footer_with_another_column_is_told_of(own: Path, rows: list[Row], other: bytes) -> None:
    """A footer has no checksum."""
    file = table_of(own).files[0]
    data = (own / file.path).read_bytes()
    assert b"position" in data
    (own / file.path).write_bytes(data.replace(b"position", other))
    found, damages = read(own)
    (told,) = damages
    assert told.messages == file.messages == len(rows) - len(found)
    assert file.path in str(told)


def test_a_file_that_is_gone_is_an_error(own: Path) -> None:
    (own / table_of(own).files[0].path).unlink()
    with pytest.raises(BadBytes, match="is gone"):
        read(own)


def test_what_was_bad_when_it_was_archived_is_missing(tmp_path: Path) -> None:
    sent = write_days(tmp_path / "data", 1, 10)
    damage(tmp_path / "data", sent[3], len(sent[3].data) - 1)
    archive(tmp_path / "data", tmp_path / "archive")
    table, partition = table_of(tmp_path / "archive"), sent[3].partition
    (told,) = missing(table, ALL, "there")
    assert (told.file, told.partition, told.start) == ("there", partition, sent[3].position)
    assert f"partition {partition}, positions {sent[3].position} to" in str(told)
    assert missing(table, Wanted(partitions=frozenset([1 - partition])), "there") == []
