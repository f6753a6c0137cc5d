"""Streams: each message once, whatever happens between two micro-batches; limits; removed messages are reported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

import qmq
from qmq.errors import BadBytes
from qmq_spark.options import read_options
from qmq_spark.stream import Offset, QmqStreamReader
from tests.archive.archives import archive
from tests.archive.orders import Row, rows_in, time_of, write_orders
from tests.broker_process import broker_process
from tests.spark.session import environment_of
from tests.storage.stores import NOW_US, Sender, close_cleanly, open_store, segment_files


def reader_of(place: Path | str, **options: Any) -> QmqStreamReader:
    read = read_options({"path": str(place), **{name: str(value) for name, value in options.items()}})
    return QmqStreamReader(read, read.schema)


def batches_of(reader: QmqStreamReader, start: Offset, limit: Any) -> Iterator[tuple[Offset, list[Row]]]:
    """Run micro-batches until nothing is left."""
    while (end := reader.latestOffset(start, limit)) != start:
        yield end, rows_between(reader, start, end)
        start = end


def rows_between(reader: QmqStreamReader, start: Offset, end: Offset) -> list[Row]:
    start, end = json.loads(json.dumps([start, end]))
    found = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["partition"], row["position"]))


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["partition"], row["position"]))


@pytest.mark.parametrize("most_bytes", [1, 3_000, 40_000])
def test_limits_are_kept_and_nothing_is_missed(tmp_path: Path, most_bytes: int) -> None:
    sent = write_orders(tmp_path, 80)
    reader = reader_of(tmp_path, max_trigger_bytes=most_bytes)
    assert reader.getDefaultReadLimit() == ReadMaxBytes(most_bytes)
    largest = max(len(batch.data) for batch in sent)
    rows: list[Row] = []
    for number, (_, found) in enumerate(batches_of(reader, reader.initialOffset(), reader.getDefaultReadLimit())):
        assert found, number
        assert sum(len(row["body"]) for row in found) <= most_bytes + 2 * largest
        rows += found
    assert ordered(rows) == rows_in(tmp_path)
    assert number >= min(len(sent) // 2 - 1, sum(len(batch.data) for batch in sent) // (most_bytes + 2 * largest))
    reader.stop()


def test_goes_on_as_a_broker_writes(tmp_path: Path) -> None:
    """Each look finds what was added since the last one; what it found before is not read again."""
    store = open_store(tmp_path, partitions=2)
    sender = Sender(store)
    reader = reader_of(tmp_path)
    assert reader.getDefaultReadLimit() == ReadAllAvailable()
    offset, found = reader.initialOffset(), list[bytes]()
    assert reader.latestOffset(offset, ReadAllAvailable()) == {} or reader.partitions({}, offset) == []
    for number in range(40):
        sender.stage(("a", [b"%d" % number + b"x" * 2_000] * 3), partition=number % 2)
        sender.write()
        if number % 3 == 0:
            end = reader.latestOffset(offset, ReadAllAvailable())
            found += [row["body"] for row in rows_between(reader, offset, end)]
            offset = end
    close_cleanly(store)
    end = reader.latestOffset(offset, ReadAllAvailable())
    found += [row["body"] for row in rows_between(reader, offset, end)]
    assert sorted(found) == sorted(row["body"] for row in rows_in(tmp_path))
    assert reader.reportLatestOffset() == end == reader.latestOffset(end, ReadAllAvailable())
    assert rows_between(reader_of(tmp_path), {}, end) == rows_in(tmp_path)
    assert [len(numbers) for numbers in end.values()] == [2, 2]
    assert len(segment_files(tmp_path)) > 1


def test_an_archive_grows(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 30)
    archive(source, to)
    reader = reader_of(to)
    first = reader.latestOffset({}, ReadAllAvailable())
    rows = rows_between(reader, {}, first)
    assert rows == rows_in(source)
    store = open_store(source, partitions=2)
    sender = Sender(store)
    for number in range(30):
        sender.stage(("late", [b"x" * 900]), partition=number % 2)
        sender.write()
    close_cleanly(store)
    archive(source, to)
    second = reader.latestOffset(first, ReadAllAvailable())
    assert ordered(rows + rows_between(reader, first, second)) == rows_in(source)


def test_a_segment_that_goes_on_is_read_to_its_end(tmp_path: Path) -> None:
    """The last segment of a stopped store: the archive has more of it after the store was started again."""
    source, to = tmp_path / "data", tmp_path / "archive"
    reader, offset, rows = None, dict[str, list[int]](), list[Row]()
    for seed in range(3):
        write_orders(source, 12, seed)
        archive(source, to)
        reader = reader if reader is not None else reader_of(to)
        end = reader.latestOffset(offset, ReadAllAvailable())
        rows += rows_between(reader, offset, end)
        offset = end
        assert ordered(rows) == rows_in(source)
    assert len(segment_files(source)) < 12


def test_what_is_archived_behind_what_was_read_comes_too(tmp_path: Path) -> None:
    """An older segment, and one of another store, after a later one: each message once."""
    write_orders(tmp_path / "data", 80)
    write_orders(tmp_path / "other", 20, seed=2)
    rows = ordered([*rows_in(tmp_path / "data"), *rows_in(tmp_path / "other")])
    for name in ("data", "other"):
        archive(tmp_path / name, tmp_path / "all")
    manifests = sorted((tmp_path / "all").rglob("*.manifest"), reverse=True)
    assert len(manifests) > 5, manifests
    reader, offset, found = reader_of(tmp_path / "archive"), dict[str, list[int]](), list[Row]()
    for manifest in manifests:
        to = tmp_path / "archive" / manifest.parent.relative_to(tmp_path / "all")
        to.mkdir(parents=True, exist_ok=True)
        for path in sorted(manifest.parent.glob(f"{manifest.stem}.*")):
            shutil.copy(path, to)
        end = reader.latestOffset(offset, ReadAllAvailable())
        more = rows_between(reader, offset, end)
        assert more
        assert more == rows_between(reader_of(tmp_path / "archive"), offset, end)
        found += more
        offset = end
    assert ordered(found) == rows
    assert [len(numbers) for numbers in offset.values()] == [2] * 4


def test_live_brokers_are_followed_over_restarts(tmp_path: Path) -> None:
    with broker_process(tmp_path / "one") as one, broker_process(tmp_path / "two", partitions=2) as two:
        reader = reader_of(f"{one.url},{two.url}")
        offset, found = reader.initialOffset(), list[bytes]()
        for number in range(6):
            for broker in (one, two):
                with qmq.connect_sync(broker.url) as client:
                    client.send_many("a", [f"{number} {broker.path.name} {at}".encode() for at in range(3)])
            if number == 3:
                two.kill()
                two.start()
            end = reader.latestOffset(offset, ReadAllAvailable())
            found += [row["body"] for row in rows_between(reader, offset, end)]
            offset = end
        assert len({name.partition("-")[0] for name in offset}) == 2
        expected = [
            f"{number} {name} {at}".encode() for number in range(6) for name in ("one", "two") for at in range(3)
        ]
        assert sorted(found) == sorted(expected)
        assert reader.latestOffset(offset, ReadAllAvailable()) == offset
        reader.stop()


def test_available_now_ends_at_what_was_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sender = Sender(store)
    sender.send("a", b"before")
    reader = reader_of(tmp_path)
    reader.prepareForTriggerAvailableNow()
    sender.send("a", b"after")
    end = reader.latestOffset({}, ReadAllAvailable())
    assert [row["body"] for row in rows_between(reader, {}, end)] == [b"before"]
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    close_cleanly(store)


def test_begins_at_a_time(tmp_path: Path) -> None:
    write_orders(tmp_path, 60)
    rows = rows_in(tmp_path)
    since = rows[len(rows) // 3]["stored_at"]
    reader = reader_of(tmp_path, since=since.isoformat(), prefix="hotel.")
    start = reader.initialOffset()
    assert start
    end = reader.latestOffset(start, ReadAllAvailable())
    expected = [row for row in rows if row["stored_at"] >= since and row["subject"].startswith("hotel.")]
    assert rows_between(reader, start, end) == expected
    assert rows_between(reader, {}, end) == expected
    later = reader_of(tmp_path, since=time_of(NOW_US * 2).isoformat())
    assert later.latestOffset(later.initialOffset(), ReadAllAvailable()) == later.initialOffset()
    same = reader_of(tmp_path, start=since.isoformat(), prefix="hotel.")
    assert same.initialOffset() == start
    assert rows_between(same, start, end) == expected


@pytest.mark.parametrize("archived", [False, True])
def test_begins_at_the_end(tmp_path: Path, archived: bool) -> None:
    """The first micro-batch is empty, so its repetition loses no messages that are added meanwhile."""
    source = tmp_path / "data"

    def bring(seed: int) -> None:
        write_orders(source, 15, seed)
        if archived:
            archive(source, tmp_path / "archive")

    bring(1)
    early = rows_in(source)
    reader = reader_of(tmp_path / "archive" if archived else source, start="new")
    start = reader.initialOffset()
    bring(2)
    first = reader.latestOffset(start, ReadAllAvailable())
    assert rows_between(reader, start, first) == []
    again = reader_of(tmp_path / "archive" if archived else source, start="new")
    assert rows_between(again, again.initialOffset(), first) == []
    for one in (reader, again):
        end = one.latestOffset(first, ReadAllAvailable())
        assert rows_between(one, first, end) == [row for row in rows_in(source) if row not in early]


def test_what_was_removed_is_said(tmp_path: Path) -> None:
    write_orders(tmp_path, 80)
    reader = reader_of(tmp_path)
    start = next(batches_of(reader, {}, ReadMaxBytes(4_000)))[0]
    end = reader.latestOffset(start, ReadAllAvailable())
    first = segment_files(tmp_path)[0]
    for path in first.parent.glob(f"{first.stem}.*"):
        path.unlink()
    for look in (lambda: reader.latestOffset(start, ReadAllAvailable()), lambda: reader.partitions(start, end)):
        with pytest.raises(BadBytes, match="messages were removed"):
            look()
    lenient = reader_of(tmp_path, corrupt="skip")
    kept = int(segment_files(tmp_path)[0].stem, 16)
    positions = [row["position"] for row in rows_between(lenient, start, end) if not row["partition"]]
    assert min(positions) > kept
    shutil.rmtree(tmp_path)
    write_orders(tmp_path, 3, store_id=b"other!")
    with pytest.raises(BadBytes, match="has no messages of that store"):
        reader_of(tmp_path).latestOffset(start, ReadAllAvailable())


# --- in a real session ---------------------------------------------------------------------------------------------


def stream(spark: SparkSession, place: Path | str, **options: Any) -> DataFrame:
    return spark.readStream.format("qmq").options(**options).load(str(place))


def run(frame: DataFrame, to: Path, **trigger: Any) -> None:
    """Write everything to files, each row once, and end."""
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(to / "checkpoint"))
    query = writer.trigger(**trigger).start(str(to / "rows"))
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()


def test_each_message_once_over_restarts_and_kills(spark: SparkSession, tmp_path: Path) -> None:
    """A stream is killed while it runs, messages are added, and another process continues it; also one that began at
    the end.
    """
    source, to = tmp_path / "data", tmp_path / "to"
    write_orders(source, 200)
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.stream_to", str(source), str(to)],
        env=environment_of(), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert killed.stdout is not None
    told = [line for _, line in zip(range(3), killed.stdout, strict=False)]
    assert [line.split()[0] for line in told] == ["batch"] * 3, told
    _kill(killed)
    before = len(list((to / "checkpoint" / "commits").glob("[0-9]*")))
    assert before >= 1
    run(stream(spark, source, start="new"), tmp_path / "late", availableNow=True)
    store = open_store(source, partitions=2)
    late = Sender(store).send("late", b"one more", b"and one")
    close_cleanly(store)
    run(stream(spark, source, max_trigger_bytes=400_000), to, availableNow=True)
    assert _positions(spark, to) == [(row["partition"], row["position"]) for row in rows_in(source)]
    assert len(list((to / "checkpoint" / "commits").glob("[0-9]*"))) > before
    run(stream(spark, source, start="new"), tmp_path / "late", availableNow=True)
    assert _positions(spark, tmp_path / "late") == [(0, late.position), (0, late.position + 1)]


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its descendants."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


def _positions(spark: SparkSession, to: Path) -> list[tuple[int, int]]:
    rows = spark.read.parquet(str(to / "rows")).select("partition", "position").collect()
    return sorted((row[0], row[1]) for row in rows)
