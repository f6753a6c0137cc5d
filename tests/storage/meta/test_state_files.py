"""Large parts of the state are written once, named by the checkpoints, and read again; bad ones are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import ForeignFile
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.checkpoint import read_checkpoint
from qmq.storage.meta.state_files import APART_BYTES
from qmq.storage.store import Store, StoreOptions
from qmq.storage.verify.verify import verify

LARGE = b"x" * APART_BYTES


def take(store: Store, state: dict[str, bytes]) -> None:
    checkpoint = store.begin_checkpoint(state)
    checkpoint.write()
    store.finish_checkpoint(checkpoint)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("state-*"))


def opened(directory: Path) -> Store:
    return Store.open(directory, StoreOptions(), Disk(), 1_700_000_000_000_000)


def test_a_large_part_is_written_when_it_changes(tmp_path: Path) -> None:
    store = opened(tmp_path)
    other = bytes(LARGE)
    for unique in (LARGE, LARGE, LARGE, b"y" + LARGE, other, other):
        take(store, {"groups": LARGE, "unique": unique, "producers": b"few"})
    numbers = [int(name.split("-")[1]) for name in files(tmp_path)]
    assert len(numbers) <= 2
    store.close(clean=False)
    again = opened(tmp_path)
    assert (again.state["unique"], again.state["producers"]) == (LARGE, b"few")
    assert len(again.state["groups"]) == APART_BYTES, "other parts have no file"
    take(again, {"unique": b"few"})
    take(again, {"unique": b"few"})
    take(again, {"unique": b"few"})
    assert files(tmp_path) == []
    again.close(clean=True)
    assert verify(tmp_path, Disk()).is_good


def test_both_checkpoints_that_stay_have_their_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(6):
        take(store, {"unique": bytes([number]) * APART_BYTES})
    latest = store.checkpoints._number
    for number in (latest, latest - 1):
        claims = read_checkpoint(Disk(), tmp_path, number).claims
        assert claims is not None
        assert len(claims.state["unique"]) == APART_BYTES
    store.close(clean=False)


@pytest.mark.parametrize("how", ["rotten", "short", "missing", "other magic"])
def test_a_bad_file_is_reported_and_left_out(tmp_path: Path, how: str) -> None:
    store = opened(tmp_path)
    take(store, {"unique": LARGE, "producers": b"few"})
    store.close(clean=False)
    (name,) = files(tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        if how == "rotten":
            data[1_000] ^= 1
        path.write_bytes({"short": data[:-1], "other magic": b"other" + data[5:]}.get(how, data))
    report = verify(tmp_path, Disk())
    assert [finding.file.name for finding in report.findings if finding.severity == "fault"] == ["checkpoint-1"]
    store = opened(tmp_path)
    assert "unique" not in store.state
    assert store.state["producers"] == b"few"
    assert any(name in note for note in store.recovery.notes)
    store.close(clean=False)


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    take(store, {"unique": LARGE})
    store.close(clean=False)
    (name,) = files(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[8] = 2
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ForeignFile, match=name):
        opened(tmp_path)


def test_a_failed_write_is_made_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    state = {"unique": LARGE}
    checkpoint = store.begin_checkpoint(state)
    (tmp_path / f"{checkpoint.claims.state_files[0].file_name}.tmp").mkdir()
    with pytest.raises(Exception, match="state-") as failed:
        checkpoint.write()
    store.fail_checkpoint(checkpoint, failed.value)
    for path in tmp_path.glob("state-*.tmp"):
        path.rmdir()
    take(store, state)
    store.close(clean=False)
    assert opened(tmp_path).state["unique"] == LARGE
