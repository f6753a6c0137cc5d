"""qmq/cli/messages/cancel.py, and delays in qmq/cli/messages/produce.py."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import qmq as package
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("cancel")) as broker:
        yield broker


def test_a_delayed_message_is_cancelled_once_and_for_all(broker: BrokerProcess) -> None:
    with package.connect_sync(broker.url) as client:
        receipt, plain = client.send("a", b"x", delay=3_600), client.send("a", b"y")
    done = qmq("cancel", receipt.id, server=broker.url)
    assert (done.exit_code, done.stdout) == (0, "cancelled\n")
    refused = qmq("cancel", plain.id, server=broker.url)
    assert refused.exit_code == 1
    assert "not cancelled: it has been delivered" in refused.stderr
    wrong = qmq("cancel", "xyz", server=broker.url)
    assert wrong.exit_code == 2
    assert "'xyz' is not a message id" in wrong.stderr


def test_produce_with_delays(broker: BrokerProcess) -> None:
    lines = [
        {"subject": "d.line", "body": "late", "delay": 3_600},
        {"subject": "d.line", "body": "past", "deliver_at": "2020-01-31T12:00:00Z"},
        {"subject": "d.line", "body": "number", "deliver_at": 1_600_000_000.5},
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    assert qmq("produce", "--json", stdin=text, server=broker.url).stdout == "3 acknowledged\n"
    assert qmq("produce", "d.all", "--delay", "0.2", stdin=b"1\n2\n", server=broker.url).stdout == "2 acknowledged\n"
    shown = qmq("consume", "d.", "--solo", "--start", "first", "--count", "4", "--timeout", "60", server=broker.url)
    assert sorted(shown.stdout.splitlines()) == ["1", "2", "number", "past"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            {"body": "x", "delay": "soon"},
            "\"7d\", not 'soon'",
        ),
        ({"body": "x", "delay": -1}, "delay must be from 0 to below 1e12 seconds, not -1"),
        ({"body": "x", "deliver_at": "soon"}, "deliver_at 'soon' is not a time"),
        ({"body": "x", "deliver_at": "2027-01-31T12:00:00"}, "no time zone"),
        ({"body": "x", "delay": 1, "deliver_at": 5}, "either delay or deliver_at"),
        ({"body": "x", "delay": 1e9}, "delay must be at most 731 days (two years)"),
    ],
)
def test_lines_that_name_no_time(broker: BrokerProcess, line: dict[str, object], says: str) -> None:
    done = qmq("produce", "d.wrong", "--json", stdin=json.dumps(line).encode(), server=broker.url)
    assert done.exit_code == 1
    assert says in done.stderr


@pytest.mark.parametrize(("delay", "says"), [("1e9", "at most 731 days (two years)"), ("-1", "from 0 to below")])
def test_a_delay_of_the_command_that_cannot_be(broker: BrokerProcess, delay: str, says: str) -> None:
    done = qmq("produce", "d.wrong", "--delay", delay, stdin=b"x", server=broker.url)
    assert done.exit_code == 2
    assert says in done.stderr
