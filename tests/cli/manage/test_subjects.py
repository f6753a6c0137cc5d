"""qmq/cli/manage/subjects.py: the subjects of a prefix, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq import connect_sync as qmq_client
from qmq.cli.common import listing
from qmq.cli.common.formatting import iso
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("subjects")) as broker:
        lines = [json.dumps({"subject": f"many.s{number}", "body": "x"}) for number in range(2_500)]
        lines += [json.dumps({"subject": name, "body": "x"}) for name in ("b.two", "b.one", "b.two", "bb")]
        done = qmq("produce", "--json", stdin="\n".join(lines).encode(), server=broker.url)
        assert done.stdout == "2504 acknowledged\n", done.stderr
        yield broker


def test_lines_with_tabs(broker: BrokerProcess) -> None:
    shown = qmq("subjects", "b.", server=broker.url)
    at = broker.url.removeprefix("qmq://")
    lines = f"b.two\t2\t0\t2\t0\t0\t0\t0\t{at}\nb.one\t1\t0\t1\t0\t0\t0\t0\t{at}\n"
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, lines, "")
    assert qmq("subjects", "list", "b.", server=broker.url).stdout == lines
    header = "subject\tmessages\tfirst_sequence\tnext_sequence\tdelayed\thigh\tlow\tordered\tbroker\n"
    assert qmq("subjects", "--header", "b.", server=broker.url).stdout == header + lines
    assert qmq("subjects", "b.", "--header", server=broker.url).stdout == header + lines


def test_an_exact_name_is_that_subject(broker: BrokerProcess) -> None:
    assert qmq("subjects", "bb", server=broker.url).stdout.startswith("bb\t1\t0\t1\t0\t0\t0\t0\t127.")
    assert qmq("subjects", "b", server=broker.url).stdout == ""


def test_json_lists_all_over_several_pages(broker: BrokerProcess) -> None:
    shown = qmq("subjects", "--json", server=broker.url)
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rows) == 2_503
    assert rows[0].pop("broker").startswith("127.0.0.1:")
    kinds = {"high": 0, "low": 0, "ordered": 0}
    assert rows[0] == {
        "subject": "many.s0", "messages": 1, "first_sequence": 0, "next_sequence": 1, "delayed": 0, **kinds
    }  # fmt: skip
    assert len({row["subject"] for row in rows}) == 2_503


def test_what_is_delayed_is_shown_of_its_subject(broker: BrokerProcess) -> None:
    assert qmq("produce", "late.a", "--delay", "3600", stdin=b"x\ny\n", server=broker.url).exit_code == 0
    assert qmq("produce", "late.b", stdin=b"x\n", server=broker.url).exit_code == 0
    lines = qmq("subjects", "late.", server=broker.url).stdout.splitlines()
    assert [line.split("\t")[:5] for line in lines] == [["late.a", *"0002"], ["late.b", *"1010"]]


@pytest.mark.parametrize("prefix", ["..", "a b", "a" * 201, "/"])
def test_a_bad_prefix_ends_with_2(prefix: str) -> None:
    done = qmq("subjects", prefix)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "prefix" in done.stderr


def test_one_is_shown_with_the_groups_that_follow_it(broker: BrokerProcess) -> None:
    assert qmq("consume", "shown.", "--group", "reader", "--timeout", "0", server=broker.url).exit_code == 0
    assert qmq("produce", "shown.a", stdin=b"x\ny\n", server=broker.url).exit_code == 0
    (line,) = qmq("subjects", "show", "shown.a", "--json", server=broker.url).stdout.splitlines()
    row = json.loads(line)
    assert (row["subject"], row["messages"], row["next_sequence"], row["groups"]) == ("shown.a", 2, 2, ["reader"])
    assert row["first_stored_at"] <= row["last_stored_at"]
    assert row["last_stored_at"].endswith("Z")
    lines = dict(line.split("\t") for line in qmq("subjects", "show", "shown.a", server=broker.url).stdout.splitlines())
    assert (lines["subject"], lines["groups"]) == ("shown.a", "reader")
    unknown = qmq("subjects", "show", "shown.b", server=broker.url)
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "there is no subject 'shown.b'" in unknown.stderr


@pytest.fixture(scope="module")
def with_lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with messages of all lanes, each stored at a time of its own."""
    with broker_process(tmp_path_factory.mktemp("lanes")) as broker, qmq_client(broker.url) as client:
        sent: list[dict[str, Any]] = [
            {"priority": "low"}, {}, {"priority": "high"}, {"order_key": "a"}, {"order_key": "b"}, {},
            {"order_key": "a"}, {"priority": "high"},
        ]  # fmt: skip
        for number, settings in enumerate(sent):
            client.send("shop.mail", b"%d" % number, **settings)
        client.send("shop.keys", b"first", order_key="a")
        client.send("shop.keys", b"last", order_key="b")
        yield broker


