"""qmq/ownership.py: what root makes in a directory of another user is that user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import qmq
from qmq import ownership
from tests.broker_process import running_broker
from tests.cli.commands import qmq as command
from tests.net.frames import on_uvloop

#: Another user where the tests run as root. Where they do not, nothing can be given away, and nothing is tried.
OWNER = 12_345 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of the broker's user."""
    path = tmp_path / "home"
    path.mkdir()
    os.chown(path, OWNER, -1)
    return path


def owners(directory: Path) -> dict[str, int]:
    """The owner of each thing below *directory*."""
    return {str(path.relative_to(directory)): path.lstat().st_uid for path in directory.rglob("*")}


@on_uvloop
async def test_all_that_a_broker_and_commands_leave_in_a_data_directory_is_its_owners(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, state = home / "data", home / "state"
    monkeypatch.setenv("QMQ_STATE_DIR", str(state))
    made = command("tokens", "create", "ops", "--admin", "--data-dir", str(data))  # before the first start
    assert made.exit_code == 0, made.output
    settings = {"partition_dirs": (home / "other" / "p0", home / "p1"), "partitions": 2, "checkpoint_ms": 100}
    async with (
        running_broker(data, **settings) as url,
        qmq.connect(url, token=made.stdout.strip(), producer="nightly") as client,
        client.subscribe("a.", group="g", consumer="c") as consumer,
    ):
        for number in range(20):
            await client.send(f"a.{number}", b"x", order_key=str(number), keys=[str(number)])
        await client.send("a.later", b"x", delay="1h")
        for message in await consumer.pull(10):
            await (message.ack() if message.subject != "a.3" else message.reject("no"))
        await consumer.flush()
    for arguments in (
        ("verify", str(data)),
        ("archive", str(data), "--to", str(home / "archive"), "--as", "both"),
        ("repair", str(data), "--skip-ahead", "1GiB"),
        ("tokens", "rotate", "ops", "--data-dir", str(data)),
    ):
        done = command(*arguments)
        assert done.exit_code == 0, done.output
    async with running_broker(data, **settings) as url:
        pass  # after the repair
    found = owners(home)
    assert {"data/lock", "data/tokens.toml", "data/tokens-used.json", "archive", "other", "state"} <= found.keys()
    assert {name: owner for name, owner in found.items() if owner != OWNER} == {}
    assert len(found) > 40


def test_a_name_that_exists_keeps_its_owner_also_behind_a_link(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "of-root"
    elsewhere.write_bytes(b"secret")
    (home / "link").symlink_to(elsewhere)
    (home / "to-nothing").symlink_to(tmp_path / "made")
    for name in ("link", "to-nothing"):
        os.close(ownership.open_file(home / name, os.O_RDWR | os.O_CREAT, 0o600))
    assert {elsewhere.stat().st_uid, (tmp_path / "made").stat().st_uid} == {os.geteuid()}
    with pytest.raises(FileExistsError):
        ownership.mkdir(home / "link", 0o700)
