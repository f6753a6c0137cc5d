"""Starting a broker where something is not as it should be: refused by name, and nothing is touched."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from crc32c import crc32c

import qmq
from qmq.broker.ports.commands import Now
from qmq.daemon.main import RunningBroker
from qmq.daemon.startup import ClockNotSet
from qmq.format.batch import header_crc_of, mark_of, parse_header
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    DERIVED_HEADER_SIZE,
    DERIVED_VERSION,
    IDENTITY_MAGIC,
    IDENTITY_VERSION,
    OLDEST_CHECKPOINT_VERSION,
    OLDEST_PULL_LOG_VERSION,
    PULL_FILE_HEADER_SIZE,
    PULL_LOG_VERSION,
    SEGMENT_HEADER_SIZE,
    SEGMENT_VERSION,
    STAMP_SEAL,
    STAMP_SEAL_OFFSET,
    SUBJECTS_VERSION,
)
from qmq.settings import Settings
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import pack_envelope, unpack_envelope
from qmq.storage.meta.checkpoint import list_checkpoints
from qmq.storage.meta.identity import latest, read_copies
from qmq.storage.recovery.open import open_directory
from qmq.storage.types import StoreOptions
from qmq.storage.verify.verify import verify
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.faults.brokers import TIMEOUT_S, broker_in, serve_and_fail
from tests.faults.ledger import drain

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


async def still_has(path: Path, bodies: list[bytes] = BODIES, group: str = "check") -> None:
    """A broker starts on it and has those messages for a new group, and nothing is wrong with its files."""
    async with running(path, **SMALL) as broker:
        assert [message.body for message in await drain(broker.url, group)] == bodies
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
    assert f"cannot listen on {listen}: Address already in use; stop the process that listens there" in ended.error
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("mode", [0o700, 0o000])
async def test_a_directory_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "data"
    await filled(path, BODIES[:1])
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in [path, *path.rglob("*")]}
    if os.geteuid() == 0:
        for entry in modes:
            os.chown(entry, 12_345, 12_345)
    else:
        mode = 0o000  # nobody but root can give a file away: what is left is a directory that is closed to us
    path.chmod(mode)
    try:
        ended = await asyncio.to_thread(serve_and_fail, path)
    finally:
        for entry, before in modes.items():
            os.chown(entry, os.geteuid(), os.getegid())
            entry.chmod(before)
    assert ended.code == 1
    assert "Permission denied; give the user that runs QMQ read and write access" in ended.error
    assert str(path) in ended.error
    assert ended.error.count("\n") == 1, ended.error
    await still_has(path, BODIES[:1])


@pytest.mark.parametrize(("code", "says"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "mount the file system")])
@pytest.mark.parametrize("there", ["nothing", "messages"])
async def test_a_start_that_the_disk_refuses_names_the_cause_and_works_later(
    tmp_path: Path, there: str, code: int, says: str
) -> None:
    """Every write of a start is refused once: the error says what to do, nothing is lost, and the next start works."""
    path, steps = tmp_path / "data", Counter[str]()
    for step in range(1, 100):
        if there == "messages" and step == 1:
            await filled(path)
        elif there == "nothing":
            shutil.rmtree(path, ignore_errors=True)
        disk = FakeDisk()
        disk.fail("pwritev", step, code)
        error = await start_refused(path, disk)
        if error is not None:
            steps[type(error).__name__] += 1
            assert says in str(error)
            assert str(path) in str(error)
            assert isinstance(error, qmq.StorageFull) is (code == errno.ENOSPC)
        await still_has(path, BODIES if there == "messages" else [], f"check-{step}")
        if disk.calls["pwritev"] < step:
            break
    print(f"starts refused: {steps}")
    # Once there is an identity, and a pull log to go on in, a full disk stops no start that has nothing else to write.
    assert steps.total() > (0 if there == "messages" and code == errno.ENOSPC else 3), "hardly a start was refused"


async def start_refused(path: Path, disk: Disk) -> qmq.StorageError | None:
    """Start a broker there; the error that it ended with, if it did."""
    try:
        async with running(path, disk, **SMALL):
            return None
    except qmq.StorageError as error:
        return error


@pytest.mark.parametrize("wall_us", [0, 915_148_800_000_000])
async def test_a_clock_before_2000_is_refused_before_anything_is_made(tmp_path: Path, wall_us: int) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path / "data", "listen": "127.0.0.1:0"})
    with pytest.raises(ClockNotSet, match=r"shows 19[79]\d-01-01 00:00 UTC, which cannot be: set it"):
        RunningBroker(settings, clock=lambda: Now(0, wall_us))
    assert not (tmp_path / "data").exists()


async def test_serve_ends_with_a_word_on_the_clock(tmp_path: Path) -> None:
    script = "import time; time.time_ns = lambda: 10**9; from qmq.cli.main import cli; cli()"
    command = [sys.executable, "-c", script, "serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: the clock of this machine shows 1970-01-01 00:00 UTC, which cannot be: set it")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("there", ["nothing", "an empty directory"])
async def test_an_empty_directory_becomes_a_store(tmp_path: Path, there: str) -> None:
    path = tmp_path / "some" / "where"
    if there != "nothing":
        path.mkdir(parents=True)
    await filled(path)
    await still_has(path)


async def test_messages_that_cannot_be_counted_any_more_are_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, killed = tmp_path / "data", tmp_path / "killed"
    async with running(path, checkpoint_ms=3_600_000, **SMALL) as broker, qmq.connect(broker.url) as client:
        for number in range(3):
            await client.send("a", b"%d" % number)
        shutil.copytree(path, killed, ignore=shutil.ignore_patterns("ping"))
    (segment,) = (killed / "log-0").glob("*.messages")
    data = bytearray(segment.read_bytes())
    magic = struct.pack("<I", BATCH_MAGIC)
    second = data.index(magic, data.index(magic) + 1)
    data[second : second + BATCH_HEADER_SIZE] = bytes(BATCH_HEADER_SIZE)
    segment.write_bytes(data)
    async with running(killed, **SMALL) as broker:
        assert await all_there(broker.url) == [b"0", b"2"]
    assert re.search(rf"{segment} at offset {second} .*, \d+ bytes are bad or gone", caplog.text)
    assert broker.counters.holes_in_recovery == 1
    assert "it cannot be told which messages are lost: sequences skip ahead by " in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# Newer formats


def said_by_verify(path: Path) -> list[str]:
    """Return the findings of verify, or the error that ends it."""
    try:
        return [finding.what for finding in verify(path, Disk()).findings]
    except qmq.StorageError as error:
        return [str(error)]


def newer_envelope(path: Path, magic: bytes, version: int) -> None:
    content = unpack_envelope(path.read_bytes(), magic, version, path.name)
    path.write_bytes(b"".join(pack_envelope(magic, version + 1, content)))


def newer_header(path: Path, size: int, version: int, other: int | None = None) -> None:
    """A header of *size* bytes with the version at offset 8 and its crc32c at the end gets the *other* version."""
    data = bytearray(path.read_bytes())
    assert struct.unpack_from("<H", data, 8) == (version,)
    struct.pack_into("<H", data, 8, version + 1 if other is None else other)
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


def older_checkpoint(path: Path) -> Path:
    file = path / f"checkpoint-{list_checkpoints(Disk(), path)[0]}"
    content = unpack_envelope(file.read_bytes(), CHECKPOINT_MAGIC, CHECKPOINT_VERSION, file.name)
    file.write_bytes(b"".join(pack_envelope(CHECKPOINT_MAGIC, OLDEST_CHECKPOINT_VERSION - 1, content)))
    return file


def older_pull_log(path: Path) -> Path:
    file = max((path / "pulls").glob("*.pulls"))
    newer_header(file, PULL_FILE_HEADER_SIZE, PULL_LOG_VERSION, OLDEST_PULL_LOG_VERSION - 1)
    return file


def newer_sealed_segment(path: Path) -> Path:
    file = min((path / "log-0").glob("*.messages"))
    newer_header(file, SEGMENT_HEADER_SIZE, SEGMENT_VERSION)
    return file


def newer_current_segment(path: Path) -> Path:
    file = max((path / "log-0").glob("*.messages"))
    newer_header(file, SEGMENT_HEADER_SIZE, SEGMENT_VERSION)
    return file


def newer_pull_log(path: Path) -> Path:
    file = max((path / "pulls").glob("*.pulls"))
    newer_header(file, PULL_FILE_HEADER_SIZE, PULL_LOG_VERSION)
    return file


def newer_batch(path: Path) -> Path:
    """The last batch, with another version and the mark and checksum of its store."""
    identity = latest(*read_copies(Disk(), path))
    file = max((path / "log-0").glob("*.messages"))
    data, base = bytearray(file.read_bytes()), int(file.stem, 16)
    offset = data.rindex(b"QMQb")
    data[offset + 4] += 1
    header = parse_header(memoryview(data)[offset:])
    crc = header_crc_of(memoryview(data)[offset:], header.data_start)
    STAMP_SEAL.pack_into(data, offset + STAMP_SEAL_OFFSET, crc, mark_of(identity.secret, base + offset, crc))
    file.write_bytes(data)
    for checkpoint in path.glob("checkpoint-*"):
        checkpoint.unlink()  # so that a start reads it
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
        newer_pull_log,
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
    text = str(caught.value)
    assert re.fullmatch(
        rf"{re.escape(str(file))} has format version \d; this QMQ reads [\d to]+: use a newer one", text
    )
    assert contents(path) == before
    assert text in said_by_verify(path)
    file.write_bytes(old[file])
    await still_has(path)


async def test_a_batch_of_a_newer_version_is_refused_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await filled(path)
    file = newer_batch(path)
    before = contents(path)
    for refused in (lambda: verify(path, Disk()), lambda: open_directory(path, StoreOptions(), Disk(), 1)):
        with pytest.raises(qmq.StorageError) as caught:
            refused()
        assert re.fullmatch(
            rf"{file}: the batch at position \d+ has format version 2; this QMQ reads 1: use a newer one",
            str(caught.value),
        )
    assert contents(path)[file] == before[file]


@pytest.mark.parametrize("change", [older_checkpoint, older_pull_log])
async def test_an_older_version_that_is_not_read_any_more_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    path = tmp_path / "data"
    await filled(path)
    file = change(path)
    for refused in (lambda: verify(path, Disk()), lambda: open_directory(path, StoreOptions(), Disk(), 1)):
        with pytest.raises(
            qmq.StorageError,
            match=rf"{file} has format version 1; this QMQ reads 2( to 3)?: use the older one that wrote",
        ):
            refused()


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


@pytest.mark.parametrize("change", [newer_identity, newer_checkpoint, newer_current_segment, newer_subjects])
async def test_serve_ends_with_the_name_and_the_version_of_a_newer_file(
    tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    await filled(tmp_path / "data")
    file = change(tmp_path / "data")
    arguments = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    ended = await asyncio.to_thread(serve_and_fail, tmp_path / "data", "127.0.0.1:0", *arguments)
    assert ended.code == 1
    assert re.fullmatch(
        rf"qmq: {re.escape(str(file))} has format version \d; this QMQ reads [\d to]+: use a newer one\n", ended.error
    )


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
