"""`qmq sql`: what it prints on terminals, in pipes and to files, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
from datetime import date, datetime, timedelta
from decimal import Decimal
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
import pytest

import qmq.testing
from qmq.cli.sql.rows import plain_value
from tests.archive.archives import archive
from tests.archive.orders import rows_in, write_orders
from tests.cli.commands import qmq as run
from tests.cli.commands import qmq_process
from tests.storage.stores import damage

VALUES = (
    "SELECT 'größe' AS text, 1 AS n, 1.5 AS half, NULL AS nothing, true AS yes, ['a', 'b'] AS list, {'x': 1} AS object"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "data"
    write_orders(path, 20)
    return path


def test_rows_in_every_form(data: Path, tmp_path: Path) -> None:
    values = {
        "text": "größe",
        "n": 1,
        "half": 1.5,
        "nothing": None,
        "yes": True,
        "list": ["a", "b"],
        "object": {"x": 1},
    }
    as_json = run("sql", VALUES, "--data", str(data), "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (0, values)
    lines = run("sql", VALUES, "--data", str(data), "--header").stdout
    assert lines == "\t".join(values) + "\n" + 'größe\t1\t1.5\t\ttrue\ta,b\t{"x": 1}\n'
    assert run("sql", "--data", str(data), VALUES).stdout == lines.partition("\n")[2]
    (row,) = csv.DictReader(io.StringIO(run("sql", "query", VALUES, "--data", str(data), "--csv").stdout))
    assert row == {
        "text": "größe",
        "n": "1",
        "half": "1.5",
        "nothing": "",
        "yes": "true",
        "list": '["a", "b"]',
        "object": '{"x": 1}',
    }
    path = tmp_path / "out.parquet"
    written = run("sql", "-", "--data", str(data), "--parquet", str(path), stdin=VALUES.encode())
    assert (written.exit_code, written.stdout) == (0, f"1 row in {path}\n")
    assert pq.read_table(path).to_pylist() == [{**values, "half": Decimal("1.5")}]
    assert os.listdir(tmp_path) == ["out.parquet"]


def test_messages_of_a_directory_of_an_archive_and_of_a_broker(data: Path, tmp_path: Path) -> None:
    archive(data, tmp_path / "archive")
    count = str(len(rows_in(data)))
    query = "SELECT count(*) FROM messages"
    assert run("sql", query, "--data", str(data)).stdout == f"{count}\n"
    assert run("sql", query, "--archive", str(tmp_path / "archive")).stdout == f"{count}\n"
    with qmq.testing.broker() as broker, qmq.connect_sync() as client:
        client.send("shop.order", json={"total": 125}, key="o-1")
        shown = run("sql", "SELECT key, decode(body)->>'total' AS total FROM messages", "--json", server=broker.url)
        assert json.loads(shown.stdout) == {"key": "o-1", "total": "125"}
        assert run("sql", "SELECT subject, messages FROM subjects", server=broker.url).stdout == "shop.order\t1\n"


def test_a_name_that_comes_twice_hides_no_value(data: Path) -> None:
    shown = run("sql", "SELECT 1 AS a, 2 AS a, 3 AS a", "--data", str(data), "--json")
    assert json.loads(shown.stdout) == {"a": 1, "a_2": 2, "a_3": 3}


def on_terminal(width: int, *arguments: str) -> str:
    """Return what the command shows on a terminal of that width."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", "sql", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}):
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the command has ended
                break
            shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def test_a_table_on_a_terminal(data: Path) -> None:
    shown = on_terminal(
        80, "SELECT 'a\tb' AS subject, 4421 AS count, 'x' || repeat('y', 500) AS body", "--data", str(data)
    )
    lines = shown.splitlines()
    assert lines[1].split() == ["subject", "count", "body"]
    assert "a\\tb" in shown
    assert "4421" in shown
    assert "(501 characters)" in "".join(line.strip() for line in lines)
    assert lines[-1] == "1 row"
    assert max(map(len, lines)) <= 80
    wide = on_terminal(80, "SELECT * EXCLUDE (body) FROM messages LIMIT 2", "--data", str(data)).splitlines()
    assert [line.split()[0] for line in wide if line.startswith("s")] == ["subject", "sequence", "stored_at", "source",
                                                                          "sender"] * 2  # fmt: skip
    assert wide[-1] == "2 rows"
    many = on_terminal(120, "SELECT i FROM range(1000000000000) AS t(i)", "--data", str(data)).splitlines()
    assert many[-1] == "the first 1,000 rows; --json, --csv and --parquet FILE give all"
    assert "999" in many[-3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (('query',), "Missing argument 'QUERY'"),
        (("SELECT 1", "--data", "x", "--archive", "y"), "give either --data or --archive"),
        (("SELECT 1", "--csv", "--json"), "give one of --json, --csv and --parquet"),
        (("SELEC 1", "--data", "DATA"), "Parser Error"),
        (("DROP TABLE messages", "--data", "DATA"), "DROP is refused: queries only read; give a SELECT"),
        (("SELECT 1", "--data", "DATA", "--memory", "much"), "a query cannot have 'much' of memory"),
        (("SELECT 1", "--data", "/"), "/ is neither a data directory nor an archive"),
        (("FROM groups", "--data", "DATA"), "the table groups is that of a running broker"),
        (("SELECT 1", "--data", "DATA", "--parquet", "/nobody/x"), "--parquet /nobody/x cannot be written"),
        (("SELECT interval 1 month AS i", "--data", "DATA", "--parquet", "OUT"), "a Parquet file cannot have a column"),
    ],
)  # fmt: skip
def test_wrong_use_is_said_in_a_line(data: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    places = {"DATA": str(data), "OUT": str(tmp_path / "out")}
    shown = run("sql", *(places.get(argument, argument) for argument in arguments))
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert said in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_is_away(tmp_path: Path) -> None:
    shown = run("sql", "FROM messages", "--server", "qmq://127.0.0.1:1")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "127.0.0.1:1" in shown.stderr


def test_bad_bytes_are_said_and_the_rest_is_printed(tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 10)
    damage(tmp_path, sent[4], len(sent[4].data) - 1)
    shown = run("sql", "SELECT count(body) FROM messages", "--data", str(tmp_path))
    assert shown.exit_code == 1
    assert int(shown.stdout) > 0
    assert "bad" in shown.stderr


def test_an_interrupt_ends_a_long_result(data: Path) -> None:
    with qmq_process("sql", "SELECT i FROM range(1000000000000) AS t(i)", "--data", str(data)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.send_signal(signal.SIGINT)
        while process.stdout.read(1 << 20):
            """Take the rest of it."""
        assert process.wait(60) == 130


def test_a_reader_that_has_enough_ends_a_long_result(data: Path) -> None:
    with qmq_process("sql", "SELECT i FROM range(1000000000000) AS t(i)", "--data", str(data)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (b"text", "text"),
        (b"\xff", "/w=="),
        (float("nan"), None),
        (Decimal("12.50"), 12.5),
        (Decimal(1 << 90), 1 << 90),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime.fromisoformat("2026-01-02T03:00:00"), "2026-01-02T03:00:00.000000"),
        (timedelta(minutes=1), 60.0),
        ([b"a", None], ["a", None]),
        ({"a": [date(2026, 1, 2)]}, {"a": ["2026-01-02"]}),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_values_as_json_has_them(value: Any, plain: Any) -> None:
    assert plain_value(value) == plain
