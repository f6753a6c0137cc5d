"""Reading a data directory: its complete batches, also while its broker runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qmq.archive.data_directory import is_data_directory, open_data_directory
from qmq.errors import BadBytes
from tests.archive.orders import write_orders
from tests.storage.stores import Sender, Sent, checkpoint, close_cleanly, damage, open_store, segment_files, verified


def found_in(directory: Path) -> list[tuple[int, int]]:
    """Return (partition, position) of all batches that a reader finds."""
    found = open_data_directory(directory)
    return [
        (segment.partition, position)
        for segment in found.segments
        for position in segment.batches(found.files)["position"].tolist()
    ]


def places(sent: list[Sent]) -> list[tuple[int, int]]:
    return sorted((batch.partition, batch.position) for batch in sent)


def test_finds_all_batches_of_a_stopped_store(tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 100)
    found = open_data_directory(tmp_path)
    assert found.holder is None
    assert found_in(tmp_path) == places(sent)
    assert all(segment.sealed for segment in found.segments)
    sealed = [segment for segment in found.segments if segment.index_path is not None]
    assert len(found.segments) - len(sealed) == 2  # the last one of each partition has no index yet
    verified(tmp_path)


def test_reads_beside_a_broker_and_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sender = Sender(store)
    for _ in range(50):
        sender.send("a", *[b"body" * 50] * 10)
        assert found_in(tmp_path) == places(sender.sent)
    found = open_data_directory(tmp_path)
    assert f"process {os.getpid()}" in str(found.holder)
    assert [segment.sealed for segment in found.segments][-2:] == [True, False]
    assert found.segments[-1].end == sender.sent[-1].position + len(sender.sent[-1].data)
    close_cleanly(store)
    verified(tmp_path)


def test_a_batch_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sender = Sender(store)
    for _ in range(3):
        sender.send("a", b"body" * 50)
    whole = found_in(tmp_path)
    damage(tmp_path, sender.sent[-1], len(sender.sent[-1].data) - 1)
    assert found_in(tmp_path) == whole[:-1]
    close_cleanly(store)
    assert found_in(tmp_path) == whole  # nobody writes it any more: it has rotten, and whoever reads it tells so


def test_a_bad_batch_in_the_middle_stays_for_the_reader_to_tell_of(tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 60)
    last = [batch for batch in sent if batch.partition == 0][-2]
    damage(tmp_path, last, len(last.data) - 1)
    assert found_in(tmp_path) == places(sent)


def test_an_empty_store_has_no_batches(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert found_in(tmp_path) == []
    checkpoint(store)
    close_cleanly(store)
    assert found_in(tmp_path) == []


def test_a_foreign_segment_counts_as_not_there(tmp_path: Path) -> None:
    sent = write_orders(tmp_path / "ours", 60)
    write_orders(tmp_path / "other", 5, seed=2)
    stranger = segment_files(tmp_path / "other")[0]
    (tmp_path / "ours" / "log-0" / stranger.name).write_bytes(stranger.read_bytes())
    assert found_in(tmp_path / "ours") == places(sent)


def test_without_identity_nobody_can_say_whose_it_is(tmp_path: Path) -> None:
    write_orders(tmp_path, 5)
    assert is_data_directory(tmp_path)
    for name in ("store-a", "store-b"):
        (tmp_path / name).write_bytes(b"rotten")
    with pytest.raises(BadBytes, match="identity"):
        open_data_directory(tmp_path)
