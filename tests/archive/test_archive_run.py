"""A whole run: what it refuses, and that it releases its lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.archive.files import LocalFiles
from qmq.archive.lock import ArchiveLock
from qmq.archive.write import archive_to
from qmq.errors import DirectoryInUse, InvalidOption, StorageFull
from tests.archive.archives import NOW_US, SlowArchive
from tests.archive.orders import write_orders
from tests.archive.test_lock import ELSEWHERE
from tests.fake_disk import FakeDisk


def test_archives_to_a_place(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 20)
    told: list[tuple[int, int]] = []
    to = f"file://{tmp_path}/archive"
    done = archive_to(tmp_path / "data", to, lambda: NOW_US, progress=lambda *bytes: told.append(bytes))
    assert done.receipts == done.copied > 0
    assert told[-1] == (done.copied_bytes, done.copied_bytes)
    assert [path.name for path in (tmp_path / "archive").iterdir()] == ["segments"]


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="is no data directory"):
        archive_to(tmp_path, str(tmp_path / "archive"), lambda: NOW_US)
    write_orders(tmp_path / "data", 1)
    with ArchiveLock(LocalFiles(tmp_path), lambda: NOW_US, ELSEWHERE), pytest.raises(DirectoryInUse, match="elsewhere"):
        archive_to(tmp_path / "data", str(tmp_path), lambda: NOW_US)


@pytest.mark.parametrize(
    ("operation", "ending"), [("fsync", ".messages"), ("close", ".messages"), ("rename", ".messages")]
)
def test_the_lock_is_renewed_however_long_a_call_takes(
    operation: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy reports no bytes during the call."""
    write_orders(tmp_path / "data", 5)
    disk = SlowArchive(operation, ending)
    disk.use(monkeypatch)
    assert archive_to(tmp_path / "data", str(tmp_path / "archive"), disk.clock).copied
    assert disk.held
    assert [path.name for path in (tmp_path / "archive").iterdir()] == ["segments"]


def test_a_lock_that_cannot_be_given_back_hides_no_error(tmp_path: Path) -> None:
    """The first error is raised."""
    disk = FakeDisk("boot-1")
    lock = ArchiveLock(LocalFiles(tmp_path, disk), lambda: NOW_US, ELSEWHERE)
    lock.__enter__()
    disk.fail_always("open")
    lock.__exit__(ValueError, ValueError("first"), None)
    with pytest.raises(StorageFull, match="_lock"):
        lock.__exit__(None, None, None)
