"""Running brokers as a tree of segments: the same as an archive of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qmq
from qmq.archive import broker_logs
from qmq.archive.broker_logs import BrokerFiles
from qmq.archive.data_directory import open_data_directory
from qmq.errors import BadBytes, ConnectionLost, ForeignFile
from qmq.net.client import log_reader as log_reading
from tests.broker_process import BrokerProcess, broker_process
from tests.storage.stores import Sender, close_cleanly, open_store, segment_files

#: A few segments hold what the tests send.
SMALL: dict[str, Any] = {
    "segment_bytes": 1 << 20, "max_frame_bytes": 1 << 19, "max_message_bytes": 1 << 18, "partitions": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("brokers") / "data", **SMALL) as started:
        with qmq.connect_sync(started.url, durability="append") as client:
            for number in range(60):
                client.send_many(f"a.{number % 3}", [bytes([number]) * 60_000, b"small"])
        yield started


def test_has_what_the_data_directory_has(broker: BrokerProcess) -> None:
    local = open_data_directory(broker.path)
    with closing(BrokerFiles(f"{broker.url},{broker.url}")) as files:
        found = files.segments()
        assert [segment[:4] for segment in found] == [segment[:4] for segment in local.segments]
        assert [segment.sealed for segment in found] == [segment.sealed for segment in local.segments]
        for ours, theirs in zip(found, local.segments, strict=True):
            assert np.array_equal(ours.batches(files), theirs.batches(local.files))
            reading, original = files.open(ours.path), local.files.open(theirs.path)
            assert reading.size() == ours.end - ours.base
            assert reading.read(5, 100_000) == original.read(5, min(100_000, reading.size() - 5))
            assert len(reading.read(70, 10 << 20)) == reading.size() - 70
            assert reading.read(10 << 20, 5) == b""
            reading.close()
            original.close()
            assert files.read_whole(ours.path)[:100] == local.files.read_whole(theirs.path)[:100]


def test_names_are_those_of_an_archive(broker: BrokerProcess) -> None:
    with closing(BrokerFiles(broker.url)) as files:
        (first, second) = files.names("")
        assert (first.rpartition("-")[2], second.rpartition("-")[2]) == ("0", "1")
        stems = [path.stem for path in segment_files(broker.path)]
        assert files.names(first) == sorted(f"{stem}.messages" for stem in stems)
        assert files.names("nothing") == []
        for path in (f"{first}/x.messages", "0-0/0000000000000000.messages", f"{first}/{stems[0]}.manifest"):
            with pytest.raises(FileNotFoundError):
                files.open(path)
        with pytest.raises(FileNotFoundError, match="no segment at position 0"):
            files.open(f"{first}/{0:016x}.messages")


def test_a_broker_that_is_missing_is_not_passed_over(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reading.LogReader.__init__, "__defaults__", (0.0,))
    with closing(BrokerFiles(f"{broker.url},qmq://127.0.0.1:1")) as files, pytest.raises(ConnectionLost, match=":1: "):
        files.segments()


def test_of_a_range_only_its_batches_are_asked_for(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    with closing(BrokerFiles(broker.url)) as files:
        segment = files.segments()[0]
        whole = segment.batches(files)["position"].tolist()
        tell = log_reading.LogReader.batches

        def batches(self: log_reading.LogReader, partition: int, start: int, end: int) -> Iterator[memoryview]:
            asked.append((start, end))
            for data in tell(self, partition, start, end):
                yield from (data[at : at + 16] for at in range(0, len(data), 16))

        monkeypatch.setattr(log_reading.LogReader, "batches", batches)
        assert segment.batches(files, whole[1], whole[3])["position"].tolist() == whole[1:3]
        assert segment.batches(files, 0, segment.base).tolist() == []
        assert segment.batches(files)["position"].tolist() == whole
    assert asked == [(whole[1], whole[3]), (segment.base, segment.end)]


def test_a_segment_that_is_gone_has_no_batches(broker: BrokerProcess) -> None:
    with closing(BrokerFiles(broker.url)) as files:
        segment = files.segments()[0]
        gone = segment._replace(base=0, path=f"{segment.path.partition('/')[0]}/{0:016x}.messages")
        with pytest.raises(BadBytes, match="removed"):
            gone.batches(files)


@pytest.mark.parametrize("told", [bytes(32), b"\xff" * 16, b"short"])
def test_batches_that_make_no_sense_are_refused(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, told: bytes
) -> None:
    with closing(BrokerFiles(broker.url)) as files:
        segment = files.segments()[0]
        monkeypatch.setattr(broker_logs.LogReader, "batches", lambda *_: iter([memoryview(told)]))
        with pytest.raises(BadBytes, match="list of its batches is wrong"):
            segment.batches(files)


def test_two_brokers_of_one_store_id_are_refused_by_name(tmp_path: Path) -> None:
    store = open_store(tmp_path / "first")
    Sender(store).send("a", b"common")
    close_cleanly(store)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with broker_process(tmp_path / "first") as first, broker_process(tmp_path / "second") as second:
        addresses = [one.url.removeprefix("qmq://") for one in (first, second)]
        with closing(BrokerFiles(f"{first.url},{second.url}")) as files:
            for _ in range(2):
                with pytest.raises(ForeignFile, match=r"are two brokers of one store.*qmq repair --new-id") as refused:
                    files.segments()
            assert all(address in str(refused.value) for address in addresses)
        with closing(BrokerFiles(f"{first.url},{first.url}")) as files:
            assert len(files.segments()) == 1
