"""Starting and stopping a broker where something is not as it should be: refused by name, and nothing is touched."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from crc32c import crc32c

import qmq
from qmq.format.layout import (
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    DERIVED_HEADER_SIZE,
    DERIVED_VERSION,
    IDENTITY_MAGIC,
    IDENTITY_VERSION,
    SEGMENT_HEADER_SIZE,
    SEGMENT_VERSION,
    SUBJECTS_VERSION,
)
from qmq.net import wire
from qmq.net.wire import Kind
from qmq.storage.checkpoint import list_checkpoints
from qmq.storage.disk import Disk
from qmq.storage.envelope import pack_envelope, unpack_envelope
from qmq.storage.verify import verify
from tests.broker_process import running
from tests.faults.brokers import broker_in, serve_and_fail
from tests.faults.ledger import Ledger, drain
from tests.net.frames import HELLO, on_uvloop

BODIES: Final = [b"%d" % number * 10_000 for number in range(30)]
SMALL: Final[dict[str, Any]] = {
    "segment_bytes": "128 KiB",
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
}


async def filled(path: Path, bodies: list[bytes] = BODIES) -> None:
    """A data directory with messages in several segments, of a broker that was stopped."""
    async with running(path, **SMALL) as broker, qmq.connect(broker.url, durability="append") as client:
        for body in bodies:
            await client.send("a.b", body)


async def still_has(path: Path, bodies: list[bytes] = BODIES) -> None:
    """A broker starts on it and has those messages, and nothing is wrong with its files."""
    async with running(path, **SMALL) as broker:
        assert [message.body for message in await drain(broker.url, "check")] == bodies
    assert verify(path, Disk()).is_good


def contents(path: Path) -> dict[Path, bytes]:
    """Every file under *path* but the lock."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


# ---------------------------------------------------------------------------------------------------------------------
# Places where no broker can be


async def test_a_second_broker_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    async with broker_in(tmp_path / "data") as broker:
        ended = await asyncio.to_thread(serve_and_fail, tmp_path / "data")
        assert ended.code == 1
        assert f"{tmp_path / 'data'} is in use by process {broker.pid} on {socket.gethostname()}" in ended.error
        assert ended.error.count("\n") == 1, ended.error
        async with qmq.connect(broker.url) as client:
            await client.send("a", b"the first goes on")
        assert broker.stop() == 0
        await asyncio.to_thread(broker.start)
        assert broker.stop() == 0


async def test_a_killed_broker_does_not_hold_the_directory(tmp_path: Path) -> None:
    async with broker_in(tmp_path / "data") as broker:
        broker.kill()
        await asyncio.to_thread(broker.start)
        assert broker.stop() == 0


async def test_a_read_only_directory_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await filled(path, BODIES[:1])
    before = contents(path)
    entries = [path, *path.rglob("*")]
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in entries}
    try:
        for entry in entries:
            entry.chmod(modes[entry] & ~0o222)
        ended = await asyncio.to_thread(serve_and_fail, path)
    finally:
        for entry in entries:
            entry.chmod(modes[entry])
    assert ended.code == 1
    assert f"{path / 'lock'}: Permission denied; give the user that runs QMQ read and write access" in ended.error
    assert ended.error.count("\n") == 1, ended.error
    assert contents(path) == before
    await still_has(path, BODIES[:1])


async def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    ended = await asyncio.to_thread(serve_and_fail, tmp_path / "locked" / "data")
    assert ended.code == 1
    assert f"cannot make the directory {tmp_path / 'locked' / 'data'}: Permission denied" in ended.error


@pytest.mark.parametrize("below", ["", "data"])
async def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"of somebody")
    ended = await asyncio.to_thread(serve_and_fail, file / below if below else file)
    assert ended.code == 1
    assert str(file) in ended.error
    assert "Not a directory" in ended.error
    assert ended.error.count("\n") == 1, ended.error
    assert file.read_bytes() == b"of somebody"


