"""qmq/cli/common/confirm.py and the commands that ask: they delete or repeat nothing without a yes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import qmq
from qmq.cli.common import confirm
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run
from tests.restore.archived import orders_archive


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("asking")) as broker:
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[qmq.SyncClient]:
    with qmq.connect_sync(broker.url) as client:
        yield client


@pytest.fixture
def group(client: qmq.SyncClient) -> str:
    """Create a group with three dead letters and one acknowledged message."""
    name = f"g-{uuid4().hex}"
    client.send_many(name, [b"0", b"1", b"2", b"3"])
    with client.subscribe(name, group=name) as consumer:
        first, *rest = consumer.pull(min_count=4, timeout=30)
        first.ack()
        for message in rest:
            message.reject("bad address")
        consumer.flush()
    return name


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command believe that it has a terminal."""
    monkeypatch.setattr(confirm, "can_ask", lambda: True)


def state(client: qmq.SyncClient, name: str) -> tuple[int, int, int] | None:
    """Return how many messages of a group are ready, in retry and dead; None if the group does not exist."""
    rows = [row for row in client.admin.groups() if row.name == name]
    return (rows[0].ready, rows[0].in_retry, rows[0].dead) if rows else None


#: What asks, the question, and what becomes of a group with nothing ready, nothing in retry and three dead letters.
ASKING: list[tuple[list[str], str, tuple[int, int, int] | None]] = [
    (["dead-letters", "delete", "G", "--all"], "delete 3 dead letters of G? [y/N]", (0, 0, 0)),
    (["dead-letters", "redrive", "G", "--all"], "redrive 3 dead letters of G? [y/N]", (0, 3, 0)),
    (
        ["groups", "delete", "G"],
        "delete group G? It has 0 consumers online, 0 ready, 0 in flight, 0 in retry, 3 dead. [y/N]",
        None,
    ),
    (
        ["groups", "seek", "G", "--to", "first"],
        "let G continue at first? It has 0 consumers online, 0 ready, 0 in flight, 0 in retry, 3 dead. [y/N]",
        (4, 0, 3),
    ),
]


def named(group: str, arguments: list[str]) -> list[str]:
    return [group if one == "G" else one for one in arguments]


@pytest.mark.parametrize(("arguments", "question", "after"), ASKING)
@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_no_changes_nothing(
    broker: BrokerProcess,
    client: qmq.SyncClient,
    group: str,
    terminal: None,
    arguments: list[str],
    question: str,
    after: object,
    answer: str,
) -> None:
    done = run(*named(group, arguments), stdin=answer.encode(), server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert question.replace("G", group) in done.stderr
    assert done.stderr.endswith("\nqmq: nothing was done\n")
    assert state(client, group) == (0, 0, 3)


@pytest.mark.parametrize(("arguments", "question", "after"), ASKING)
@pytest.mark.parametrize("says_so", [True, False])
def test_yes_does_it(
    broker: BrokerProcess,
    client: qmq.SyncClient,
    group: str,
    terminal: None,
    arguments: list[str],
    question: str,
    after: object,
    says_so: bool,
) -> None:
    call = [*named(group, arguments), *(["--yes"] if says_so else [])]
    done = run(*call, stdin=b"" if says_so else b"y\n", server=broker.url)
    assert done.exit_code == 0, done.stderr
    assert ("[y/N]" in done.stderr) is not says_so
    assert state(client, group) == after


@pytest.mark.parametrize(("arguments", "question", "after"), ASKING)
def test_where_nobody_can_be_asked_it_takes_yes(
    broker: BrokerProcess, client: qmq.SyncClient, group: str, arguments: list[str], question: str, after: object
) -> None:
    done = run(*named(group, arguments), stdin=b"y\n", server=broker.url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no terminal" in done.stderr
    assert "--yes" in done.stderr
    assert state(client, group) == (0, 0, 3)


@pytest.mark.parametrize("action", ["redrive", "delete"])
def test_a_list_of_ids_that_came_out_empty_is_not_all(
    broker: BrokerProcess, client: qmq.SyncClient, group: str, action: str
) -> None:
    for arguments in ([], ["--yes"], [""], ["0" * 32, "--all", "--yes"]):
        done = run("dead-letters", action, group, *arguments, server=broker.url)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert state(client, group) == (0, 0, 3)
    assert "or --all" in run("dead-letters", action, group, server=broker.url).stderr


@pytest.mark.parametrize("action", ["redrive", "delete"])
def test_ids_that_were_named_need_no_question_in_a_script(
    broker: BrokerProcess, client: qmq.SyncClient, group: str, action: str
) -> None:
    letters = list(client.admin.dead_letters(group))
    done = run("dead-letters", action, group, str(letters[0].id), server=broker.url)
    assert (done.exit_code, done.stdout) == (0, "1 redriven\n" if action == "redrive" else "1 deleted\n")
    assert state(client, group) == (0, int(action == "redrive"), 2)


@pytest.mark.parametrize("action", ["redrive", "delete"])
@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 3), (b"y\n", 2)])
def test_ids_that_were_named_are_asked_for_on_a_terminal(
    broker: BrokerProcess, client: qmq.SyncClient, group: str, terminal: None, action: str, answer: bytes, left: int
) -> None:
    letters = list(client.admin.dead_letters(group))
    done = run("dead-letters", action, group, str(letters[0].id), stdin=answer, server=broker.url)
    assert f"{action} 1 dead letter of {group}? [y/N]" in done.stderr
    state_now = state(client, group)
    assert state_now is not None
    assert state_now[2] == left