def test_messages_of_all_lanes_are_counted(with_lanes: BrokerProcess) -> None:
    rows = [json.loads(line) for line in qmq("subjects", "--json", server=with_lanes.url).stdout.splitlines()]
    counted = [[row[name] for name in ("subject", "messages", "high", "low", "ordered")] for row in rows]
    assert counted == [["shop.mail", 8, 2, 1, 3], ["shop.keys", 2, 0, 0, 2]]
    assert {(row["first_sequence"], row["next_sequence"]) for row in rows} == {(None, None)}, "each lane has its own"
    with qmq_client(with_lanes.url) as client:
        found = [(one.name, one.messages, one.high, one.low, one.ordered) for one in client.subjects("shop.")]
    assert found == [tuple(row) for row in counted]


@pytest.mark.parametrize("subject", ["shop.mail", "shop.keys"])
def test_the_first_and_the_last_of_a_subject_may_be_of_any_lane(with_lanes: BrokerProcess, subject: str) -> None:
    with qmq_client(with_lanes.url) as client:
        times = [message.stored_at for message in client.find(subject)]
    row = json.loads(qmq("subjects", "show", subject, "--json", server=with_lanes.url).stdout)
    assert [row["first_stored_at"], row["last_stored_at"]] == [iso(times[0]), iso(times[-1])]


def test_a_person_sees_how_many_messages_each_lane_has(
    with_lanes: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "is_for_people", lambda as_json: True)
    shown = qmq("subjects", "show", "shop.mail", server=with_lanes.url).stdout
    counts = "8: 2 of high priority, 2 of normal priority, 1 of low priority, 3 with an order key"
    assert counts in " ".join(shown.split())
    assert "sequence" not in shown  # each lane has its own


def test_times_are_left_out_without_the_right_to_browse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = str(tmp_path / "tokens.toml")
    monkeypatch.setenv("QMQ_TOKENS_FILE", tokens)
    rights = {
        "all": ["--admin"],
        "eats": ["--consume", "a.", "--group", "g"],
        "looks": ["--browse", "a.", "--group", "g"],
    }
    token = {name: qmq("tokens", "create", name, *given).stdout.strip() for name, given in rights.items()}
    with broker_process(tmp_path / "data", tokens_file=tokens) as broker:
        monkeypatch.setenv("QMQ_TOKEN", token["all"])
        assert qmq("produce", "a.b", "x", server=broker.url).exit_code == 0
        for name, is_shown in (("eats", False), ("looks", True)):
            monkeypatch.setenv("QMQ_TOKEN", token[name])
            shown = qmq("subjects", "show", "a.b", "--json", server=broker.url)
            row = json.loads(shown.stdout)
            assert (row["messages"], row["first_stored_at"] is None, row["last_stored_at"] is None) == (
                1, not is_shown, not is_shown
            )  # fmt: skip
            peeked = qmq("peek", "a.b", server=broker.url)
            assert (peeked.exit_code, "lacks a right: browse" in peeked.stderr) == (1 - is_shown, not is_shown)
        with monkeypatch.context() as for_people:
            for_people.setattr(listing, "is_for_people", lambda as_json: True)
            for_people.setenv("QMQ_TOKEN", token["eats"])
            text = " ".join(qmq("subjects", "show", "a.b", server=broker.url).stdout.split())
        assert "first not shown: the token lacks the right to browse it last not shown" in text


def test_no_broker() -> None:
    done = qmq("subjects", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: no broker")
