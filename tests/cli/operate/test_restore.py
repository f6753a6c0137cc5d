"""`qmq restore`: output and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qmq import connect_sync
from qmq.cli.operate.restore import time_of
from qmq.errors import InvalidOption
from tests.broker_process import broker_process
from tests.cli.commands import qmq, qmq_process
from tests.restore.archived import check_restored, orders_archive, told
from tests.spark.parquet import archives as parquet
from tests.spark.parquet.archives import write_days


def test_restores_sums_up_and_does_it_once(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 40)
    archive = str(tmp_path / "archive")
    with broker_process(tmp_path / "target") as broker:
        first = qmq("restore", "--from", archive, "--json", "--yes", server=broker.url)
        assert first.exit_code == 0, first.output
        said = json.loads(first.output)
        assert (said["restored"], said["damages"], said["source"]) == (len(wanted), 0, archive)
        again = qmq("restore", "--from", f"file://{archive}", "--yes", server=broker.url)
        assert again.exit_code == 0
        assert f"{len(wanted):,} messages restored" in again.output
        with qmq_process("consume", "", "--group", "g", "--count", "1", "--json", "--server", broker.url) as shown:
            assert json.loads(shown.communicate(timeout=60)[0])["replayed"]
        assert broker.stop() == 0
    check_restored(wanted, tmp_path / "target")


def test_one_member_of_a_broadcast_is_given_what_is_restored(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 4)
    archive = str(tmp_path / "archive")
    with broker_process(tmp_path / "target") as broker, connect_sync(broker.url) as client:
        members = [client.subscribe("", group="bc", consumer=name, mode="broadcast") for name in ("c1", "c2")]
        with members[0] as first, members[1] as second:
            whole = qmq("restore", "--from", archive, "--group", "bc", "--yes", server=broker.url)
            assert (whole.exit_code, "such as 'bc@c1'" in whole.output) == (1, True), whole.output
            said = qmq("restore", "--from", archive, "--group", "bc@c1", "--yes", server=broker.url)
            assert (said.exit_code, f"{len(wanted):,} messages restored" in said.output) == (0, True), said.output
            assert len(first.pull(1_000, min_count=len(wanted), timeout=30)) == len(wanted)
            assert second.pull(1, timeout=0) == []


def test_bad_bytes_are_told_of_and_the_rest_is_restored(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 40)
    path = sorted((tmp_path / "archive").rglob("*.messages"))[0]
    good = path.read_bytes()
    path.write_bytes(good[:500] + b"\0" * 8 + good[508:])
    with broker_process(tmp_path / "target") as broker:
        bad = qmq("restore", "--from", str(tmp_path / "archive"), "--yes", server=broker.url)
        assert bad.exit_code == 1
        assert f"qmq: {path}, positions" in bad.output
        assert "1 range of bad bytes left out" in bad.output
        qmq("restore", "--from", str(tmp_path / "archive"), "--yes", server=broker.url)
        assert broker.stop() == 0
    with pytest.raises(AssertionError, match="are not there"):
        check_restored(wanted, tmp_path / "target")


def test_what_is_there_as_parquet_only_comes_too(tmp_path: Path) -> None:
    write_days(tmp_path / "data", 1, 2)
    place = str(tmp_path / "archive")
    parquet.archive(tmp_path / "data", tmp_path / "archive")
    wanted = [*orders_archive(tmp_path / "more", 2), *told(tmp_path / "data", partitions=2)]
    shutil.copytree(tmp_path / "more" / "archive", place, dirs_exist_ok=True)
    with broker_process(tmp_path / "target") as broker:
        for _ in range(2):
            said = qmq("restore", "--from", place, "--yes", server=broker.url)
            assert (said.exit_code, f"{len(wanted):,} messages restored" in said.output) == (0, True), said.output
        assert broker.stop() == 0
    check_restored(wanted, tmp_path / "target")


def test_refuses_what_cannot_be(tmp_path: Path) -> None:
    wrong = qmq("restore", "--from", str(tmp_path), "--yes", server="qmq://127.0.0.1:1")
    assert (wrong.exit_code, "is no archive" in wrong.output) == (2, True)
    gopher = qmq("restore", "--from", "gopher://a/b")
    assert (gopher.exit_code, "gopher://a/b" in gopher.output) == (2, True)
    both = qmq("restore", "--from", str(tmp_path), "--group", "g", "--to-subject", "s")
    assert (both.exit_code, "either --to-subject or --group" in both.output) == (2, True)
    orders_archive(tmp_path, 2)
    away = qmq("restore", "--from", str(tmp_path / "archive"), "--yes", "--server", "qmq://127.0.0.1:1")
    assert (away.exit_code, "127.0.0.1:1" in away.output) == (1, True)
    with broker_process(tmp_path / "target") as broker:
        unknown = qmq("restore", "--from", str(tmp_path / "archive"), "--group", "g", "--yes", server=broker.url)
        assert (unknown.exit_code, "there is no group 'g'" in unknown.output) == (1, True)


def test_times_have_a_zone() -> None:
    assert time_of("1970-01-01T00:00:01.5Z", "--since") == 1_500_000
    assert time_of("1960-01-01T00:00:00+01:00", "--since") == 0
    for wrong in ("yesterday", "2026-01-31", "2026-01-31T12:00:00", "7"):
        with pytest.raises(InvalidOption, match="--until"):
            time_of(wrong, "--until")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 20)
    with broker_process(tmp_path / "a") as broker:
        assert qmq("restore", "--from", str(tmp_path / "archive"), "--yes", server=broker.url).exit_code == 0
        assert broker.stop() == 0
    second = str(tmp_path / "second")
    assert qmq("archive", str(tmp_path / "a"), "--to", second).exit_code == 0
    with broker_process(tmp_path / "b") as broker:
        none = qmq("restore", "--from", second, "--yes", server=broker.url)
        assert f"0 messages restored (0 bytes), {len(wanted):,} left out, which were restored" in none.output
        assert qmq("restore", "--from", second, "--with-replayed", "--yes", server=broker.url).exit_code == 0
        assert broker.stop() == 0
    check_restored(wanted, tmp_path / "b")
