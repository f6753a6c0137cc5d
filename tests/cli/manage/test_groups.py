"""qmq/cli/manage against a real broker: groups, consumers and dead letters are shown and changed."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import qmq
from qmq.cli.manage import consumers, dead_letters, groups
from qmq.errors import Fenced
from qmq.net.client.admin.results import ConsumerInfo, DeadLetter, GroupInfo
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run

LONG_AGO = datetime.now(UTC) - timedelta(days=3)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("groups")) as broker:
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[qmq.SyncClient]:
    with qmq.connect_sync(broker.url, name="orders on web-1") as client:
        yield client


def lines(*arguments: str, server: BrokerProcess) -> list[dict[str, Any]]:
    shown = run(*arguments, "--json", server=server.url)
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def group_row(broker: BrokerProcess, name: str) -> dict[str, Any]:
    (row,) = [row for row in lines("groups", server=broker) if row["group"] == name]
    return row


def test_groups_and_consumers_show_where_messages_are(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send_many("shown.a", [b"%d" % number for number in range(10)])
    with client.subscribe("shown.", group="shown", consumer="shown-1") as consumer:
        first, second, third, *_ = consumer.pull(max_count=6)
        first.ack()
        second.nack(delay=3_600)
        third.reject("bad address")
        consumer.flush()
        row = group_row(broker, "shown")
        counts = {"ready": 4, "in_flight": 3, "in_retry": 1, "dead": 1, "skipped": 0, "consumers": 1}
        assert row | counts == row
        assert (row["follows"], row["mode"]) == (["shown."], "reliable")
        assert abs(datetime.now(UTC) - datetime.fromisoformat(row["oldest"])) < timedelta(minutes=10)
        (one,) = lines("consumers", "shown", server=broker)
        known = {"consumer": "shown-1", "online": True, "in_flight": 3, "epoch": 1, "program": "orders on web-1"}
        assert one | known == one
        assert datetime.fromisoformat(one["last_pull"]) >= datetime.fromisoformat(one["in_flight_since"])
        assert 0 <= one["silent"] < 600
        listed = run("groups", "list", server=broker.url).stdout.splitlines()
        assert any(line.startswith("shown\treliable\tshown.\t1\t4\ttrue\t20") for line in listed)
        assert run("consumers", "shown", server=broker.url).stdout.startswith("shown-1\ttrue\t3\t")
    (one,) = lines("consumers", "shown", server=broker)
    assert (one["online"], one["in_flight"], one["program"]) == (False, 0, "orders on web-1")


def test_a_consumer_without_a_name_shows_its_app_also_after_a_start(tmp_path: Path) -> None:
    with (
        broker_process(tmp_path / "data") as own,
        qmq.connect_sync(own.url, app="mailer") as client,
        client.subscribe("a", group="g", consumer="c"),
    ):
        (before,) = lines("consumers", "g", server=own)
        own.stop()
        own.start()
        (after,) = lines("consumers", "g", server=own)
    assert (before["program"], after["program"]) == ("mailer", "mailer")


def test_a_seek_begins_elsewhere_and_drops_what_is_held(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send_many("sought.a", [b"1", b"2", b"3"])
    with client.subscribe("sought.", group="sought", consumer="c") as consumer:
        held, handed_back, _ = consumer.pull(min_count=3)
        handed_back.nack(delay=3_600)
        done = run("groups", "seek", "sought", "--to", "first", "--yes", server=broker.url)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "sought continues at first\n", "")
        assert group_row(broker, "sought")["ready"] == 3
        held.ack()
        with pytest.raises(Fenced):
            consumer.flush()
        assert [message.body for message in consumer.pull(min_count=3)] == [b"1", b"2", b"3"]
    assert group_row(broker, "sought")["in_retry"] == 4
    for to in ("new", datetime.now(UTC).isoformat()):
        assert run("groups", "seek", "sought", "--to", to, "--clear-retries", "--yes", server=broker.url).exit_code == 0
        row = group_row(broker, "sought")
        assert (row["ready"], row["in_flight"], row["in_retry"]) == (0, 0, 0)


def test_a_deleted_group_is_gone_and_who_waits_is_told(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send("deleted.a", b"1")
    with client.subscribe("deleted.", group="deleted", consumer="c") as consumer:
        assert len(consumer.pull()) == 1
        done = run("groups", "delete", "deleted", "--yes", server=broker.url)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "deleted is deleted\n", "")
        with pytest.raises(qmq.UnknownGroup, match="'deleted' was deleted"):
            consumer.pull(timeout=60)
    assert "deleted" not in [row["group"] for row in lines("groups", server=broker)]


def test_settings_are_changed_and_shown(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with client.subscribe("set.", group="set"):
        done = run("groups", "set", "set", "max_attempts=3", "retry_delays=0.5,2", server=broker.url)
    assert done.exit_code == 0, done.stderr
    assert {"max_attempts=3", "retry_delays=500ms,2s"} <= set(done.stdout.splitlines())
    assert group_row(broker, "set")["settings"]["retry_delays"] == [0.5, 2]


@pytest.mark.parametrize("share", ["-0.1", "1.1", "nan", "inf", "much", "true", "", "0,5", "1e400"])
def test_a_share_outside_0_to_1_is_refused(share: str) -> None:
    done = run("groups", "set", "set", f"priority_share={share}", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("qmq: priority_share")
    assert "number from 0 to 1" in done.stderr
    assert (repr(share) if not share[-1:].isdigit() and share not in ("nan", "inf") else "not ") in done.stderr


def test_dead_letters_are_listed_handed_out_again_and_deleted(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send_many("dead.a", [b"%d" % number for number in range(4)])
    with client.subscribe("dead.", group="dead", consumer="c") as consumer:
        for number, message in enumerate(consumer.pull(min_count=4)):
            message.reject(f"reason {number}")
        rows = lines("dead-letters", "list", "dead", server=broker)
        assert [row["reason"] for row in rows] == [f"reason {number}" for number in range(4)]
        assert {row["subject"] for row in rows} == {"dead.a"}
        assert [letter.id for letter in client.admin.dead_letters("dead")] == [row["id"] for row in rows]
        again = run("dead-letters", "redrive", "dead", rows[2]["id"].upper(), server=broker.url)
        assert (again.exit_code, again.stdout) == (0, "1 redriven\n")
        (message,) = consumer.pull(timeout=60)
        assert (message.body, message.attempt, message.id) == (b"2", 1, rows[2]["id"])
        message.ack()
        gone = run("dead-letters", "delete", "dead", rows[0]["id"], server=broker.url)
        assert (gone.exit_code, gone.stdout) == (0, "1 deleted\n")
        every = run("dead-letters", "redrive", "dead", "--all", "--yes", server=broker.url)
        assert (every.exit_code, every.stdout) == (0, "2 redriven\n")
        assert lines("dead-letters", "list", "dead", server=broker) == []
        assert {message.body for message in consumer.pull(min_count=2, timeout=60)} == {b"1", b"3"}


def test_an_id_that_is_none_of_them_changes_nothing(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send("absent.a", b"1")
    with client.subscribe("absent.", group="absent") as consumer:
        (message,) = consumer.pull()
        message.reject("no")
    (row,) = lines("dead-letters", "list", "absent", server=broker)
    for action in ("redrive", "delete"):
        done = run("dead-letters", action, "absent", row["id"], "0" * 32, server=broker.url)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{'0' * 32} is no dead letter of group 'absent'" in done.stderr
    assert len(lines("dead-letters", "list", "absent", server=broker)) == 1


WITH_A_GROUP: list[list[str]] = [
    ["consumers"], ["groups", "delete", "--yes"], ["groups", "seek", "--to", "new", "--yes"],
    ["dead-letters", "list"], ["dead-letters", "redrive", "--all", "--yes"],
    ["dead-letters", "delete", "--all", "--yes"],
]  # fmt: skip


@pytest.mark.parametrize("command", WITH_A_GROUP, ids=" ".join)
def test_an_unknown_group_is_an_error_that_names_it(broker: BrokerProcess, command: list[str]) -> None:
    done = run(*command, "nobody", server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: there is no group 'nobody'")
    assert "qmq groups" in done.stderr


@pytest.mark.parametrize("command", WITH_A_GROUP, ids=" ".join)
def test_a_bad_name_and_no_broker_end_with_one_line(command: list[str]) -> None:
    done = run(*command, "a b", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "group" in done.stderr
    done = run(*command, "g", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: no broker")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seek", "g", "--to", "yesterday"], "--to 'yesterday'"),
        (["seek", "g", "--to", "2026-01-31T12:00:00"], "zone"),
        (["seek", "g"], "--to"),
        (["set", "g"], "KEY=VALUE"),
        (["set", "g", "max_attempts"], "KEY=VALUE"),
        (["set", "g", "max_attempts=many"], "number"),
        (["set", "g", "colour=1"], "colour"),
        (["set", "g", "foo=abc"], "a group has no setting 'foo'; there are max_attempts, max_session_expiries,"),
        (["set", "g", "max_attemps=3"], "a group has no setting 'max_attemps'; did you mean max_attempts?"),
        (["set", "g", "max_attempts=1.5"], "max_attempts: '1.5' is not a whole number"),
        (["set", "g", "ack_deadline=abc"], "ack_deadline must be a number of seconds"),
        (["set", "g", "retry_delays=1,x"], "retry_delays must be a number of seconds"),
        (["set", "g", "max_attempts=" + "9" * 30], "2^63"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_is_called_wrongly_ends_with_2(arguments: list[str], said: str) -> None:
    done = run("groups", *arguments, server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    many = 12_345_678
    infos = [
        GroupInfo("hotel-billing", "reliable", ["hotel.order."], 12, many, LONG_AGO, many, many, many, 0, {}),
        GroupInfo("solo", "broadcast", [""], 0, 0, None, 0, 0, 0, many, {}),
        GroupInfo("late", "at_most_once", ["a."], 1, 42, None, 0, 0, 0, 0, {}, ready_exact=False),
    ]
    console = Console()
    console.print(groups._table(infos, 80))
    console.print(
        consumers._table(
            [
                ConsumerInfo("billing-1", 1, True, many, LONG_AGO, LONG_AGO, 3.2, 12.5),
                ConsumerInfo(
                    "a-host-with-a-long-name-4711-1a2b3c4d",
                    1,
                    False,
                    0,
                    None,
                    None,
                    99_999,
                    0.0,
                    program="the [shop]'s worker for mails that go abroad",
                ),
            ],
            80,
        )
    )
    letters = [DeadLetter(1, "0" * 32, "hotel.order.created", 1, 16, 0, "bad address", LONG_AGO)]
    console.print(dead_letters._table([dead_letters.ShownLetter(one, None) for one in letters], 80))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for text in (
        "hotel-billing",
        "hotel.order.",
        "(everything)",
        "(broadcast)",
        "(reliable)",
        "~42",
        "12.3 M",
        "skipped",
        "3d",
        "online",
        "12.5s",
        "0" * 32,
    ):
        assert text in shown, text


def test_a_group_is_told_what_to_follow(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with client.subscribe("narrow.", group="narrow", consumer="c"):
        client.send("narrow.a", b"1")
        client.send("narrow.b", b"2")
        done = run("groups", "set", "narrow", "follows=narrow.a,narrow.c.", "max_attempts=7", server=broker.url)
        assert (done.exit_code, done.stderr) == (0, "")
        assert {"follows=narrow.a,narrow.c.", "max_attempts=7"} <= set(done.stdout.splitlines())
        row = group_row(broker, "narrow")
        assert (row["follows"], row["ready"]) == (["narrow.a", "narrow.c."], 1)
        shown = run("groups", "list", server=broker.url).stdout
        assert "narrow\treliable\tnarrow.a,narrow.c.\t1\t1\t" in shown
        assert run("groups", "set", "narrow", "follows=", server=broker.url).exit_code == 0
        assert group_row(broker, "narrow")["follows"] == [""]
        assert client.admin.set_group("narrow", follows=["narrow.b"])["follows"] == ["narrow.b"]
        for text in ("1s", ""):
            done = run("groups", "set", "narrow", f"reconnect_timeout={text}", server=broker.url)
            assert f"reconnect_timeout={text}" in done.stdout.splitlines()
        wrong = run("groups", "set", "narrow", "follows=narrow..", server=broker.url)
        assert (wrong.exit_code, "not a valid name" in wrong.stderr) == (2, True)
        assert group_row(broker, "narrow")["follows"] == ["narrow.b"]


def test_a_member_of_a_broadcast_is_named_as_groups_prints_it(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with (
        client.subscribe("told.", group="told", consumer="c1", mode="broadcast") as first,
        client.subscribe("told.", group="told", consumer="c2", mode="broadcast"),
    ):
        client.send("told.a", b"1")
        (message,) = first.pull()
        message.reject("bad address")
        first.flush()
        assert [row["group"] for row in lines("groups", server=broker) if row["dead"]][-1] == "told@c1"
        (letter,) = lines("dead-letters", "list", "told@c1", server=broker)
        assert letter["reason"] == "bad address"
        assert lines("dead-letters", "list", "told@c2", server=broker) == []
        assert [row["consumer"] for row in lines("consumers", "told@c1", server=broker)] == ["c1"]
        assert [row["consumer"] for row in lines("consumers", "told", server=broker)] == ["c1", "c2"]
        done = run("groups", "set", "told@c1", "max_attempts=7", server=broker.url)
        assert (done.exit_code, done.stderr) == (0, "")
        settings = {name: group_row(broker, name)["settings"]["max_attempts"] for name in ("told@c1", "told@c2")}
        assert settings == {"told@c1": 7, "told@c2": 16}
        assert run("groups", "seek", "told@c1", "--to", "first", "--yes", server=broker.url).exit_code == 0
        assert [message.body for message in first.pull()] == [b"1"]
        assert [info.name for info in client.admin.groups("told")] == ["told@c1", "told@c2"]
        assert [info.name for info in client.admin.groups("told@c2")] == ["told@c2"]
    assert run("groups", "delete", "told@c1", "--yes", server=broker.url).exit_code == 0
    assert [row["group"] for row in lines("groups", server=broker) if row["group"].startswith("told")] == ["told@c2"]


def test_what_is_one_members_alone_needs_its_name(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with client.subscribe("own.", group="own", consumer="c1", mode="broadcast"):
        shown = run("dead-letters", "list", "own", server=broker.url)
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert "'own' is a broadcast" in shown.stderr
        assert "such as 'own@c1'" in shown.stderr
    consumed = run("consume", "own.", "--group", "own@c1", "--broadcast", "--timeout", "0", server=broker.url)
    assert consumed.exit_code != 0
    assert "to group 'own' in broadcast mode as consumer 'c1'" in consumed.stderr
    assert "own@c1@x" not in [row["group"] for row in lines("groups", server=broker)]
    assert "not a valid name" in run("consumers", "own@", server=broker.url).stderr


LISTS: list[list[str]] = [
    ["groups"], ["dead-letters", "list", "lacking"], ["subjects", "lacking."],
]  # fmt: skip


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_a_list_that_lacks_a_broker_says_so_to_programs_too(
    broker: BrokerProcess,
    client: qmq.SyncClient,
    caplog: pytest.LogCaptureFixture,
    command: list[str],
) -> None:
    client.send("lacking.a", b"1")
    with client.subscribe("lacking.", group="lacking", consumer="lacking-1") as consumer, socket.socket() as nobody:
        consumer.pull()[0].reject("no")
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        shown = run(*command, "--json", "--timeout", "2", server=f"{broker.url},{away}")
        assert shown.exit_code == 1
        assert "lacking" in shown.stdout
        assert f"the list lacks {away}" in caplog.text
        whole = run(*command, "--json", server=broker.url)
        assert (whole.exit_code, "lacking" in whole.stdout) == (0, True)


def test_dead_letters_that_a_broker_may_have_are_not_called_none(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with client.subscribe("elsewhere.", group="elsewhere"), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = run("dead-letters", "redrive", "elsewhere", "0" * 32, "--timeout", "2", server=f"{broker.url},{away}")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"no answer from {away}, which may have {'0' * 32}" in done.stderr


def test_what_expires_in_less_than_a_microsecond_does_expire(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    with client.subscribe("tiny.", group="tiny"):
        for seconds in ("1e-7", "0.0000001"):
            done = run("groups", "set", "tiny", f"expire_after={seconds}", "retry_delays=1e-9,0", server=broker.url)
            assert {"expire_after=1us", "retry_delays=1us,0"} <= set(done.stdout.splitlines())
        done = run("groups", "set", "tiny", "expire_after=0", "ack_deadline=1.1", server=broker.url)
        assert {"expire_after=0", "ack_deadline=1.1s"} <= set(done.stdout.splitlines())


ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def test_every_time_ends_with_z(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send_many("times.a", [b"0", b"1", b"2"])
    with client.subscribe("times.", group="times", consumer="c") as consumer:
        consumer.pull(max_count=2)[0].reject("bad")
        consumer.flush()
        (row,) = lines("consumers", "times", server=broker)
        (letter,) = lines("dead-letters", "list", "times", server=broker)
        found = [group_row(broker, "times")["oldest"], row["in_flight_since"], row["last_pull"], letter["died_at"]]
        for command in (["groups"], ["consumers", "times"], ["dead-letters", "list", "times"]):
            shown = run(*command, server=broker.url).stdout
            found += re.findall(r"\d{4}-\d\d-\S+", shown)
    assert len(found) >= 8
    assert [time for time in found if not ISO.fullmatch(time)] == []


def test_a_reason_of_several_lines_stays_in_its_field(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send("lines.a", b"0")
    with client.subscribe("lines.", group="lines") as consumer:
        consumer.pull()[0].reject("a\tb\nc\x1b[31m")
        consumer.flush()
    shown = run("dead-letters", "list", "lines", server=broker.url).stdout
    assert len(shown.splitlines()) == 1
    assert "\ta\\tb\\nc\\x1b[31m\t" in shown


def test_settings_are_printed_as_they_are_given(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    """The durations of a group go in and out as texts."""
    given = ["retry_delays=1s,10s,5m", "ack_deadline=1h30m", "expire_after=7d"]
    with client.subscribe("texts.", group="texts"):
        done = run("groups", "set", "texts", *given, server=broker.url)
    assert {"retry_delays=1s,10s,5m", "ack_deadline=1h 30m", "expire_after=7d"} <= set(done.stdout.splitlines())
    (row,) = lines("groups", "set", "texts", *(line for line in done.stdout.splitlines() if "a" in line), server=broker)
    assert (row["group"], row["ack_deadline"], row["expire_after"]) == ("texts", 5_400, 604_800)
    shown = dict(line.split("\t") for line in run("groups", "show", "texts", server=broker.url).stdout.splitlines())
    assert (shown["group"], shown["mode"], shown["ack_deadline"]) == ("texts", "reliable", "5400.0")
    (row,) = lines("groups", "show", "texts", server=broker)
    assert row["settings"]["retry_delays"] == [1, 10, 300]


def test_dead_letters_are_shown_with_their_messages(broker: BrokerProcess, client: qmq.SyncClient) -> None:
    client.send("post.a", b'{"to": "nobody"}', key="k-1", tags=["vip"], properties={"content-type": "application/json"})
    client.send("post.a", b"\xff")
    with client.subscribe("post.", group="post") as consumer:
        for message in consumer.pull(min_count=2):
            message.reject("no such address")
        consumer.flush()
    listed = lines("dead-letters", "list", "post", server=broker)
    first, second = lines("dead-letters", "show", "post", "--all", server=broker)
    assert first | listed[0] == first
    assert (listed[0]["key"], listed[1]["key"]) == ("k-1", None)
    assert (first["encoding"], second["encoding"]) == ("text", "base64")
    assert (first["body"], first["key"], first["tags"]) == ('{"to": "nobody"}', "k-1", ["vip"])
    assert first["properties"] == {"content-type": "application/json"}
    assert second["body"] == "/w=="
    (one,) = lines("dead-letters", "show", "post", second["id"].upper(), server=broker)
    assert one == second
    assert len(lines("dead-letters", "list", "post", server=broker)) == 2
    for arguments, said in (
        (["0" * 32], "is no dead letter of group 'post'"),
        ([], "or --all"),
        (["0" * 32, "--all"], "or --all"),
    ):
        done = run("dead-letters", "show", "post", *arguments, server=broker.url)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr


def test_options_before_a_subcommand_hold_for_it(broker: BrokerProcess) -> None:
    away = run("groups", "--server", "qmq://127.0.0.1:1", "delete", "nobody", "--yes", server=broker.url)
    assert "127.0.0.1:1" in away.stderr
    here = run("groups", "--server", "qmq://127.0.0.1:1", "list", "--server", broker.url)
    assert here.exit_code == 0, here.stderr
