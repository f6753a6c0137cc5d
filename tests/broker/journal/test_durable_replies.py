"""Answers about groups leave when their records are on disk, so they hold after a loss of power."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from qmq.broker.journal.durable_replies import SYNC_NUMBER
from qmq.broker.ports.commands import Administer, Now, ReadDone, Subscribe
from qmq.broker.ports.effects import Administered, Effect, Refused, Subscribed
from qmq.errors import SyncFailed, UnknownGroup
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven, bodies_of
from tests.broker.test_consuming import Consumer
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, SMALL, check_files

#: Of what is not on disk, each loss of power takes something else.
SEEDS = range(8)


def driven_on(disk: SimulatedDisk) -> Driven:
    """Return a broker with a few messages, all of them in a checkpoint."""
    driven = Driven(DIRECTORY, disk=disk, **SMALL)
    for body in (b"old", b"older"):
        driven.send("a.x", body)
    driven.checkpoint()
    return driven


def lose_power(driven: Driven, disk: SimulatedDisk) -> None:
    """Lose all that is not on disk, and start the broker again."""
    disk.stop(power=True)
    check_files(disk)
    driven.wanted.clear()
    driven.reads.clear()
    driven.now = Now(driven.now.monotonic_us, driven.now.wall_us + 1_000_000)
    driven.open()


def joining(driven: Driven, mode: str = "reliable", start: str | tuple[str, int] | None = "new") -> Subscribe:
    """Return the command that makes the group, as each of its consumers sends it."""
    return Subscribe(1, driven.request(), "g", ("a.",), "c", start, b"n", b"c", mode=mode)


def administer(driven: Driven, action: str, **fields: object) -> list[Effect]:
    return driven.do(Administer(1, driven.request(), action, {"group": "g", **fields}))


def group_row(driven: Driven) -> dict[str, object]:
    (answer,) = administer(driven, "groups")
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered)
    row: dict[str, object] = answer.fields["rows"][0]
    return row


@pytest.mark.parametrize("mode", ["reliable", "at_most_once", "broadcast"])
@pytest.mark.parametrize("start", ["new", "first", "time"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_group_gets_the_messages_sent_after_its_answer(mode: str, start: str, seed: int) -> None:
    disk = SimulatedDisk(seed)
    driven = driven_on(disk)
    begin = ("time", driven.now.wall_us + 500) if start == "time" else start
    (answer,) = driven.do(joining(driven, mode, begin))
    assert isinstance(answer, Subscribed)
    driven.now = Now(driven.now.monotonic_us + 1_000, driven.now.wall_us + 1_000)
    driven.send("a.x", b"new")
    driven.send("a.y", b"newer")
    lose_power(driven, disk)
    driven.send("a.z", b"after")
    (answer,) = driven.do(joining(driven, mode))
    assert isinstance(answer, Subscribed)
    got = bodies_of(driven.pull(answer.subscription))
    assert got == ([b"old", b"older"] if start == "first" else []) + [b"new", b"newer", b"after"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_follows_another_prefix_from_its_answer_on(seed: int) -> None:
    disk = SimulatedDisk(seed)
    driven = driven_on(disk)
    driven.subscribe("b.")
    driven.checkpoint()
    driven.subscribe("a.", start="new")
    driven.send("a.x", b"new")
    lose_power(driven, disk)
    assert bodies_of(driven.pull(driven.subscribe("a.", start="new"))) == [b"new"]


def set_session_expiries(driven: Driven) -> None:
    (answer,) = administer(driven, "set_group", settings={"max_session_expiries": 9})
    assert isinstance(answer, Administered)


def seek(driven: Driven) -> None:
    (answer,) = administer(driven, "seek_group", to="new")
    assert answer == Administered(1, driven.requests, {})


def delete(driven: Driven) -> None:
    (answer,) = administer(driven, "delete_group")
    assert answer == Administered(1, driven.requests, {})


def redrive(driven: Driven) -> None:
    (answer,) = administer(driven, "redrive")
    assert answer == Administered(1, driven.requests, {"messages": 1})


def retry_one_dead(driven: Driven) -> None:
    (answer,) = administer(driven, "redrive", numbers=[1])
    assert answer == Administered(1, driven.requests, {"messages": 1})


def delete_dead(driven: Driven) -> None:
    (answer,) = administer(driven, "delete_dead")
    assert answer == Administered(1, driven.requests, {"messages": 1})


def is_set(driven: Driven) -> None:
    settings = group_row(driven)["settings"]
    assert isinstance(settings, dict)
    assert settings["max_session_expiries"] == 9


def is_at_the_end(driven: Driven) -> None:
    assert group_row(driven)["ready"] == 0


def is_deleted(driven: Driven) -> None:
    with pytest.raises(UnknownGroup):
        group_row(driven)


def is_tried_again(driven: Driven) -> None:
    row = group_row(driven)
    assert (row["dead"], row["in_retry"]) == (0, 1)


def is_gone(driven: Driven) -> None:
    row = group_row(driven)
    assert (row["dead"], row["in_retry"]) == (0, 0)


@pytest.mark.parametrize(
    ("change", "is_so"),
    [
        (set_session_expiries, is_set),
        (seek, is_at_the_end),
        (delete, is_deleted),
        (redrive, is_tried_again),
        (retry_one_dead, is_tried_again),
        (delete_dead, is_gone),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_confirmed_change_survives_a_loss_of_power(
    change: Callable[[Driven], None], is_so: Callable[[Driven], None], seed: int
) -> None:
    disk = SimulatedDisk(seed)
    driven = driven_on(disk)
    consumer = Consumer(driven, "c")
    assert consumer.pull(1) == [b"old"]
    consumer.back(0, 1, Disposition.REJECT)
    driven.checkpoint()
    change(driven)
    lose_power(driven, disk)
    is_so(driven)


def test_a_start_needs_no_sync_for_records_on_disk() -> None:
    disk = SimulatedDisk(5)
    driven = driven_on(disk)
    driven.subscribe("a.")
    driven.auto_read = False
    for group in ("g", None):
        (answer,) = driven.do(Subscribe(2, driven.request(), group, ("a.",), "d", None))
        assert isinstance(answer, Subscribed)
    assert not driven.reads


def test_many_groups_share_a_sync_and_the_rest_goes_on_meanwhile() -> None:
    disk = SimulatedDisk(6)
    driven = driven_on(disk)
    driven.auto_read = False
    groups = [f"g{number}" for number in range(20)]
    commands = [Subscribe(1, driven.request(), group, ("a.",), "c", "new") for group in groups]
    assert driven.do(commands[0]) == []
    assert driven.do(*commands[1:]) == []
    second = Subscribe(2, driven.request(), "g0", ("a.",), "d", None)
    assert driven.do(second) == [], "it takes part in what may be forgotten yet"
    driven.send("a.x", b"new")
    assert [wanted.number for wanted in driven.reads] == [SYNC_NUMBER]
    assert [answer.request for answer in driven.read()] == [commands[0].request]  # type: ignore[union-attr]
    assert [wanted.number for wanted in driven.reads] == [SYNC_NUMBER]
    answers = driven.read()
    assert [answer.request for answer in answers] == [command.request for command in (*commands[1:], second)]  # type: ignore[union-attr]
    assert all(isinstance(answer, Subscribed) for answer in answers)


def test_answers_are_refused_when_the_sync_fails() -> None:
    disk = SimulatedDisk(7)
    driven = driven_on(disk)
    driven.auto_read = False
    command = joining(driven)
    assert driven.do(command) == []
    (wanted,) = driven.reads
    driven.reads.clear()
    driven.broker.handle(ReadDone(wanted.number, SyncFailed("the disk is gone")), driven.now)
    (answer,) = driven.do()
    assert isinstance(answer, Refused)
    assert (answer.request, type(answer.error)) == (command.request, SyncFailed)
    assert driven.do(joining(driven)) == [], "it is not on disk, and waits for the next sync"
    assert [wanted.number for wanted in driven.reads] == [SYNC_NUMBER]


def test_answers_wait_while_the_disk_is_full() -> None:
    disk = SimulatedDisk(8)
    driven = driven_on(disk)

    def refuse(operation: Operation) -> None:
        if operation.kind == "pwritev" and ".pulls" in str(operation):
            raise OSError(errno.ENOSPC, "no room")

    disk.before = refuse
    command = joining(driven)
    assert driven.do(command) == []
    assert driven.advance(100) == []
    disk.before = None
    (answer,) = driven.advance(100)
    assert isinstance(answer, Subscribed)
    assert answer.request == command.request
