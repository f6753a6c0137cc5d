"""Restores from archives that have only Parquet."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgpack
import pytest

from qmq import connect
from qmq.archive.file_table import read_table
from qmq.archive.files import LocalFiles
from qmq.errors import InvalidOption
from qmq.format.build import MessageHeader, RunContent, make_header
from qmq.format.layout import LANE_ORDERED
from qmq.intervals import Intervals
from qmq.restore.parquet import ParquetReader
from qmq.restore.read import Found
from qmq.restore.selection import RestoreSelection
from qmq_spark.parquet.merge import MERGED
from tests.archive.orders import write_orders
from tests.broker.harness import Driven
from tests.broker_process import running_broker
from tests.cli.commands import qmq
from tests.restore.archived import Told, check_restored, restoring, told
from tests.restore.test_read import ids_in
from tests.spark.parquet import archives as parquet
from tests.spark.parquet.archives import write_days


def parquet_archive(root: Path, batches: int = 60) -> list[Told]:
    write_orders(root / "source", batches, segment_bytes=256 << 10, max_frame_bytes=128 << 10)
    done = qmq("archive", str(root / "source"), "--to", str(root / "archive"), "--as", "parquet")
    assert done.exit_code == 0, done.output
    return told(root / "source", partitions=2)


async def test_every_message_comes_once_under_its_id(tmp_path: Path) -> None:
    wanted = parquet_archive(tmp_path)
    async with running_broker(tmp_path / "target") as url:
        first = await restoring(tmp_path, url).run()
        again = await restoring(tmp_path, url).run()
        assert first.counts.restored == len(wanted) == again.counts.restored
    check_restored(wanted, tmp_path / "target")


@pytest.mark.parametrize("other", [b"pOsition", b"p\xefsition"])
def test_a_footer_with_another_column_is_told_of(tmp_path: Path, other: bytes) -> None:
    """A footer has no checksum."""
    wanted = parquet_archive(tmp_path)
    files = LocalFiles(tmp_path / "archive")
    file = read_table(files).files[0]
    path = tmp_path / "archive" / file.path
    path.write_bytes(path.read_bytes().replace(b"position", other))
    steps = list(ParquetReader(files, RestoreSelection(), {}).steps())
    (damage,) = [step.damage for step in steps if step.damage is not None]
    assert damage.messages == file.messages == len(wanted) - ids_in(steps).total()


@pytest.mark.parametrize("order_key", ["", "x" * 1_025, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 513])
async def test_an_order_key_that_no_client_sends_is_left_out(tmp_path: Path, order_key: str) -> None:
    source = Driven(tmp_path / "source")
    lane = LANE_ORDERED | 7
    strange = MessageHeader(bytes(msgpack.packb({"o": [order_key]})), 0, 0, 0, 0, False, lane)
    source.send_runs(RunContent("a.b", [b"strange"], [strange], lane))
    source.send_runs(RunContent("a.b", [b"good"], [make_header(order_key="k")], lane))
    source.store.close(clean=True)
    done = qmq("archive", str(tmp_path / "source"), "--to", str(tmp_path / "archive"), "--as", "parquet", "--seal")
    assert done.exit_code == 0, done.output
    async with running_broker(tmp_path / "target") as url:
        assert (await restoring(tmp_path, url).run()).counts.restored == 2
        async with connect(url) as client:
            found = {message.body: message.order_key async for message in client.find("a.")}
    assert found == {b"strange": None, b"good": "k"}


def test_what_is_done_or_stored_is_left_out(tmp_path: Path) -> None:
    wanted = parquet_archive(tmp_path)
    files, found = LocalFiles(tmp_path / "archive"), Found()
    steps = list(ParquetReader(files, RestoreSelection(), {}).steps())
    assert ids_in(steps).total() == len(wanted) == len(ids_in(steps))
    done = dict[str, Intervals]()
    for step in steps[::2]:
        done.setdefault(step.log, Intervals()).add(step.start, step.end)
    for one in wanted[::3]:
        raw = bytes.fromhex(one.id)
        position = int.from_bytes(raw[8:], "big")
        found.setdefault((raw[:6], raw[7]), Intervals()).add(position, position + 1)
    reader = ParquetReader(files, RestoreSelection("hotel."), done)
    reader.found = found
    left = set(ids_in(steps[1::2])) - {one.id for one in wanted[::3]}
    hotel = {one.id for one in wanted if one.subject.startswith("hotel.")}
    assert set(ids_in(list(reader.steps()))) == left & hotel


def test_times_choose(tmp_path: Path) -> None:
    parquet_archive(tmp_path)
    files = LocalFiles(tmp_path / "archive")
    stamps = 1_700_000_000_000_000
    early = ids_in(list(ParquetReader(files, RestoreSelection(until_us=stamps + 30), {}).steps()))
    late = ids_in(list(ParquetReader(files, RestoreSelection(since_us=stamps + 30), {}).steps()))
    assert early
    assert late
    assert early + late == ids_in(list(ParquetReader(files, RestoreSelection(), {}).steps()))


@pytest.mark.parametrize("cut", [True, False])
def test_a_bad_file_is_told_of(tmp_path: Path, cut: bool) -> None:
    parquet_archive(tmp_path)
    (path, *_) = sorted((tmp_path / "archive").rglob("*.parquet"))
    data = bytearray(path.read_bytes())
    if cut:
        data = data[:-1]
    else:
        data[len(data) // 3] ^= 1
    path.write_bytes(data)
    damages = [
        step for step in ParquetReader(LocalFiles(tmp_path / "archive"), RestoreSelection(), {}).steps() if step.damage
    ]
    assert len(damages) == 1
    assert damages[0].damage is not None
    assert str(path) == damages[0].damage.file
    assert not damages[0].is_settled


async def test_a_restore_goes_on_when_the_other_form_comes(tmp_path: Path) -> None:
    """Messages restored from Parquet are not restored again from segments; new ones are."""
    parquet_archive(tmp_path, 20)
    async with running_broker(tmp_path / "target") as url:
        await restoring(tmp_path, url).run()
        write_orders(tmp_path / "source", 20, seed=2, segment_bytes=256 << 10, max_frame_bytes=128 << 10)
        assert qmq("archive", str(tmp_path / "source"), "--to", str(tmp_path / "archive")).exit_code == 0
        wanted = told(tmp_path / "source", partitions=2)
        for _ in range(2):
            assert (await restoring(tmp_path, url).run()).counts.restored == len(wanted)
    check_restored(wanted, tmp_path / "target")


def test_progress_goes_by_files_as_runs_wrote_them(tmp_path: Path) -> None:
    """Files that are merged meanwhile have more rows, and rows that are done are not read again."""
    place, ids = tmp_path / "archive", Counter[str]()
    for number in range(MERGED):
        write_days(tmp_path / "data", 1, 1, seed=number)
        parquet.archive(tmp_path / "data", place, run=f"run-{number}")
        if number == MERGED - 2:
            steps = list(ParquetReader(LocalFiles(place), RestoreSelection(), {}).steps())
            assert len({step.log for step in steps}) == MERGED - 1
            done = dict[str, Intervals]()
            for step in steps[::2]:
                done.setdefault(step.log, Intervals()).add(step.start, step.end)
            ids += ids_in(steps[::2])
    (file,) = read_table(LocalFiles(place)).files
    assert len(file.parts) == MERGED
    reader = ParquetReader(LocalFiles(place), RestoreSelection(), done)
    assert reader.left_bytes() == file.messages - sum(ranges.size for ranges in done.values())
    later = list(reader.steps())
    assert sum(step.end - step.start for step in later) == reader.left_bytes()
    ids += ids_in(later)
    assert ids == Counter(one.id for one in told(tmp_path / "data", partitions=2))


async def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    async with running_broker(tmp_path / "target") as url:
        with pytest.raises(InvalidOption, match="is no archive"):
            await restoring(tmp_path, url).run()
