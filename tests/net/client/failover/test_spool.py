"""Messages kept on this machine until a broker takes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qmq.errors import StorageFailed
from qmq.net.client.failover.spool import Record, Spool, SpooledDispositions, WaitingSpool, waiting_messages

HERE = ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path))
    return tmp_path / "spool"


def record_of(batch: bytes) -> Record:
    fields = {"attempt": 1, "disposition": 1, "delay_us": None, "reason": "broken", "at_us": 1_700_000_000_000_000}
    return {"group": "g", **fields, "batch": batch, **ack_of(1)}


def ack_of(count: int) -> Record:
    return {"ack": SpooledDispositions(b"store.", "g", "c", 1, 2, [0, count])._asdict()}


def records(count: int) -> list[Record]:
    return [record_of(bytes([number]) * 100) for number in range(count)]


def filled(count: int = 3, addresses: list[str] = HERE) -> Spool:
    spool = Spool(addresses)
    for record in records(count):
        spool.put(record)
    return spool


def taken(spool: Spool) -> WaitingSpool:
    (waiting,) = spool.take()
    return waiting


def test_what_waits_is_counted_by_group_and_nothing_is_locked_or_changed(directory: Path) -> None:
    assert waiting_messages() == []
    spool, other = filled(2), filled(1, ["b:1"])
    spool.put({**record_of(b"x"), "group": "mail", "at_us": 1_600_000_000_000_000})
    spool.put(ack_of(5))
    (directory / "torn.spool").write_bytes(b"QMQ")
    before = {path: path.read_bytes() for path in directory.iterdir()}
    found = {(one.brokers, one.group): one for one in waiting_messages()}
    assert {key: one.messages for key, one in found.items()} == {
        ("127.0.0.1:1,127.0.0.1:2", "g"): 2,
        ("127.0.0.1:1,127.0.0.1:2", "mail"): 1,
        ("b:1", "g"): 1,
    }
    assert found["127.0.0.1:1,127.0.0.1:2", "mail"].oldest.timestamp() == 1_600_000_000
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    assert len(taken(spool).records) == 4
    other.close()


def test_what_was_put_is_taken_once(directory: Path) -> None:
    spool = filled()
    waiting = taken(spool)
    assert waiting.records == records(3)
    assert not waiting.is_damaged
    spool.removed(waiting)
    assert spool.take() == []
    assert not list(directory.iterdir())


def test_what_no_broker_took_waits_on(directory: Path) -> None:
    spool = filled()
    waiting = taken(spool)
    spool.kept(waiting, waiting.records)
    spool.put(record_of(b"more"))
    found = sorted(len(waiting.records) for waiting in spool.take())
    assert found == [1, 3]


def test_where_brokers_took_a_part_the_rest_waits_on(directory: Path) -> None:
    spool = filled()
    waiting = taken(spool)
    (path,) = directory.iterdir()
    left = [waiting.records[0], ack_of(3)]
    spool.kept(waiting, left)
    assert list(directory.iterdir()) == [path]
    again = taken(Spool(HERE))
    assert again.records == left
    assert not again.is_damaged
    Spool.removed(again)


def test_a_file_with_bad_bytes_is_not_written_anew(directory: Path) -> None:
    filled().close()
    (path,) = directory.iterdir()
    with path.open("ab") as file:
        file.write(b"torn")
    data = path.read_bytes()
    waiting = taken(Spool(HERE))
    Spool.kept(waiting, waiting.records[1:])
    assert path.read_bytes() == data


def test_a_record_that_no_client_writes_counts_as_damaged() -> None:
    wrong: list[Record] = [
        {},
        {"ack": None},
        {"ack": ack_of(1)["ack"] | {"handled": [1]}},
        {"ack": ack_of(1)["ack"] | {"handled": ["a", "b"]}},
        {"ack": ack_of(1)["ack"] | {"store": "text"}},
        {"group": "g", **ack_of(1)},
    ]
    for record in wrong:
        spool = Spool(HERE)
        spool.put(record)
        waiting = taken(spool)
        assert waiting.is_damaged, record
        assert not waiting.records
        waiting.path.unlink()
        Spool.kept(waiting, [])


def test_a_file_is_its_clients_while_that_lives_and_anyones_after() -> None:
    spool, other = filled(), Spool(HERE[1:])
    assert other.take() == []
    spool.close()
    waiting = taken(other)
    assert waiting.records == records(3)
    assert Spool(HERE).take() == [], "it is being handed over"
    other.removed(waiting)


def test_a_client_of_other_brokers_leaves_it_alone() -> None:
    filled().close()
    assert Spool(["127.0.0.1:3"]).take() == []
    assert len(Spool(HERE).take()) == 1


def test_a_file_cut_at_any_byte_has_its_whole_records(directory: Path) -> None:
    filled(2).close()
    (path,) = directory.iterdir()
    data, counts = path.read_bytes(), set()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        found = Spool(HERE).take()
        counts.update(len(waiting.records) for waiting in found)
        for waiting in found:
            assert waiting.records == records(2)[: len(waiting.records)]
            Spool.kept(waiting, waiting.records)
    assert counts == {0, 1}


def test_one_flipped_bit_costs_one_record_at_most_and_the_file_is_set_aside(directory: Path) -> None:
    filled(3).close()
    (path,) = directory.iterdir()
    data, struck = path.read_bytes(), 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        for waiting in Spool(HERE).take():
            assert all(record in records(3) for record in waiting.records)
            assert len(waiting.records) == 3 or waiting.is_damaged, "what is missing is never thrown away"
            struck += waiting.is_damaged
            Spool.kept(waiting, waiting.records)
    assert struck > 300
    flipped = bytearray(data)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    waiting = taken(Spool(HERE))
    assert waiting.records == records(2)
    Spool.removed(waiting)
    assert [left.suffix for left in directory.iterdir()] == [".bad"]


def test_a_file_of_something_else_is_left_alone(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "x.spool").write_bytes(b"something else")
    assert Spool(HERE).take() == []
    assert (directory / "x.spool").exists()


def test_where_nothing_can_be_written_it_says_so(directory: Path) -> None:
    directory.parent.mkdir(exist_ok=True)
    directory.write_bytes(b"a file stands where the directory must")
    with pytest.raises(StorageFailed, match="QMQ_STATE_DIR"):
        filled(1)


def test_what_a_killed_process_has_put_is_there(directory: Path) -> None:
    script = (
        "import os, signal\nfrom qmq.net.client.failover.spool import Spool\n"
        f"spool = Spool({HERE!r})\nspool.put({record_of(b'kept')!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ.copy(), timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert taken(Spool(HERE)).records == [record_of(b"kept")]


def test_closing_waits_for_no_disk_and_closes_no_file_that_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was cancelled during a put closes like this."""
    syncing, go_on = threading.Event(), threading.Event()
    sync = os.fdatasync

    def slow_sync(fd: int) -> None:
        syncing.set()
        assert go_on.wait(60)
        sync(fd)

    spool = filled(1)
    monkeypatch.setattr(os, "fdatasync", slow_sync)
    threads = [threading.Thread(target=spool.put, args=(record,)) for record in records(3)[1:]]
    for thread in threads:
        thread.start()
    assert syncing.wait(60)
    spool.close()
    assert Spool(HERE).take() == [], "it is written to"
    go_on.set()
    for thread in threads:
        thread.join()
    found = [record["batch"] for waiting in Spool(HERE).take() for record in waiting.records]
    assert sorted(found) == [record["batch"] for record in records(3)], "each is kept, and no file is locked"
