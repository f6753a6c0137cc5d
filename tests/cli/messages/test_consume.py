"""qmq/cli/messages/consume.py: the output, the number of messages taken, and the end."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from qmq.cli.common.arguments import start_of
from qmq.errors import InvalidOption
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq, qmq_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("consume")) as broker:
        yield broker


def send(broker: BrokerProcess, subject: str, *bodies: bytes) -> None:
    done = qmq("produce", subject, stdin=b"".join(body + b"\n" for body in bodies), server=broker.url)
    assert done.stdout == f"{len(bodies)} acknowledged\n", done.stderr


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_raw_is_the_body_and_a_newline(broker: BrokerProcess) -> None:
    send(broker, "raw.a", b"one", b"", b"\xff\x00")
    shown = qmq("consume", "raw.", "--group", "g", "--count", "3", server=broker.url)
    assert (shown.exit_code, shown.stdout_bytes, shown.stderr) == (0, b"one\n\n\xff\x00\n", "")


def test_json_has_every_field(broker: BrokerProcess) -> None:
    line = (
        '{"body": "h\u00e9\\n", "keys": ["k", "l"], "tags": ["t"], "properties": {"p": "v"}}\n{"body_base64": "/w=="}\n'
    )
    qmq("produce", "json.a", "--json", stdin=line.encode(), server=broker.url)
    shown = qmq("consume", "json.a", "--group", "g", "--count", "2", "--json", server=broker.url)
    first, second = (json.loads(line) for line in shown.stdout_bytes.splitlines())
    assert list(first) == [
        "id", "subject", "sequence", "key", "keys", "priority", "order_key", "tags", "properties", "attempt",
        "created_at", "stored_at", "source", "sender", "producer", "app", "body",
    ]  # fmt: skip
    assert first | {"id": 0, "created_at": 0, "stored_at": 0, "source": 0, "producer": 0, "app": 0} == {
        "id": 0, "subject": "json.a", "sequence": 0, "key": "k", "keys": ["k", "l"], "priority": "normal",
        "order_key": None, "tags": ["t"], "properties": {"p": "v"},
        "attempt": 1, "created_at": 0, "stored_at": 0, "source": 0, "sender": None, "producer": 0, "app": 0,
        "body": "h\u00e9\n",
    }  # fmt: skip
    assert re.fullmatch(r"127\.0\.0\.1:\d+", first["source"])
    assert re.fullmatch("[0-9a-f]{32}", first["producer"])
    assert re.fullmatch("[0-9a-f]{32}", first["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first["stored_at"])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(first["stored_at"])).total_seconds() < 600
    assert (second["body_base64"], second["key"], second["sequence"]) == ("/w==", None, 1)
    assert "body" not in second


def test_count_takes_no_more_than_it_prints(broker: BrokerProcess) -> None:
    send(broker, "count", *numbers(1_000))
    taken: list[bytes] = []
    for count in (1, 7, 300, 692):
        shown = qmq("consume", "count", "--group", "g", "--count", str(count), server=broker.url)
        lines = shown.stdout_bytes.splitlines()
        assert len(lines) == count
        taken += lines
    assert taken == numbers(1_000)


def test_count_0_takes_nothing(broker: BrokerProcess) -> None:
    send(broker, "none", b"x")
    assert qmq("consume", "none", "--group", "g", "--count", "0", server=broker.url).stdout == ""
    assert qmq("consume", "none", "--group", "g", "--count", "1", server=broker.url).stdout == "x\n"


def test_timeout_ends_it_with_what_there_was(broker: BrokerProcess) -> None:
    send(broker, "timeout", *numbers(3))
    shown = qmq("consume", "timeout", "--group", "g", "--count", "5", "--timeout", "0.05", server=broker.url)
    assert (shown.exit_code, shown.stdout) == (0, "0\n1\n2\n")


def test_a_group_shares_and_each_solo_sees_all(broker: BrokerProcess) -> None:
    send(broker, "share", *numbers(10))
    half = qmq("consume", "share", "--group", "g", "--consumer", "c-1", "--count", "5", server=broker.url)
    rest = qmq("consume", "share", "--group", "g", "--consumer", "c-2", "--timeout", "0", server=broker.url)
    assert (half.stdout + rest.stdout).split() == [str(number) for number in range(10)]
    for _ in range(2):
        solo = qmq("consume", "share", "--solo", "--start", "first", "--timeout", "0", server=broker.url)
        assert len(solo.stdout.split()) == 10
    assert qmq("consume", "share", "--solo", "--timeout", "0", server=broker.url).stdout == ""


def test_where_it_starts(broker: BrokerProcess) -> None:
    send(broker, "start", *numbers(3))
    shown = qmq("consume", "start", "--group", "g", "--count", "3", "--json", server=broker.url)
    between = json.loads(shown.stdout.splitlines()[-1])["stored_at"]
    send(broker, "start", b"3", b"4")

    def lines(start: str) -> list[str]:
        shown = qmq("consume", "start", "--solo", "--start", start, "--timeout", "0", server=broker.url)
        return shown.stdout.split()

    assert lines("first") == ["0", "1", "2", "3", "4"]
    assert lines("new") == []
    assert lines("2") == ["2", "3", "4"]
    assert lines(between.replace("Z", "+00:00")) == ["0", "1", "2", "3", "4"]  # their batch was stored at that time
    assert lines("2000-01-01T00:00:00+01:00") == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["now", "-1", "2026-01-31", "2026-01-31T12:00:00", "1e3", "\u0661", ""])
def test_a_start_that_is_none(text: str) -> None:
    with pytest.raises(InvalidOption, match="is not first, new"):
        start_of(text, "--start")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "either --group G or --solo"),
        (["a", "--group", "g", "--solo"], "either --group G or --solo"),
        (["a..b", "--solo"], "not a valid name"),
        (["a", "--group", "g g"], "not a valid name"),
        (["a", "--group", "../g"], "not a valid name"),
        (["a", "--solo", "--consumer", "c/1"], "not a valid name"),
        (["a", "--solo", "--start", "never"], "is not first, new"),
        (["a", "--solo", "--count", "-1"], "--count"),
        (["a", "--solo", "--timeout", "-1"], "--timeout"),
        (["a", "--solo", "--format", "json"], "--format"),
        (["a", "--solo", "--at-most-once"], "--group"),
        (["a", "--group", "g", "--at-most-once", "--broadcast"], "neither --broadcast"),
        (["a", "--group", "g", "--at-most-once", "--no-ack"], "--no-ack"),
        (["a", "--group", "g", "--broadcast", "--no-ack"], "none of --broadcast"),
        (["a", "--group", "g", "--consumer", "c", "--no-ack"], "--consumer"),
        (["a", "--group", "g", "--start", "first", "--no-ack"], "--start"),
        (["a", "--group", "g@c", "--broadcast"], "as consumer 'c'"),
        (["--solo"], "PREFIX"),
    ],
)
def test_wrong_calls_end_with_2(arguments: list[str], says: str) -> None:
    done = qmq("consume", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_looking_changes_nothing(broker: BrokerProcess) -> None:
    look = "consume", "--no-ack", "--timeout", "0.2", "--group", "looked-at"
    unknown = qmq(*look, "looked.", server=broker.url)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "there is no group 'looked-at'" in unknown.stderr
    qmq("consume", "looked.a", "--group", "looked-at", "--timeout", "0", server=broker.url)
    send(broker, "looked.a", *numbers(3))
    send(broker, "looked.b", b"another's")
    before = qmq("groups", "--json", server=broker.url).stdout
    assert '"follows": ["looked.a"]' in before
    for prefix in ("looked.a", "looked.", ""):
        assert qmq(*look, prefix, server=broker.url).stdout == "0\n1\n2\n"
    other = qmq(*look, "looked.b", server=broker.url)
    assert (other.exit_code != 0, other.stdout) == (True, "")
    assert "does not follow 'looked.b', only 'looked.a'" in other.stderr
    assert '"follows": ["looked.a"]' in qmq("groups", "--json", server=broker.url).stdout
    shown = qmq("consume", "looked.a", "--group", "looked-at", "--count", "3", "--json", server=broker.url)
    assert [json.loads(line)["attempt"] for line in shown.stdout.splitlines()] == [1, 1, 1]


def test_no_broker() -> None:
    done = qmq("consume", "a", "--solo", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: no broker")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_nothing_is_lost(broker: BrokerProcess, number: signal.Signals, exit_code: int) -> None:
    subject = f"signal.{number.name}"
    send(broker, subject, *numbers(50_000))
    with qmq_process("consume", subject, "--group", "g", "--server", broker.url) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (exit_code, b"")
    rest = qmq("consume", subject, "--group", "g", "--timeout", "0", server=broker.url)
    assert (first + out + rest.stdout_bytes).split() == numbers(50_000)


def test_a_closed_pipe_ends_it_quietly(broker: BrokerProcess) -> None:
    send(broker, "pipe", *numbers(100_000))
    with qmq_process("consume", "pipe", "--group", "pipe", "--server", broker.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""
    assert qmq("consume", "pipe", "--group", "pipe", "--timeout", "0", server=broker.url).exit_code == 0
    rows = [json.loads(line) for line in qmq("groups", "--json", server=broker.url).stdout.splitlines()]
    (in_retry,) = [row["in_retry"] for row in rows if row["group"] == "pipe"]
    assert in_retry == 0, "that nobody reads what it prints is no fault of the messages"
