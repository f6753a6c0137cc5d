"""`qmq find`: at brokers, in a data directory and in an archive; output, exit codes, and how a search goes on."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any, NamedTuple

import pytest

import qmq
from qmq.cli.find.output import block, progress_line, table_of_messages
from tests.broker_process import broker_process
from tests.cli.commands import qmq as run

ORDERS = 40


class Filled(NamedTuple):
    """A broker with orders, its directory, and the ids of what was sent."""

    url: str
    directory: Path
    ids: list[str]
    delayed: str
    delivered: str


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    path = tmp_path_factory.mktemp("find")
    with broker_process(path) as broker:
        with qmq.connect_sync(broker.url) as client:
            ids = [
                client.send(f"shop.order.{'ab'[n % 2]}", f"order {n}".encode(), key=f"k-{n % 4}", tags=["eu"]).id
                for n in range(ORDERS)
            ]
            client.send("bytes", b"\xff")
            delayed = client.send("late", b"later", delay="1h").id
            delivered = client.send("late", b"soon", delay=0.01).id
            with client.subscribe("late", group="g") as consumer:
                assert consumer.pull(1, timeout=60)
        yield Filled(broker.url, path, ids, delayed, delivered)


def rows(*arguments: str, server: str | None = None, code: int = 0, error: str = "") -> list[dict[str, Any]]:
    shown = run("find", *arguments, "--json", server=server)
    assert shown.exit_code == code, shown.output
    assert re.search(error, shown.stderr) if error else shown.stderr == "", shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_messages_are_found_by_key_text_and_time(filled: Filled) -> None:
    found = rows("shop.", "--key", "k-1", server=filled.url)
    assert [row["id"] for row in found] == filled.ids[1::4]
    newest = rows("shop.order.b", "--key", "k-1", "--newest", server=filled.url)
    assert [row["id"] for row in newest] == filled.ids[1::4][::-1]
    (one,) = rows("--contains", "order 17", server=filled.url)
    assert one["body"] == "order 17"
    assert (one["key"], one["keys"], one["tags"], one["sequence"]) == ("k-1", ["k-1"], ["eu"], 8)
    assert rows("bytes", server=filled.url)[0]["body_base64"] == "/w=="
    at = one["stored_at"]
    since = rows("shop.", "--since", at, server=filled.url)
    until = rows("shop.", "--until", at, server=filled.url)
    assert [row["id"] for row in until + since] == filled.ids
    assert since[0]["id"] == one["id"]
    assert rows("shop.", "--since", "2h", "--until", "1h", server=filled.url) == []
    assert rows("nothing.", server=filled.url) == []


def test_lines_have_the_fields_and_bodies_if_wanted(filled: Filled) -> None:
    shown = run("find", "shop.order.a", "--limit", "1", "--header", "--bodies", server=filled.url)
    header, line = (one.split("\t") for one in shown.stdout.splitlines())
    row = dict(zip(header, line, strict=True))
    assert row["id"] == filled.ids[0]
    assert (row["subject"], row["keys"], row["tags"], row["body"]) == ("shop.order.a", "k-0", "eu", "order 0")
    assert "body" not in run("find", "shop.", "--limit", "1", "--header", server=filled.url).stdout.split("\n")[0]


def test_a_search_at_its_limit_says_how_to_go_on(filled: Filled) -> None:
    found: list[str] = []
    cursor: list[str] = []
    for _ in range(ORDERS):
        shown = run("find", "shop.", "--limit", "7", "--json", *cursor, server=filled.url)
        assert shown.exit_code == 0
        found += [json.loads(line)["id"] for line in shown.stdout.splitlines()]
        said = re.search(r"the first 7 messages, there may be more; go on with (--cursor) (\S+)", shown.stderr)
        if said is None:
            assert shown.stderr == ""
            break
        cursor = [said[1], said[2]]
    assert found == filled.ids


def test_a_search_that_is_stopped_is_not_whole(filled: Filled) -> None:
    rows("--contains", "never", "--stop-after", "0s", server=filled.url, code=1, error="--stop-after is over")


def test_messages_by_their_ids_also_delayed_ones(filled: Filled) -> None:
    wanted = [filled.ids[5], filled.delayed, filled.delivered]
    found = rows(*(one for name in wanted for one in ("--id", name)), server=filled.url)
    assert [row["id"] for row in found] == wanted
    assert [row["sequence"] is None for row in found] == [False, True, False]
    assert found[1]["deliver_at"] > found[1]["stored_at"]
    rest = rows(
        "--id", "0" * 32, "--id", filled.ids[0], server=filled.url, code=1, error="no broker here has message 0000"
    )
    assert [row["id"] for row in rest] == filled.ids[:1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--id", "order-4421"), "is not a message id"),
        (("bad..name",), "not a valid name"),
        (("--key", "k" * 1_025), "1,025 bytes"),
        (("--since", "yesterday"), "--since 'yesterday' is not a time"),
        (("--since", "1h", "--until", "2h"), "since is not before until"),
        (("--contains", ""), "not empty"),
        (("--cursor", "x"), "cursor 'x' is none"),
        (("--limit", "0"), "0 is not in the range"),
        (("--stop-after", "soon"), "stop_after"),
        (("--id", "0" * 32, "--key", "k"), "give either --id"),
        (("--data", "/nowhere/at/all"), "nowhere"),
        (("--data", "gopher://a/b"), "no known kind of location"),
    ],
)
def test_mistakes_are_said_and_nothing_is_done(filled: Filled, arguments: tuple[str, ...], error: str) -> None:
    shown = run("find", *arguments, server=filled.url)
    assert shown.exit_code == 2, shown.output
    assert error in shown.stderr
    assert shown.stdout == ""


def test_a_data_directory_and_an_archive_are_searched_without_a_broker(tmp_path: Path) -> None:
    directory, archive = tmp_path / "data", tmp_path / "archive"
    with broker_process(directory) as broker, qmq.connect_sync(broker.url) as client:
        ids = [client.send(f"shop.{n % 3}", b"order %d" % n, key=f"k-{n % 4}").id for n in range(60)]
        delayed = client.send("late", b"later", delay="1h").id
        client.admin.roll()
        live = rows("--key", "k-2", "--data", str(directory))
    data = str(directory)
    assert [row["id"] for row in live] == ids[2::4], "also while a broker runs"
    assert run("archive", data, "--to", str(archive), "--as", "segments").exit_code == 0
    for place in (data, str(archive), f"file://{archive}"):
        assert [row["id"] for row in rows("--key", "k-1", "--newest", "--data", place)] == ids[1::4][::-1]
        assert [row["body"] for row in rows("shop.", "--contains", "order 33", "--data", place)] == ["order 33"]
        assert [row["id"] for row in rows("--id", ids[7], "--data", place)] == [ids[7]]
        assert rows("--id", "0" * 32, "--data", place, code=1, error="has no message") == []
        first = run("find", "shop.", "--limit", "20", "--json", "--data", place)
        cursor = first.stderr.split()[-1]
        more = rows("shop.", "--data", place, "--cursor", cursor)
        assert [json.loads(line)["id"] for line in first.stdout.splitlines()] + [row["id"] for row in more] == ids
    assert [row["body"] for row in rows("--id", delayed, "--data", data)] == ["later"]
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = run("find", "--data", str(empty))
    assert (refused.exit_code, "neither a data directory nor an archive" in refused.stderr) == (2, True)


def message(number: int, **fields: Any) -> qmq.StoredMessage:
    now_us = int(datetime.now(UTC).timestamp() * 1e6)
    known = {
        "id": f"{number:032x}", "subject": "shop.order.created", "sequence": number, "body": b"a room\nfor two",
        "keys": ("order-4421",), "stored_at_us": now_us - 90_000_000, "size": 2_048, "broker": "10.0.0.1:20881",
    }  # fmt: skip
    return qmq.StoredMessage(**{**known, **fields})


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("key", ["order-4421", "the-order-4421-of-a-customer-with-a-long-name-and-two-wishes"])
def test_tables_never_cut_an_id_or_a_number(width: int, key: str) -> None:
    from rich.console import Console

    from qmq.cli.common.tables import print_table

    messages = [
        message(7, keys=(key, "k-2")), message(1 << 60, keys=(), subject="s" * 90, order_key="customer-12345678"),
        message(9, sequence=None, broker="10.0.0.2:1", priority="high"),
    ]  # fmt: skip
    console = Console(width=width, record=True, file=StringIO())
    print_table(table_of_messages(messages, width), console)
    shown = console.export_text()
    if width == 80:
        assert max(map(len, shown.splitlines())) <= width
        assert "order key customer-12345678" in shown
        assert "priority high" in shown
    for one in messages:
        assert one.id in shown
        assert one.broker in shown
    assert str(1 << 60) in shown
    assert ("a room" in shown) == (width == 200)
    assert "2.0 KiB" in shown


def test_a_block_has_all_of_a_message() -> None:
    assert "sent from 10.0.0.9:4, by shop-api" in block(message(7, source="10.0.0.9:4", app="shop-api"))
    shown = block(message(7, tags=("eu",), properties={"trace": "t\x1b"}, expires_at_us=1 << 50, replayed=True))
    for part in ("shop.order.created #7", "key order-4421", "tags eu", "trace = t\\x1b", "expires at", "restored"):
        assert part in shown
    assert "keys a, b" in block(message(7, keys=("a", "b")))
    assert "delayed" in block(message(7, sequence=None, deliver_at_us=1 << 50))
    assert "of one group alone" in block(message(7, sequence=None))


def test_progress_is_a_share_and_a_count() -> None:
    assert progress_line(qmq.FindProgress(1, 1, 3)) == "25% searched, 1 message found; Ctrl-C ends it"
    assert progress_line(qmq.FindProgress(0, 0, 0)).startswith("100% searched, 0 messages")


def test_a_terminal_gets_a_table_and_the_count(filled: Filled) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", "find", "shop.", "--key", "k-3"]
    environment = {**os.environ, "QMQ_SERVER": filled.url, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=environment, check=True
    )
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 65_536):
            shown += more
    except OSError:
        """The other end is closed."""
    os.close(ours)
    text = shown.decode()
    assert done.stderr == b""
    assert filled.ids[3] in text
    assert "10 messages" in text