async def test_a_port_in_use_is_refused_before_the_directory_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = await asyncio.to_thread(serve_and_fail, tmp_path / "data", listen)
    assert ended.code == 1
    assert f"cannot listen on {listen}: Address already in use; stop what listens there" in ended.error
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("there", ["nothing", "an empty directory"])
async def test_an_empty_directory_becomes_a_store(tmp_path: Path, there: str) -> None:
    path = tmp_path / "some" / "where"
    if there != "nothing":
        path.mkdir(parents=True)
    await filled(path)
    await still_has(path)


# ---------------------------------------------------------------------------------------------------------------------
# Newer formats


def newer_envelope(path: Path, magic: bytes, version: int) -> None:
    content = unpack_envelope(path.read_bytes(), magic, version, path.name)
    path.write_bytes(b"".join(pack_envelope(magic, version + 1, content)))


def newer_header(path: Path, size: int, version: int) -> None:
    """A header of *size* bytes with the version at offset 8 and its crc32c at the end."""
    data = bytearray(path.read_bytes())
    assert struct.unpack_from("<H", data, 8) == (version,)
    struct.pack_into("<H", data, 8, version + 1)
    struct.pack_into("<I", data, size - 4, crc32c(data[: size - 4]))
    path.write_bytes(data)


def newer_identity(path: Path) -> Path:
    newer_envelope(path / "store-a", IDENTITY_MAGIC, IDENTITY_VERSION)
    return path / "store-a"


def newer_second_identity(path: Path) -> Path:
    newer_envelope(path / "store-b", IDENTITY_MAGIC, IDENTITY_VERSION)
    return path / "store-b"


def newer_checkpoint(path: Path) -> Path:
    file = path / f"checkpoint-{list_checkpoints(Disk(), path)[0]}"
    newer_envelope(file, CHECKPOINT_MAGIC, CHECKPOINT_VERSION)
    return file


def newer_sealed_segment(path: Path) -> Path:
    file = min((path / "log-0").glob("*.messages"))
    newer_header(file, SEGMENT_HEADER_SIZE, SEGMENT_VERSION)
    return file


def newer_current_segment(path: Path) -> Path:
    file = max((path / "log-0").glob("*.messages"))
    newer_header(file, SEGMENT_HEADER_SIZE, SEGMENT_VERSION)
    return file


def newer_subjects(path: Path) -> Path:
    file = path / "subjects"
    data = bytearray(file.read_bytes())
    assert struct.unpack_from("<H", data, 8) == (SUBJECTS_VERSION,)
    newer_header(file, 32, SUBJECTS_VERSION)
    return file


