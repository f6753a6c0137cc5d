"""qmq/cli/common/listing.py: lines and JSON have the same fields, and each row names its broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest
from rich.console import Console

import qmq
from qmq.cli.common.listing import Fields, RowWriter
from qmq.cli.common.tables import print_table
from qmq.cli.manage import subjects
from tests.broker_process import BrokerProcess, broker_process
from tests.cli import commands


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start two brokers that have one group, each with a rejected message of it."""
    with ExitStack() as stack:
        brokers: list[BrokerProcess] = [
            stack.enter_context(broker_process(tmp_path_factory.mktemp("where") / "data")) for _ in range(2)
        ]
        url = ",".join(broker.url for broker in brokers)
        for broker in brokers:
            with qmq.connect_sync(broker.url) as client:
                client.send("a", b"x")
        with qmq.connect_sync(url) as client, client.subscribe("a", group="g", consumer="c") as consumer:
            for message in consumer.pull(min_count=2, timeout=30):
                message.reject("bad")
            yield url


LISTS = [("groups",), ("consumers", "g"), ("subjects",), ("dead-letters", "list", "g")]


@pytest.mark.parametrize("command", LISTS)
def test_a_line_ends_with_its_broker(url: str, command: tuple[str, ...]) -> None:
    addresses = [one.removeprefix("qmq://") for one in url.split(",")]
    shown = commands.qmq(*command, server=url).stdout.splitlines()
    assert [line.split("\t")[-1] for line in shown] == addresses
    alone = commands.qmq(*command, server=url.split(",")[0]).stdout.splitlines()
    assert [line.split("\t")[-1] for line in alone] == addresses[:1]


@pytest.mark.parametrize("command", LISTS)
def test_a_line_has_the_fields_of_the_object_under_their_names(url: str, command: tuple[str, ...]) -> None:
    header, *lines = commands.qmq(*command, "--header", server=url).stdout.splitlines()
    rows = [json.loads(line) for line in commands.qmq(*command, "--json", server=url).stdout.splitlines()]
    assert len(lines) == len(rows) == 2
    for line, row in zip(lines, rows, strict=True):
        fields = {
            name: value for name, value in row.items() if name not in ("settings", "blocked", "blocks")
        }  # JSON alone
        assert header.split("\t") == list(fields)
        assert len(line.split("\t")) == len(fields)


def test_values_of_a_line_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    values = [None, True, False, 1, ["a", "b"], "tab\tand\nline", datetime(2026, 1, 31, 12, tzinfo=UTC)]
    fields: Fields[int] = {str(index): lambda _, value=value: value for index, value in enumerate(values)}  # type: ignore[misc]
    RowWriter(fields, False, True).write(0)
    header, line = capsys.readouterr().out.splitlines()
    assert header.split("\t") == ["0", "1", "2", "3", "4", "5", "6"]
    assert line.split("\t") == ["", "true", "false", "1", "a,b", r"tab\tand\nline", "2026-01-31T12:00:00.000000Z"]
    RowWriter(fields, True, True).write(0)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["6"] == "2026-01-31T12:00:00.000000Z"


@pytest.mark.parametrize("width", [80, 120])
def test_tables_say_it_too(url: str, capsys: pytest.CaptureFixture[str], width: int) -> None:
    addresses = [one.removeprefix("qmq://") for one in url.split(",")]
    with qmq.connect_sync(url) as client:
        found = list(client.subjects())
    print_table(subjects._table(found, width), Console(width=width))
    shown = capsys.readouterr().out
    assert all(address in shown for address in addresses)
    print_table(subjects._table(found[:1], width), Console(width=width))
    assert "127" not in capsys.readouterr().out