@pytest.mark.parametrize("action", ["redrive", "delete"])
@pytest.mark.parametrize(("wrong", "said"), [("0" * 32, "is no dead letter of group"), ("0123", "0123")])
def test_wrong_ids_are_an_error_before_the_question(
    broker: BrokerProcess, client: qmq.SyncClient, group: str, terminal: None, action: str, wrong: str, said: str
) -> None:
    letter = next(iter(client.admin.dead_letters(group)))
    done = run("dead-letters", action, group, str(letter.id), wrong, stdin=b"y\n", server=broker.url)
    assert (done.exit_code, done.stdout, "[y/N]" in done.stderr) == (2, "", False)
    assert said in done.stderr
    assert state(client, group) == (0, 0, 3)


def test_the_name_of_a_broadcast_stands_for_its_members(
    broker: BrokerProcess, client: qmq.SyncClient, terminal: None
) -> None:
    with client.subscribe("bc.a", group="bc", mode="broadcast", consumer="one"):
        client.send_many("bc.a", [b"x"] * 2)
    done = run("groups", "delete", "bc", stdin=b"n\n", server=broker.url)
    assert "It has 0 consumers online, 2 ready, 0 in flight" in done.stderr
    gone = run("groups", "delete", "nobody", stdin=b"y\n", server=broker.url)
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert gone.stderr.startswith("qmq: there is no group 'nobody'")


def test_a_restore_asks_what_it_may_send(broker: BrokerProcess, tmp_path: Path, terminal: None) -> None:
    orders_archive(tmp_path, 5)
    archive = str(tmp_path / "archive")
    call = ["restore", "--from", archive, "--prefix", "hotel.", "--since", "2020-01-31T12:00:00Z"]
    done = run(*call, stdin=b"n\n", server=broker.url)
    address = broker.url.removeprefix("qmq://")
    assert (done.exit_code, done.stdout) == (1, "")
    what = "the messages of hotel. since 2020-01-31T12:00:00.000000Z"
    assert f"send {what} of {archive} to {address} again? [y/N]" in done.stderr
    assert run("subjects", server=broker.url).stdout.count("hotel.order") == 0


def test_a_real_terminal_is_asked(broker: BrokerProcess, client: qmq.SyncClient, group: str) -> None:
    for answer, left in ((b"n\n", 3), (b"y\n", 0)):
        mine, its = pty.openpty()
        command = [
            sys.executable,
            "-c",
            "from qmq.cli.main import cli; cli()",
            "dead-letters",
            "delete",
            group,
            "--all",
        ]
        with subprocess.Popen(
            [*command, "--server", broker.url], stdin=its, stdout=subprocess.PIPE, stderr=its
        ) as asked:
            os.close(its)
            shown = b""
            while b"[y/N]" not in shown:
                shown += os.read(mine, 1_000)
            os.write(mine, answer)
            asked.wait(60)
        os.close(mine)
        assert f"delete 3 dead letters of {group}?" in shown.decode()
        assert state(client, group) == (0, 0, left)
