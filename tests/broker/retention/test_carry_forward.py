"""Messages that a group refers to outlive their segment, with id, attempts, due time and reason, whatever crashes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qmq.broker.error_log.error_log import unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.retention.carry_forward import COPY_NUMBER
from qmq.format.batch import parse_header
from qmq.format.pieces import stored_runs
from qmq.format.private import origin_subject
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import HOUR_MS, SMALL, driven_in, numbers, segments, send, settle
from tests.broker.test_admin import ask, group_row
from tests.broker.test_consuming import Consumer, killed

DAY_US = 24 * HOUR_MS * 1_000
LIMITS = BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS)


class One(NamedTuple):
    """A message, and the state that the group has of it."""

    id: str
    subject: str
    body: bytes
    attempt: int
    rest: tuple[Any, ...]


def content(driven: Driven) -> tuple[dict[tuple[str, int], One], list[One], list[One]]:
    """Return what a group refers to: messages in flight by delivery sequence, retries, and dead letters."""
    group = driven.broker.groups["g"]
    ledger = group.ledger
    assert ledger is not None
    in_flight = dict[tuple[str, int], One]()
    driven.store.may_wait(True)
    for member in ledger.members.values():
        for start, end in member.in_flight.unhandled():
            for one in member.in_flight.between(start, end):
                for found in named(driven, group, one.messages):
                    in_flight[member.name, start] = One(*found, one.attempt, (one.session_expiries,))
                    start += 1
    scheduled = [
        left for items in ledger.retries.scheduled() for one in unpacked(items) for left in ledger.retries.left_of(one)
    ]
    waiting = [
        One(
            *found,
            one.attempt,
            (one.session_expiries, one.due_us, one.quarantined, one.reason, one.failed_at_us, one.consumer),
        )
        for one in [*ledger.retries.waiting(), *scheduled]
        for found in named(driven, group, one.messages)
    ]
    dead = [
        One(*found, one.attempt, (one.session_expiries, one.due_us, one.reason, one.consumer, one.delivery_sequence))
        for items in ledger.dead.after(0)
        for one in unpacked(items)
        for found in named(driven, group, one.messages)
    ]
    driven.store.may_wait(False)
    row = group_row(driven)
    assert (row["in_flight"], row["in_retry"], row["dead"]) == (len(in_flight), len(waiting), len(dead))
    return in_flight, sorted(waiting), sorted(dead)


def named(driven: Driven, group: Group, messages: MessageRange) -> list[tuple[str, str, bytes]]:
    found = list[tuple[str, str, bytes]]()
    for part in parts_of(driven.store, group, messages):
        entries = [(entry, 0, entry[4]) for entry in part.rows.tolist()] if hasattr(part, "rows") else [part[1:]]
        for entry, start, stop in entries:
            batch = driven.store.partitions[part.partition].message_log.view(entry[1], entry[10])
            run = stored_runs(batch, parse_header(batch))[entry[5]]
            found += [(str(run.id(at)), origin_subject(run.subject), run.body(at)) for at in range(start, stop)]
    assert len(found) == messages.total, messages
    return found


def drop_all(driven: Driven) -> int:
    """Drop all sealed segments; return how many messages were carried forward."""
    before = {span.base for part in driven.store.partitions for span in part.message_log.sealed}
    driven.advance(HOUR_MS)
    gone = settle(driven)
    left = {span.base for part in driven.store.partitions for span in part.message_log.sealed}
    assert not before & left
    assert not sum(one.lost for one in gone)
    return sum(one.carried for one in gone)


@pytest.mark.parametrize("follows", [("a.",), ("a.0", "a.1", "a.2"), ("a.0",), ("a.", "b.")])
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_messages_that_a_group_refers_to_do_not_change(
    tmp_path: Path, follows: tuple[str, ...], partitions: int, stop: Any
) -> None:
    driven = driven_in(tmp_path, LIMITS, partitions=partitions)
    send(driven, 36, subjects=3, size=600)
    consumer = Consumer(driven, "c", *follows)
    got = 0
    while some := len(consumer.pull(30 - got)) if got < 30 else 0:
        got += some
    consumer.ack(*range(0, got, 4))
    for number in range(1, got, 4):
        consumer.back(number, number + 1, Disposition.NACK, delay_us=DAY_US + number)
    for number in range(2, got, 8):
        consumer.back(number, number + 1, Disposition.REJECT)
    send(driven, 20, first=40, subjects=3)
    before = content(driven)
    assert all(before)
    carried = drop_all(driven)
    assert carried
    assert content(driven) == before
    stop(driven)
    assert content(driven) == before
    consumer.join()
    consumer.expected = consumer.consumer_state.ack_floor
    in_flight = [one.body for one in before[0].values()]
    again = list[bytes]()
    while len(again) < len(in_flight):
        again += consumer.pull(100)
    assert again == in_flight, "who held it gets it again, in the same order"
    send(driven, 16, first=100)
    for partition in range(partitions):
        driven.store.partitions[partition].seal()
    assert drop_all(driven) >= carried, "copies are carried on as well"
    assert content(driven) == before
    driven.do(Administer(9, driven.request(), "redrive", {"group": "g", "numbers": None}))
    redriven = list[bytes]()
    while len(redriven) < len(before[2]):
        redriven += consumer.pull(100)
    assert sorted(redriven) == sorted(one.body for one in before[2])
    consumer.ack()
    driven.advance(25 * HOUR_MS)
    late = list[bytes]()
    while len(late) < len(before[1]):
        late += [body for body in consumer.pull(100) if body in {one.body for one in before[1]}]
    assert sorted(late) == sorted(one.body for one in before[1])
    driven.close()


def test_large_batches_and_parts_of_them(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, LIMITS)
    for first in range(0, 200, 20):
        bodies = [(b"%d " % number).ljust(90, b".") for number in range(first, first + 20)]
        driven.do(driven.send_command({"a.0": bodies[:7], "a.1": bodies[7:9], "b": bodies[9:]}))
    consumer = Consumer(driven, "c", "a.")
    while len(consumer.got) < 80:
        consumer.pull(80 - len(consumer.got))
    consumer.ack(*range(5, 11), 40)
    consumer.back(11, 40, Disposition.NACK, delay_us=DAY_US)
    consumer.back(60, 75, Disposition.REJECT)
    before = content(driven)
    send(driven, 10, first=500)
    drop_all(driven)
    after = content(driven)
    assert after == before
    killed(driven)
    assert content(driven) == before
    driven.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_kill_between_any_two_steps_costs_nothing(tmp_path: Path, steps: int) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 30, subjects=2)
    consumer = Consumer(driven, "c", "a.")
    while len(consumer.got) < 24:
        consumer.pull(24 - len(consumer.got))
    consumer.ack(*range(0, 24, 3))
    for number in range(1, 24, 3):
        consumer.back(number, number + 1, Disposition.NACK, delay_us=DAY_US)
    consumer.back(2, 3, Disposition.REJECT)
    before = content(driven)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    for _ in range(steps):
        driven.advance(1)
        if steps % 2:
            driven.checkpoint()
    killed(driven)
    assert content(driven) == before
    drop_all(driven)
    assert content(driven) == before
    killed(driven)
    assert content(driven) == before
    driven.close()


def spoil(driven: Driven, entry: int) -> None:
    """Change a byte of a batch in the first segment, which is sealed."""
    partition = driven.store.partitions[0]
    position, base = partition.consumer_log.read_entry(entry)[1], partition.message_log.sealed[0].base
    with (driven.directory / "log-0" / f"{base:016x}.messages").open("r+b") as file:
        file.seek(position - base + 300)
        file.write(b"?")


def test_unreadable_messages_become_dead_letters_and_are_reported(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 20)
    consumer = Consumer(driven, "c", "a.")
    consumer.pull(6)
    consumer.back(0, 3, Disposition.NACK, delay_us=DAY_US)
    consumer.back(5, 6, Disposition.REJECT)
    driven.checkpoint()
    for number in (1, 4, 5):
        spoil(driven, number)
    driven.advance(HOUR_MS)
    gone = settle(driven)
    assert sum(one.lost for one in gone) == 4, "one to be handed out again, and then as a letter; one held; a letter"
    assert "could not be read" in str(gone[0])
    row = group_row(driven)
    assert (row["in_flight"], row["in_retry"], row["dead"]) == (2, 2, 2)
    reasons = {(letter["id"], letter["reason"]) for letter in ask(driven, "dead_letters", group="g")["rows"]}
    assert reasons == {(None, "broke"), (None, "it cannot be read any more")}
    driven.advance(25 * HOUR_MS)
    assert sorted(numbers(consumer.pull(2))) == [0, 2]
    driven.restart()
    driven.store.close(clean=True)


@pytest.mark.parametrize("change", ["delete", "seek", "ack", "redrive", "delete_dead", "nack"])
def test_changes_during_the_copy_win(tmp_path: Path, change: str) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 20)
    consumer = Consumer(driven, "c", "a.")
    consumer.pull(6)
    consumer.back(0, 2, Disposition.NACK, delay_us=DAY_US)
    consumer.back(5, 6, Disposition.REJECT)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    driven.auto_read = False
    while not any(read.number == COPY_NUMBER for read in driven.reads):
        others = [read for read in driven.reads if read.number != COPY_NUMBER]
        if others:
            driven.read()
        driven.advance(1_000)
    fields: dict[str, Any] = {"group": "g"}
    match change:
        case "ack":
            assert consumer.ack(2, 3, 4) == 0
        case "nack":
            consumer.back(2, 5, Disposition.NACK, delay_us=2 * DAY_US)
        case "seek":
            driven.broker.handle(
                Administer(9, driven.request(), "seek_group", fields | {"to": "new", "clear_retries": True}),
                driven.now,
            )
        case _:
            action = {"delete": "delete_group"}.get(change, change)
            driven.broker.handle(Administer(9, driven.request(), action, fields | {"numbers": [1]}), driven.now)
    driven.auto_read = True
    driven.read()
    if change == "delete":
        settle(driven)
        assert ask(driven, "groups", after="")["rows"] == []
        driven.close()
        return
    before = content(driven) if change != "seek" else None
    settle(driven)
    after = content(driven)
    assert before is None or after == before
    assert tuple(map(len, after)) == {
        "ack": (0, 2, 1), "nack": (0, 5, 1), "seek": (0, 0, 1), "redrive": (3, 3, 0), "delete_dead": (3, 2, 0)
    }[change]  # fmt: skip
    killed(driven)
    assert content(driven) == after
    driven.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_history(tmp_path: Path, seed: int) -> None:
    """Each message is handled once, or counted as skipped, or is where it was. The test's name has the seed to repeat
    it.
    """
    rng = random.Random(seed)
    print(f"seed {seed}")
    driven = driven_in(tmp_path, LIMITS, partitions=rng.choice([1, 1, 2]))
    consumer = Consumer(driven, "c", *rng.choice([("a.",), ("a.0", "a.1")]), max_attempts=3)
    sent = carried = 0
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1:
                count = rng.randrange(1, 9)
                send(driven, count, first=sent, subjects=2)
                sent += count
            case 2 | 3:
                consumer.pull(rng.randrange(1, 9))
            case 4:
                in_flight = [seq for (_, seq), _ in content(driven)[0].items()]
                if in_flight:
                    consumer.ack(*rng.sample(in_flight, rng.randrange(1, len(in_flight) + 1)))
            case 5:
                in_flight = [seq for (_, seq), _ in content(driven)[0].items()]
                for number in rng.sample(in_flight, len(in_flight) // 2):
                    disposition = rng.choice(
                        [Disposition.NACK, Disposition.NACK, Disposition.REJECT, Disposition.RELEASE]
                    )
                    consumer.back(number, number + 1, disposition, rng.choice([0, HOUR_MS * 1_000, DAY_US]))
            case 6:
                before = content(driven)
                driven.checkpoint()
                driven.advance(HOUR_MS)
                carried += sum(one.carried for one in settle(driven, rng.randrange(1, 12)))
                assert [sorted(one[:4] for one in part) for part in (before[0].values(), *before[1:])] == [
                    sorted(one[:4] for one in part) for part in (content(driven)[0].values(), *content(driven)[1:])
                ]
            case 7:
                rng.choice([Driven.restart, killed])(driven)
                consumer.join()
                consumer.expected = consumer.consumer_state.ack_floor
    assert carried
    assert segments(driven)
    driven.close()


def test_retention_by_size_does_not_carry_the_same_messages_again_and_again(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_bytes=1_000, session_timeout_ms=100 * HOUR_MS))
    send(driven, 40)
    consumer = Consumer(driven, "c", "a.")
    while len(consumer.got) < 40:
        consumer.pull(40 - len(consumer.got))
    driven.checkpoint()
    gone = settle(driven)
    assert len(gone) == 1, "it was for nothing: all of it had to be carried"
    assert (gone[0].carried, gone[0].messages) == (7, 7)
    consumer.ack()
    driven.advance(600_000)
    assert len(settle(driven)) >= 3
    assert not driven.store.partitions[0].message_log.sealed
    driven.close()


def test_copies_replace_originals_only_when_they_are_on_disk(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 20)
    consumer = Consumer(driven, "c", "a.")
    consumer.pull(6)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    driven.auto_sync = False
    assert settle(driven, 5) == []
    assert driven.wanted, "the copies wait for it"
    driven.auto_sync = True
    driven.sync()
    assert settle(driven)
    assert len(content(driven)[0]) == 6
    driven.close()


def test_a_message_over_a_lowered_limit_is_carried_forward(tmp_path: Path) -> None:
    higher = LIMITS._replace(max_message_bytes=8 << 20)
    driven = driven_in(tmp_path, higher, segment_bytes=16 << 20, max_frame_bytes=8 << 20)
    driven.send("a.0", bytes(5 << 20))
    driven.limits, driven.options = LIMITS._replace(max_message_bytes=1 << 10), {**SMALL}
    driven.restart()
    consumer = Consumer(driven, "c")
    assert consumer.pull(1) == [bytes(5 << 20)]
    consumer.back(0, 1, Disposition.NACK, delay_us=DAY_US)
    send(driven, 20)
    assert drop_all(driven) == 1
    driven.advance(25 * HOUR_MS)
    assert bytes(5 << 20) in [body for _ in range(21) for body in consumer.pull(1)]
    driven.close()
