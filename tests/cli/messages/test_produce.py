"""qmq/cli/messages/produce.py: each line becomes one message, and a line that cannot is named."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.cli.messages.produce import InputSource
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq, qmq_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(
        tmp_path_factory.mktemp("produce"), max_message_bytes=65_536, max_frame_bytes="1 MiB"
    ) as broker:
        yield broker


def stored(url: str, prefix: str) -> list[dict[str, object]]:
    shown = qmq("consume", prefix, "--solo", "--start", "first", "--timeout", "0", "--json", server=url)
    assert shown.exit_code == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_each_line_is_a_message(broker: BrokerProcess) -> None:
    arguments = ["--key", "k", "--key", "l", "--tag", "t1", "--tag", "t2", "--property", "a=b=c", "--property", "d="]
    done = qmq("produce", "lines.a", *arguments, stdin=b"one\n\nthree \xff\nlast", server=broker.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "4 acknowledged\n", "")
    found = stored(broker.url, "lines.a")
    assert [message.get("body", message.get("body_base64")) for message in found] == ["one", "", "dGhyZWUg/w==", "last"]
    assert [message["sequence"] for message in found] == [0, 1, 2, 3]
    assert all(
        (message["key"], message["keys"], message["tags"], message["properties"])
        == ("k", ["k", "l"], ["t1", "t2"], {"a": "b=c", "d": ""})
        for message in found
    )


def test_priorities_and_order_keys_go_both_ways(broker: BrokerProcess) -> None:
    for arguments in (
        ["--priority", "high"], ["--priority", "2"], ["--priority", "0"], ["--order-key", "order-1"], [],
        ["--order-key", "order-1", "--priority", "high"],
    ):  # fmt: skip
        done = qmq("produce", "lanes.a", "body", *arguments, server=broker.url)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "1 acknowledged\n", "")
    shown = qmq("consume", "lanes.", "--solo", "--start", "first", "--timeout", "0", "--json", server=broker.url)
    lines = [{**json.loads(line), "subject": "copied.a"} for line in shown.stdout.splitlines()]
    copied = "\n".join(map(json.dumps, lines)).encode()
    done = qmq("produce", "--json", stdin=copied, server=broker.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "6 acknowledged\n", "")
    for prefix in ("lanes.", "copied."):
        found = sorted((one["priority"], one["order_key"] or "") for one in stored(broker.url, prefix))
        assert found == [
            ("high", ""), ("high", ""), ("high", "order-1"), ("low", ""), ("normal", ""), ("normal", "order-1")
        ]  # fmt: skip


@pytest.mark.parametrize("durability", ["flush", "append"])
def test_many_lines_arrive_in_order(broker: BrokerProcess, durability: str) -> None:
    subject = f"many.{durability}"
    lines = [f"line {number}" for number in range(150_000)]
    stdin = "\n".join(lines).encode()
    done = qmq("produce", subject, "--durability", durability, stdin=stdin, server=broker.url)
    assert (done.exit_code, done.stdout) == (0, "150000 acknowledged\n")
    shown = qmq("consume", subject, "--solo", "--start", "first", "--count", "150000", server=broker.url)
    assert shown.stdout.split("\n") == [*lines, ""]


def test_nothing_to_send(broker: BrokerProcess) -> None:
    done = qmq("produce", "nothing", server=broker.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "0 acknowledged\n", "")


def test_lines_that_are_no_messages_are_named_and_the_others_go_on(broker: BrokerProcess) -> None:
    lines = [
        b'{"body": "one"}',
        b"",
        b"nonsense",
        b'{"body": "two", "subject": "json.b"}',
        b'{"body": "three", "subject": "json..b"}',
        b'{"body": "four", "properties": {"a": 1}}',
        b'{"body": "five"}',
    ]
    done = qmq("produce", "json.a", "--json", stdin=b"\n".join(lines), server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "3 acknowledged\n")
    errors = done.stderr.splitlines()
    assert [error.split(": ")[1] for error in errors] == ["line 3", "line 5", "line 6"]
    assert "not a valid name" in errors[1]
    assert [message["body"] for message in stored(broker.url, "json.")] == ["one", "two", "five"]


def test_a_line_without_any_subject_is_named(broker: BrokerProcess) -> None:
    done = qmq("produce", "--json", stdin=b'{"body": "x"}\n', server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "0 acknowledged\n")
    assert done.stderr == "qmq: line 1: neither the line nor the command names a subject\n"


def test_a_message_that_is_too_large_is_named(broker: BrokerProcess) -> None:
    stdin = b"\n".join([b"x" * 60_000, b"x" * 70_000, b"x" * 60_000])
    done = qmq("produce", "large", stdin=stdin, server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "2 acknowledged\n")
    assert done.stderr.startswith("qmq: line 2: ")
    assert "65536" in done.stderr


def test_not_every_one_of_many_failures_is_named(broker: BrokerProcess) -> None:
    done = qmq("produce", "json.c", "--json", stdin=b"nonsense\n" * 1_000, server=broker.url)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 21
    assert done.stderr.endswith("qmq: and 980 more lines\n")


def test_what_consume_prints_can_be_sent_again(broker: BrokerProcess) -> None:
    lines = b'{"body": "x", "key": "k", "tags": ["t"], "properties": {"p": "v"}}\n{"body_base64": "/w=="}\n'
    assert qmq("produce", "again.a", "--json", stdin=lines, server=broker.url).exit_code == 0
    shown = qmq("consume", "again.a", "--group", "g", "--count", "2", "--json", server=broker.url)
    done = qmq("produce", "--json", stdin=shown.stdout_bytes, server=broker.url)
    assert (done.exit_code, done.stdout) == (0, "2 acknowledged\n")
    found = stored(broker.url, "again.a")
    for first, second in zip(found[:2], found[2:], strict=True):
        same = first.keys() - {"id", "sequence", "created_at", "stored_at", "source", "producer"}
        assert {name: first[name] for name in same} == {name: second[name] for name in same}
        assert first["id"] != second["id"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "SUBJECT"),
        (["a..b"], "not a valid name"),
        (["a."], "not a valid name"),
        (["a", "--property", "novalue"], "NAME=VALUE"),
        (["a", "--durability", "maybe"], "durability"),
        (["a", "--priority", "5"], "'--priority': '5' is not one of 'low', 'normal', 'high'"),
        (["a", "--priority", "urgent"], "'--priority': 'urgent' is not one of 'low', 'normal', 'high'"),
        (["a", "--priority", ""], "'--priority': '' is not one of"),
        (["a", "--priority", "-1"], "'--priority': '-1' is not one of"),
        (["a", "--order-key", ""], "an order key has 1 to 1,024 bytes as UTF-8, not 0 as ''"),
        (["a", "--order-key", "k" * 1_025], "not 1,025 as 'kkk"),
        (["a", "--order-key", "\udcff"], "is not UTF-8"),
        (["a", "--server", "http://x"], "not the address of a broker"),
        (["a", "--server", "qmq://x:port"], "not the address of a broker"),
    ],
)
def test_wrong_calls_end_with_2(arguments: list[str], says: str) -> None:
    done = qmq("produce", *arguments, stdin=b"x\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_no_broker(tmp_path: Path) -> None:
    done = qmq("produce", "a", stdin=b"x\n", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: no broker")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_was_read_sent(
    broker: BrokerProcess, number: signal.Signals, exit_code: int
) -> None:
    subject = f"signal.{number.name}"
    with qmq_process("produce", subject, "--server", broker.url) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\nhalf a li")
        process.stdin.flush()
        while len(stored(broker.url, subject)) < 2:
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (exit_code, b"2 acknowledged\n", b"")
    assert [message["body"] for message in stored(broker.url, subject)] == ["one", "two"]


@pytest.mark.parametrize(
    "field",
    [
        '"delay": 1e305', '"delay": -1e305', '"delay": NaN', '"delay": Infinity', '"delay": 1e1000', '"delay": true',
        '"delay": "1x"', '"delay": ' + "9" * 400, '"delay": ' + "9" * 5_000, '"deliver_at": 1e305',
        '"deliver_at": "soon"',
        '"deliver_at": "9999-12-31T23:59:59.999999-23:59"', '"deliver_at": [1]', '"expires_in": 1e305',
        '"expires_in": NaN', '"expires_in": 0', '"expires_in": ' + "9" * 400, '"tags": [1]', '"tags": ["\\ud800"]',
        '"tags": 5', '"key": "\\ud800"',
        '"properties": [1]', '"properties": {"a": null}', '"properties": {"\\ud800": "a"}', '"subject": "a\\u0000b"',
        '"' + "x" * 100_000 + '": 1',
    ],
)  # fmt: skip
def test_whatever_a_line_says_the_others_are_sent_and_counted(broker: BrokerProcess, field: str) -> None:
    lines = '{"body": "1"}\n{"body": "2", ' + field + '}\n{"body": "3"}\n'
    done = qmq("produce", "strange.a", "--json", stdin=lines.encode(), server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "2 acknowledged\n"), done.stderr
    assert done.stderr.startswith("qmq: line 2: ")
    assert len(done.stderr) < 2_000


@pytest.mark.parametrize("deliver_at", ["0001-01-01T00:00:00+23:59", "1969-12-31T23:59:59Z"])
def test_what_was_to_be_delivered_long_ago_is_there_at_once(broker: BrokerProcess, deliver_at: str) -> None:
    line = json.dumps({"body": deliver_at, "deliver_at": deliver_at}).encode()
    assert qmq("produce", "late.a", "--json", stdin=line, server=broker.url).stdout == "1 acknowledged\n"
    assert deliver_at in [message["body"] for message in stored(broker.url, "late.a")]


def test_what_was_sent_before_stdin_failed_is_counted(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = iter([b"one\ntwo\n"])

    def read() -> bytes:
        try:
            return next(chunks)
        except StopIteration:
            raise OSError(5, "Input/output error") from None

    monkeypatch.setattr(InputSource, "_reader", staticmethod(lambda stream: read))
    done = qmq("produce", "broken.a", server=broker.url)
    assert (done.exit_code, done.stdout) == (2, "2 acknowledged\n")
    assert done.stderr == "qmq: stdin cannot be read: Input/output error\n"


def test_a_body_on_the_command_line_is_a_message(broker: BrokerProcess) -> None:
    done = qmq("produce", "one.a", '{"id": 4421}\nsecond line', "--key", "order-4421", server=broker.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "1 acknowledged\n", "")
    (row,) = stored(broker.url, "one.a")
    assert (row["body"], row["key"]) == ('{"id": 4421}\nsecond line', "order-4421")
    both = qmq("produce", "one.a", "x", "--json", server=broker.url)
    assert (both.exit_code, "either a BODY or --json" in both.stderr) == (2, True)


def test_ids_are_printed_in_the_order_of_the_lines(broker: BrokerProcess) -> None:
    done = qmq(
        "produce", "ids.a", "--ids", stdin=b"".join(b"%d\n" % number for number in range(2_500)), server=broker.url
    )
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [row["id"] for row in stored(broker.url, "ids.a")]
    one = qmq("produce", "ids.b", "x", "--ids", server=broker.url)
    assert one.stdout.splitlines() == [row["id"] for row in stored(broker.url, "ids.b")]


def test_lines_without_an_id_are_named(broker: BrokerProcess) -> None:
    lines = b'{"subject": "ids.c", "body": "x"}\n\n{"body": 3}\n{"subject": "ids.c", "body": "y"}\n'
    done = qmq("produce", "--json", "--ids", stdin=lines, server=broker.url)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [row["id"] for row in stored(broker.url, "ids.c")]
    assert done.stderr.startswith("qmq: line 3: ")


#: What a line may have wrong with its priority or order key, and what is said of it.
WRONG_LANES: list[tuple[dict[str, object], str]] = [
    ({"priority": "urgent"}, "priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not 'urgent'"),
    ({"priority": 3}, "or 0, 1 or 2, not 3"),
    ({"priority": -1}, "or 0, 1 or 2, not -1"),
    ({"priority": True}, "or 0, 1 or 2, not True"),
    ({"priority": 1.5}, "or 0, 1 or 2, not 1.5"),
    ({"priority": ""}, "or 0, 1 or 2, not ''"),
    ({"priority": ["low"]}, "or 0, 1 or 2, not ['low']"),
    ({"priority": {"a": 1}}, "or 0, 1 or 2, not {'a': 1}"),
    ({"order_key": ""}, "an order key has 1 to 1,024 bytes as UTF-8, not 0 as ''"),
    ({"order_key": "k" * 1_025}, "not 1,025 as 'kkk"),
    ({"order_key": 5}, "order_key is a string, not 5"),
    ({"order_key": True}, "order_key is a string, not true"),
    ({"order_key": ["k"]}, 'order_key is a string, not ["k"]'),
    ({"order_key": "a\ud800"}, "an order key must be a str that UTF-8 can hold, not 'a\\ud800'"),
    ({"order_key": "k", "priority": "lower"}, "priority must be"),
    ({"order_keys": ["k"]}, "unknown field 'order_keys'"),
]


@pytest.mark.parametrize("arguments", [[], ["--ids"]])
def test_a_wrong_lane_of_a_line_is_named_and_hurts_no_other_line(broker: BrokerProcess, arguments: list[str]) -> None:
    subject = f"wrong-lanes{''.join(arguments)}"
    lines = [
        line
        for wrong, _ in WRONG_LANES
        for line in ({"body": "bad", **wrong}, {"body": "good", "priority": "high"}, {"body": "good", "order_key": "k"})
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    done = qmq("produce", subject, "--json", *arguments, stdin=stdin, server=broker.url)
    assert done.exit_code == 1
    named = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in named] == [f"line {3 * at + 1}" for at in range(len(WRONG_LANES))]
    for line, (_, says) in zip(named, WRONG_LANES, strict=True):
        assert says in line
    found = stored(broker.url, subject)
    assert len(found) == 2 * len(WRONG_LANES)
    assert {one["body"] for one in found} == {"good"}
    if arguments:
        assert sorted(done.stdout.split()) == sorted(str(one["id"]) for one in found)
    else:
        assert done.stdout == f"{len(found)} acknowledged\n"


def test_a_message_with_a_unique_text_is_stored_once(broker: BrokerProcess) -> None:
    first, again = (qmq("produce", "unique.a", "x", "--unique", "t", "--ids", server=broker.url) for _ in range(2))
    assert first.stdout == again.stdout
    said = qmq("produce", "unique.a", "y", "--unique", "t", server=broker.url)
    assert said.stdout == f"1 acknowledged; it was sent before, and is stored as {first.stdout}"
    lines = [{"body": "1", "unique": "t"}, {"body": "2", "unique": "u"}, {"body": "3", "unique": "u"}, {"body": "4"}]
    lines += [{"body": "bad", "unique": ""}, {"body": "bad", "unique": 5}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    done = qmq("produce", "unique.a", "--json", stdin=stdin, server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "4 acknowledged\n")
    assert "line 5: a unique text has 1 to 1,024 bytes as UTF-8, not 0 as ''" in done.stderr
    assert "line 6: unique is a string, not 5" in done.stderr
    assert sorted(str(one["body"]) for one in stored(broker.url, "unique.a")) == ["2", "4", "x"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x", "--unique", ""], "a unique text has 1 to 1,024 bytes as UTF-8, not 0 as ''"),
        (["x", "--unique", "t" * 1_025], "not 1,025 as 'ttt"),
        (["--unique", "t"], "--unique is for one BODY"),
    ],
)
def test_a_wrong_unique_text_is_refused_before_a_connection(arguments: list[str], says: str) -> None:
    done = qmq("produce", "a.b", *arguments, server="qmq://127.0.0.1:1")
    assert done.exit_code == 2
    assert says in done.stderr


def test_lines_far_behind_a_wrong_one_are_sent_with_their_ids(broker: BrokerProcess) -> None:
    lines = [{"body": "bad", "priority": "urgent"}, *({"body": str(number)} for number in range(2_500))]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    done = qmq("produce", "ids.d", "--json", "--ids", stdin=stdin, server=broker.url)
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 2_500)
    assert done.stderr.startswith("qmq: line 1: priority must be ")
    assert len(done.stderr.splitlines()) == 1


def test_an_order_key_of_the_command_is_that_of_consumed_lines(broker: BrokerProcess) -> None:
    lines = b'{"body": "x", "priority": "normal", "order_key": null}\n{"body": "y", "order_key": "own"}\n'
    done = qmq("produce", "of-command", "--json", "--order-key", "k", stdin=lines, server=broker.url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert {one["body"]: one["order_key"] for one in stored(broker.url, "of-command")} == {"x": "k", "y": "own"}


def test_a_delay_is_a_text(broker: BrokerProcess) -> None:
    assert qmq("produce", "texts.a", "x", "--delay", "1h 30m", "--expires-in", "2d", server=broker.url).exit_code == 0
    assert '"delayed": 1' in qmq("subjects", "texts.a", "--json", server=broker.url).stdout
    wrong = qmq("produce", "texts.a", "x", "--delay", "soon", server=broker.url)
    assert (wrong.exit_code, "'soon' is no duration" in wrong.stderr) == (2, True)
