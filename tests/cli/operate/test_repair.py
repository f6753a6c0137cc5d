"""qmq/cli/operate/repair.py: output for people and for programs, and exit codes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import qmq
from qmq.cli.main import cli
from qmq.cli.operate.repair import _print_table
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.repair import Outcome, Repair, RepairResult
from qmq.storage.verify.report import Finding
from tests.broker_process import broker_process
from tests.storage.stops import fill
from tests.storage.stores import Sender, close_cleanly, damage, open_store

#: Segments of so many bytes are quick to copy.
SMALL = 64 << 20


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    """Return the sender of the messages in the directory tmp_path / "data" of a stopped store."""
    sender = Sender(open_store(tmp_path / "data", segment_bytes=4 << 10, max_frame_bytes=2 << 10))
    fill(sender, 60)
    close_cleanly(sender.store)
    return sender


@pytest.fixture
def data(tmp_path: Path, sender: Sender) -> Path:
    return tmp_path / "data"


def test_nothing_to_do_ends_with_0(data: Path) -> None:
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, f"{data}: nothing to repair\n", "")


def test_what_was_made_again_is_named_and_ends_with_0(data: Path) -> None:
    shutil.rmtree(data / "consumer-log")
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    *lines, last = shown.stdout.splitlines()
    assert lines
    assert all(line.startswith(f"made again: {data}/consumer-log/0/") for line in lines)
    assert last == f"{data}: made again {len(lines)}"
    assert CliRunner().invoke(cli, ["verify", str(data)]).exit_code == 0


def test_what_cannot_be_mended_is_left_and_named_and_ends_with_1(data: Path, sender: Sender) -> None:
    damage(data, sender.sent[3], len(sender.sent[3].data) - 1)
    (data / "store-b").unlink()
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stderr) == (1, "")
    assert f"mended: {data}/store-b: " in shown.stdout
    assert f"left: {data}/log-0/" in shown.stdout
    assert "put back a good copy" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"{data}: mended 1, left 1"


def test_json_is_one_object_a_thing_and_one_that_sums_up(data: Path, sender: Sender) -> None:
    damage(data, sender.sent[0], len(sender.sent[0].data) - 1)
    (order, *_) = sorted(data.glob("consumer-log/0/*.order"))
    order.write_bytes(b"")
    shown = CliRunner().invoke(cli, ["repair", "--json", str(data)])
    assert shown.exit_code == 1
    *things, summary = [json.loads(line) for line in shown.stdout.splitlines()]
    assert all(set(thing) == {"file", "position", "what", "outcome", "advice"} for thing in things)
    found = {thing["file"]: thing for thing in things}
    assert found[str(order)]["outcome"] == "made again"
    assert found[str(order)]["advice"] is None
    (left,) = [thing for thing in things if thing["outcome"] == "left"]
    assert left["position"] == 64  # right behind the header of the segment
    assert (summary["directory"], summary["whole"], summary["made_again"], summary["left"]) == (str(data), False, 1, 1)


def test_a_directory_in_use_ends_with_2_and_names_who_uses_it(data: Path) -> None:
    lock = DirectoryLock.acquire(Disk(), data, 0)
    try:
        shown = CliRunner().invoke(cli, ["repair", str(data)])
    finally:
        lock.release()
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "in use by process" in shown.stderr


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_what_is_no_data_directory_is_wrong_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    shown = CliRunner().invoke(cli, ["repair", str(tmp_path / name)])
    assert shown.exit_code == 2
    assert name in shown.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_on_a_terminal_it_is_a_table() -> None:
    done = Repair(Path("/data"), notes=["something else"], left_out=5)
    for place, outcome in enumerate(Outcome):
        finding = Finding("fault", Path("/data/log-0/00.messages"), 1_000 + place, f"bad [{place}]", "put it back")
        done.treated.append(RepairResult(finding, outcome))
    console = Console(width=120)
    with console.capture() as capture:
        _print_table(done, console)
    lines = capture.get().splitlines()
    for place, outcome in enumerate(Outcome):
        (line,) = [line for line in lines if f"bad [{place}]" in line]
        assert all(cell in line for cell in (outcome.value, "log-0/00.messages", f"1,00{place}"))
        assert ("put it back" in line) == (outcome is Outcome.LEFT)
    assert "something else" in capture.get()
    assert "/data: made again 1, mended 1, removed 1, given up 1, left 1" in capture.get()
    assert "5 more findings" in capture.get()


def test_a_broker_on_an_older_copy_gives_no_id_twice(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    lost = set[str]()
    given = set[str]()
    for path, ids in ((data, set[str]()), (data, lost), (copy, given)):
        with broker_process(path, segment_bytes=SMALL) as broker, qmq.connect_sync(broker.url) as client:
            with client.subscribe("shop.", group="g") as consumer:
                receipts = [client.send("shop.order", b"%d" % number) for number in range(50)]
                receipts += [client.send("shop.later", b"%d" % number, delay="1h") for number in range(20)]
                ids |= {receipt.id for receipt in receipts}
                taken = list[str]()
                while len(taken) < 50:
                    for message in consumer.pull():
                        taken.append(message.id)
                        message.ack()
                consumer.flush()
            assert set(taken) <= ids, "each message came once"
            (group,) = client.admin.groups("g")
            assert (group.ready, group.skipped, group.dead) == (0, 0, 0)
        if path == data and not lost:
            shutil.copytree(data, copy, ignore=shutil.ignore_patterns("ping"))
        elif path == data:
            shown = CliRunner().invoke(cli, ["repair", str(copy), "--skip-ahead", "16GiB"])
            assert shown.exit_code == 0, shown.stdout
            assert "no id is given twice" in shown.stdout
            assert CliRunner().invoke(cli, ["verify", str(copy)]).exit_code == 0
    assert len(lost) == len(given) == 70
    assert lost.isdisjoint(given)
    assert CliRunner().invoke(cli, ["verify", str(copy)]).exit_code == 0


@pytest.mark.parametrize("reads_all", [False, True])
def test_a_clone_with_an_id_of_its_own_serves_beside_its_original(tmp_path: Path, reads_all: bool) -> None:
    """Groups go on as they were; delayed messages that were delivered or cancelled before do not come again, also where
    a start reads everything.
    """
    data, clone = tmp_path / "data", tmp_path / "clone"
    with broker_process(data, segment_bytes=SMALL) as broker, qmq.connect_sync(broker.url) as client:
        client.send("shop.order", b"later", delay="1h")
        at_once = client.send("shop.order", b"soon", delay=0.1)
        cancelled = client.send("shop.order", b"cancelled", delay="1s")
        assert client.admin.cancel(cancelled.id)
        with client.subscribe("shop.", group="g", consumer="w", max_attempts=3, retry_delays=["1h"]) as consumer:
            bodies = set[bytes]()
            client.send("shop.order", b"acked")
            client.send("shop.order", b"failed")
            client.send("shop.order", b"dead")
            while bodies != {b"acked", b"failed", b"dead", b"soon"}:
                for message in consumer.pull():
                    bodies.add(message.body)
                    if message.body == b"failed":
                        message.nack()
                    elif message.body == b"dead":
                        message.reject("no")
                    else:
                        message.ack()
            consumer.flush()
        client.send("shop.order", b"ready")
        (info,) = client.admin.info()
        store_id = info.store_id
        assert at_once.id.startswith(store_id)
    shutil.copytree(data, clone, ignore=shutil.ignore_patterns("ping"))
    with broker_process(data, segment_bytes=SMALL) as broker, broker_process(clone, segment_bytes=SMALL) as other:
        url = f"{broker.url},{other.url.removeprefix('qmq://')}"
        with pytest.raises(qmq.InvalidOption, match=r"qmq repair --new-id"), qmq.connect_sync(url) as client:
            client.admin.info()
    for path in clone.glob("checkpoint-*") if reads_all else ():
        path.unlink()
    shown = CliRunner().invoke(cli, ["repair", str(clone), "--new-id"])
    assert (shown.exit_code, f"and was {store_id}" in shown.stdout) == (0, True), shown.output
    assert CliRunner().invoke(cli, ["verify", str(clone)]).exit_code == 0
    with broker_process(data, segment_bytes=SMALL) as broker, broker_process(clone, segment_bytes=SMALL) as other:
        with qmq.connect_sync(f"{broker.url},{other.url.removeprefix('qmq://')}") as client:
            groups = client.admin.groups("g")
            rows = [(group.ready, group.in_retry, group.dead, group.delayed) for group in groups]
            assert rows == [(1, 1, 1, 1)] * 2
        with qmq.connect_sync(other.url) as client:
            (info,) = client.admin.info()
            new_id = info.store_id
            assert (new_id != store_id, new_id in shown.stdout) == (True, True)
            with client.subscribe("shop.", group="new", start="first") as consumer:
                found = Counter[bytes]()
                while sum(found.values()) < 5:
                    for message in consumer.pull():
                        found[message.body] += 1
                        assert message.body == b"soon" or message.id.startswith(new_id)
                        message.ack()
                assert consumer.pull(timeout=1.5) == [], "nothing that was delivered or cancelled comes again"
            assert found == dict.fromkeys((b"acked", b"failed", b"dead", b"soon", b"ready"), 1)


def test_a_bad_size_to_skip_is_wrong_usage(data: Path) -> None:
    for size, said in (("1 mile", "is no size"), ("0", "must be 1 to"), ("1025TiB", "must be 1 to")):
        shown = CliRunner().invoke(cli, ["repair", str(data), "--skip-ahead", size])
        assert (shown.exit_code, said in shown.stderr) == (2, True), shown.stderr


def test_a_directory_that_is_not_whole_does_not_skip(data: Path, sender: Sender) -> None:
    damage(data, sender.sent[3], len(sender.sent[3].data) - 1)
    shown = CliRunner().invoke(cli, ["repair", str(data), "--skip-ahead", "1GiB"])
    assert shown.exit_code == 1
    assert "did not skip ahead" in shown.stdout
