"""qmq/cli/common/listing.py: lists of several brokers name the broker of each row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import qmq
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


@pytest.mark.parametrize("command", [("groups",), ("consumers", "g"), ("subjects",), ("dead-letters", "list", "g")])
def test_a_line_ends_with_its_broker(url: str, command: tuple[str, ...]) -> None:
    addresses = [one.removeprefix("qmq://") for one in url.split(",")]
    shown = commands.qmq(*command, server=url).stdout.splitlines()
    assert [line.split("\t")[-1] for line in shown] == addresses
    alone = commands.qmq(*command, server=url.split(",")[0]).stdout.splitlines()
    assert len(alone) == 1


def test_tables_say_it_too(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    addresses = [one.removeprefix("qmq://") for one in url.split(",")]
    with qmq.connect_sync(url) as client:
        found = list(client.subjects())
    subjects._print_table(found)
    shown = capsys.readouterr().out
    assert all(f"at {address}" in shown for address in addresses)
    subjects._print_table(found[:1])
    assert "at 127" not in capsys.readouterr().out