@pytest.mark.parametrize(
    "change",
    [
        newer_identity,
        newer_second_identity,
        newer_checkpoint,
        newer_sealed_segment,
        newer_current_segment,
        newer_subjects,
    ],
)
async def test_a_file_of_a_newer_version_is_refused_by_name_and_nothing_is_changed(
    tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    path = tmp_path / "data"
    await filled(path)
    old = contents(path)
    file = change(path)
    before = contents(path)
    with pytest.raises(qmq.StorageError) as caught:
        async with running(path, **SMALL):
            raise AssertionError("the broker has started")
    assert str(caught.value) == f"{file} has format version 2; this QMQ reads 1: use a newer one"
    assert contents(path) == before
    file.write_bytes(old[file])
    await still_has(path)


async def test_derived_files_of_a_newer_version_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await filled(path)
    old = contents(path)
    derived = [file for file in old if file.suffix in (".entries", ".order", ".index")]
    assert {file.suffix for file in derived} == {".entries", ".order", ".index"}
    for file in derived:
        newer_header(file, DERIVED_HEADER_SIZE, DERIVED_VERSION)
    await still_has(path)
    again = contents(path)
    assert [file.name for file in derived if again[file] != old[file]] == []


async def test_serve_ends_with_the_name_and_the_version_of_a_newer_file(tmp_path: Path) -> None:
    await filled(tmp_path / "data")
    file = newer_checkpoint(tmp_path / "data")
    arguments = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    ended = await asyncio.to_thread(serve_and_fail, tmp_path / "data", "127.0.0.1:0", *arguments)
    assert (ended.code, ended.error) == (1, f"qmq: {file} has format version 2; this QMQ reads 1: use a newer one\n")


# ---------------------------------------------------------------------------------------------------------------------
# Files of others


def other_checkpoint(path: Path, other: Path) -> Path:
    number = list_checkpoints(Disk(), path)[0] + 1
    file = path / f"checkpoint-{number}"
    shutil.copy(other / f"checkpoint-{list_checkpoints(Disk(), other)[0]}", file)
    return file


def other_subjects(path: Path, other: Path) -> Path:
    shutil.copy(other / "subjects", path / "subjects")
    return path / "subjects"


def other_identity(path: Path, other: Path) -> Path:
    shutil.copy(other / "store-b", path / "store-b")
    return path / "store-b"


@pytest.mark.parametrize("put", [other_checkpoint, other_subjects, other_identity])
async def test_files_of_another_broker_are_refused_by_name(tmp_path: Path, put: Callable[[Path, Path], Path]) -> None:
    path, other = tmp_path / "data", tmp_path / "other"
    await filled(path)
    await filled(other, BODIES[:20])
    old = contents(path)
    file = put(path, other)
    before = contents(path)
    with pytest.raises(qmq.StorageError) as caught:
        async with running(path, **SMALL):
            raise AssertionError("the broker has started")
    assert file.name in str(caught.value)
    assert contents(path) == before
    if file in old:
        file.write_bytes(old[file])
    else:
        file.unlink()
    await still_has(path)


async def all_there(url: str) -> list[bytes]:
    """The bodies that can be pulled now."""
    bodies: list[bytes] = []
    async with qmq.connect(url) as client, client.subscribe("", start="first") as consumer:
        while came := await consumer.pull(max_count=10_000, timeout=0):
            bodies += [message.body for message in came]
    return bodies


async def test_a_segment_of_another_broker_in_place_of_ours_is_named_and_the_rest_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "data", tmp_path / "other"
    await filled(path)
    await filled(other, BODIES[:20])
    file = min((path / "log-0").glob("*.messages"))
    shutil.copy(min((other / "log-0").glob("*.messages")), file)
    strange = file.read_bytes()
    async with running(path, **SMALL) as broker:
        served = await all_there(broker.url)
    assert 0 < len(served) < len(BODIES)
    assert served == BODIES[-len(served) :]
    assert f"{file} belongs to store" in caplog.text
    assert file.read_bytes() == strange


async def test_a_segment_of_another_broker_beside_ours_is_named_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is a position of its own: below ours it is no part of our log, above it would be the next segment."""
    path, other = tmp_path / "data", tmp_path / "other"
    await filled(path)
    await filled(other)
    ours = {file.name for file in (path / "log-0").glob("*.messages")}
    for segment in (other / "log-0").glob("*.messages"):
        strange = path / "log-0" / segment.name
        assert segment.name not in ours
        shutil.copy(segment, strange)
        async with running(path, **SMALL) as broker:
            assert await all_there(broker.url) == BODIES
        assert f"{strange} belongs to store" in caplog.text
        assert strange.read_bytes() == segment.read_bytes()
        strange.unlink()
    await still_has(path)


async def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "README.txt").write_text("put here before the store was made")
    await filled(path)
    strange = {
        path / "notes.txt": b"ours",
        path / "checkpoint-": b"no number",
        path / "checkpoint-last": b"no number",
        path / "log-0" / "readme": b"",
        path / "log-0" / "0000.messages": b"too short a name",
        path / "log-0" / "zzzzzzzzzzzzzzzz.messages": b"no hexadecimal number",
        path / "consumer-log" / "0" / "core": b"\0" * 100,
        path / "sub" / "directory" / "file": b"x",
    }
    for file, data in strange.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    await still_has(path)
    assert {file: file.read_bytes() for file in strange} == strange
    assert (path / "README.txt").read_text() == "put here before the store was made"


# ---------------------------------------------------------------------------------------------------------------------
# Stopping


async def test_a_stop_under_load_answers_what_is_in_and_ends_with_0_within_5_s(tmp_path: Path) -> None:
    ledger, ended = Ledger(), asyncio.Event()

    async def produce(url: str, durability: str) -> None:
        async with qmq.connect(url, durability="flush" if durability == "flush" else "append") as client:
            while not ended.is_set():
                entries = [ledger.open(f"{durability}.{number % 3}", 300) for number in range(20)]
                sends = [client.send(entry.subject, entry.body) for entry in entries]
                ledger.acknowledged(entries, await asyncio.gather(*sends))

    async def consume(url: str, timeout: float | None) -> None:
        async with qmq.connect(url) as client, client.subscribe("", group="g") as consumer:
            while True:
                for message in await consumer.pull(timeout=timeout):
                    ledger.entry_of(message)

    async with broker_in(tmp_path / "data") as broker:
        async with asyncio.TaskGroup() as consuming:
            consumers = [consuming.create_task(consume(broker.url, timeout)) for timeout in (None, 0.1, 5.0)]
            async with asyncio.TaskGroup() as producing:
                for durability in ("flush", "append", "flush"):
                    producing.create_task(produce(broker.url, durability))
                for number in (signal.SIGTERM, signal.SIGINT):
                    await ledger.acknowledgements(300)
                    began = time.monotonic()
                    code = await asyncio.to_thread(broker.stop, number)
                    took = time.monotonic() - began
                    assert code == 0, broker.log()
                    assert took < 5
                    assert verify(tmp_path / "data", Disk()).findings == []
                    await asyncio.to_thread(broker.start)
                    assert "after a stop that was clean; 0 messages behind" in broker.log().splitlines()[-1]
                ended.set()
            for consumer in consumers:
                consumer.cancel()
        ledger.check(await drain(broker.url, "all"))
        assert "ERROR" not in broker.log()
        assert "WARNING" not in broker.log()


async def test_parked_pulls_end_with_a_clean_error_and_clients_move_on(tmp_path: Path) -> None:
    async with (
        broker_in(tmp_path / "data") as broker,
        qmq.connect(broker.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        pull = asyncio.create_task(consumer.pull())
        answers: list[object] = []
        connection = client._link.connection
        assert connection is not None
        subscription = (await connection.request(Kind.SUBSCRIBE, SOLO)).meta["subscription"]
        connection.ask(Kind.PULL, answers.append, payload=wire.PULL.pack(subscription, 1, 1, 1 << 20, 60_000))
        assert await asyncio.to_thread(broker.stop) == 0
        await asyncio.to_thread(broker.start)
        assert [type(answer) for answer in answers] == [qmq.BrokerStopping]
        assert "shutting down" in str(answers[0])
        assert not pull.done()
        await client.send("a", b"after the restart")
        assert [message.body for message in await pull] == [b"after the restart"]


SOLO: Final = {"group": None, "prefixes": ["a"], "consumer": "c", "start": None}


async def _stop_while_clients_leave(path: Path) -> None:
    async with running(path) as broker:
        connections = [socket.create_connection(broker.address) for _ in range(5)]
        for connection in connections:
            connection.sendall(wire.encode_frame(Kind.HELLO, 1, HELLO))
            connection.setblocking(False)
        for connection in connections:
            assert await asyncio.get_running_loop().sock_recv(connection, 4_096)
        for connection in connections:
            connection.close()
        # and before the broker has seen that, it stops
    assert verify(path, Disk()).findings == []


async def test_a_stop_bears_clients_that_leave_in_the_same_moment(tmp_path: Path) -> None:
    await _stop_while_clients_leave(tmp_path / "data")


@on_uvloop
async def test_a_stop_bears_clients_that_leave_in_the_same_moment_on_its_own_loop(tmp_path: Path) -> None:
    await _stop_while_clients_leave(tmp_path / "data")
