"""The state of a group against one record for each message, restarted from its checkpoint and its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.broker.error_log.dead_letters import numbers_between
from qmq.broker.error_log.error_log import LOADED_ITEMS, MOST_TAKEN, TakenRetry, unpacked
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.journal.record_bytes import unpack
from qmq.broker.journal.record_types import InFlightRange, LeaveReason, MessageRange, RecordKind
from qmq.broker.ports.commands import DispositionRange
from qmq.errors import Fenced
from qmq.format.layout import RETRY_DTYPE
from qmq.net.protocol.types import Disposition
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.items import unpack_items
from qmq.storage.store import ItemLog, Schedule

NEVER = 1 << 60


def alone(ledger: Ledger, max_count: int) -> list[TakenRetry]:
    """Return up to *max_count* messages of the first quarantined retry."""
    return ledger.retries.choose(max_count, quarantined=True)


def take(ledger: Ledger, chosen: list[TakenRetry]) -> list[TakenRetry]:
    """Take chosen retries, as a pull does."""
    ledger.retries.take([(one.retry.number, one.in_flight) for one in chosen])
    return chosen


class Driven:
    """A ledger in a directory, with the records since its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[tuple[RecordKind, bytes]] = []
        self.ledger = self.made()
        self.kept: dict[str, Any] = self.packed()

    def made(self) -> Ledger:
        for name in ("retries", "dead"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        schedule = Schedule(Disk(), self.path / "retries", b"store!", RETRY_DTYPE, [])
        dead = ItemLog(Disk(), self.path / "dead", b"store!", RETRY_DTYPE, [])
        return Ledger(7, schedule, dead, lambda record: self.records.append(record))

    def packed(self) -> dict[str, Any]:
        found: dict[str, Any] = msgpack.unpackb(msgpack.packb(self.ledger.packed()), strict_map_key=False)
        return found

    def checkpoint(self) -> None:
        self.kept, self.records = msgpack.unpackb(self.ledger.packed_bytes(), strict_map_key=False), []

    def restart(self) -> None:
        """Start from the checkpoint and the records behind it, and check that the state is the same."""
        ledger = self.made()
        ledger.restore(self.kept)
        for kind, payload in list(self.records):
            _, (number, *fields) = unpack(kind, memoryview(payload))
            assert number == 7
            ledger.replay(kind, fields)
        self.ledger = ledger


def ids_of(messages: MessageRange) -> list[int]:
    return list(range(messages.first + messages.skip, messages.first + messages.skip + messages.total))


def in_flight_ids(member: Member) -> list[int]:
    return [
        message
        for start, end in member.in_flight.unhandled()
        for in_flight in member.in_flight.between(start, end)
        for message in ids_of(in_flight.messages)
    ]


def everything_else(ledger: Ledger) -> tuple[list[int], list[int]]:
    """Return the retries, due or not, and the dead letters."""
    ledger.retries.load(NEVER)
    waiting = []
    while ledger.retries.load(NEVER):
        taken = take(ledger, ledger.retries.choose(1_000_000))
        while ledger.retries.is_quarantined_due:
            taken += take(ledger, alone(ledger, NEVER))
        waiting += [message for one in taken for message in ids_of(one.in_flight.messages)]
    dead = [
        message
        for items in ledger.dead.after(0)
        for item in items.tolist()
        for message in range(item[4] + item[5], item[4] + item[5] + item[6])
    ]
    return waiting, dead


def alone_until_dead(driven: Driven, poison: int) -> tuple[int, list[int], list[int]]:
    """Hand out retries, quarantined ones alone; a consumer that gets *poison* falls silent, the others ack."""
    deaths, handled = 0, list[int]()
    ledger, now = driven.ledger, 1
    while ledger.retries.load(now) or deaths == 0:
        now += 1
        member = ledger.join("worker", now.to_bytes(4), transient=False, now_us=now)
        if ledger.retries.is_quarantined_due:
            pull = ledger.pulled_again(member, alone(ledger, NEVER), 1, now)
        elif ledger.retries.is_due:
            pull = ledger.pulled_again(member, ledger.retries.choose(1_000), 1, now)
        else:
            pull = ledger.pulled(member, [MessageRange(3, 0, 0, 0, 1_000)], 1, now, [])
        got = in_flight_ids(member)
        if poison in got:
            ledger.leave(member, LeaveReason.EXPIRED, now)
            deaths += 1
        else:
            ledger.ack(member, [pull.first, pull.first + pull.total], 0)
            handled += got
    return deaths, handled, everything_else(ledger)[1]


@pytest.mark.parametrize("poison", [0, 1, 499, 990, 999])
def test_one_message_that_kills_is_dead_within_six_deaths(tmp_path: Path, poison: int) -> None:
    deaths, handled, dead = alone_until_dead(Driven(tmp_path), poison)
    assert dead == [poison]
    assert sorted(handled) == [message for message in range(1_000) if message != poison]
    assert deaths == 6


def test_a_takeover_resumes_and_the_second_in_a_row_expires_the_session(tmp_path: Path) -> None:
    ledger = Driven(tmp_path).ledger
    first = ledger.join("a", b"1", transient=False, now_us=0)
    ledger.pulled(first, [MessageRange(3, 0, 0, 0, 20)], 1, 0, [])
    epoch = first.epoch
    second = ledger.join("a", b"2", transient=False, now_us=1)
    assert second.epoch == epoch + 1
    assert in_flight_ids(second) == list(range(20))
    with pytest.raises(Fenced, match="epoch 2 now, not 1"):
        ledger.member(first.number, epoch)
    ledger.ack(second, [0, 1], 0)
    assert in_flight_ids(ledger.join("a", b"3", transient=False, now_us=2)) == list(range(1, 20)), "there was progress"
    assert in_flight_ids(ledger.join("a", b"4", transient=False, now_us=3)) == list(range(1, 20))
    assert in_flight_ids(ledger.join("a", b"5", transient=False, now_us=4)) == []
    assert ledger.retries.count == 19
    assert ledger.retries.is_quarantined_due or ledger.retries.load(4)


@pytest.mark.parametrize("leaves", [False, True])
def test_takeovers_with_nothing_in_flight_or_a_leave_between_are_not_in_a_row(tmp_path: Path, leaves: bool) -> None:
    ledger = Driven(tmp_path).ledger
    for nonce in (b"1", b"2", b"3"):
        member = ledger.join("a", nonce, transient=False, now_us=0)
    ledger.pulled(member, [MessageRange(3, 0, 0, 0, 20)], 1, 0, [])
    assert in_flight_ids(ledger.join("a", b"4", transient=False, now_us=1)) == list(range(20))
    if leaves:
        ledger.leave(member, LeaveReason.LEFT, 2)
        ledger.join("a", b"5", transient=False, now_us=3)
        ledger.pulled_again(member, ledger.retries.choose(100), 1, 3)
        assert in_flight_ids(ledger.join("a", b"6", transient=False, now_us=4)) == list(range(20))
    assert in_flight_ids(ledger.join("a", b"7", transient=False, now_us=5)) == []


def test_expiry_with_several_in_flight_comes_no_nearer_to_max_session_expiries(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    ledger = driven.ledger
    ledger.set(ResolvedSettings(max_session_expiries=1))
    member = ledger.join("a", b"1", transient=False, now_us=0)
    ledger.pulled(member, [MessageRange(3, 0, 0, 0, 30)], 1, 0, [])
    ledger.leave(member, LeaveReason.EXPIRED, 1)
    member = ledger.join("a", b"2", transient=False, now_us=2)
    first = ledger.pulled_again(member, alone(ledger, 3), 1, 2).first
    ledger.ack(member, [first + 1, first + 2], 0)  # two are left, not next to each other
    ledger.leave(member, LeaveReason.EXPIRED, 3)
    assert len(ledger.dead) == 0
    while ledger.retries.count > 2:
        take(ledger, alone(ledger, 100))
    for count in (1, 2):
        member = ledger.join("a", b"3%d" % count, transient=False, now_us=4)
        ledger.pulled_again(member, alone(ledger, 100), 1, 4)
        ledger.leave(member, LeaveReason.EXPIRED, 5)
        assert len(ledger.dead) == count
    assert [letter.session_expiries for items in ledger.dead.after(0) for letter in unpacked(items)] == [1, 1]


def test_the_same_nonce_is_the_same_consumer(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    member = driven.ledger.join("a", b"1", transient=True, now_us=0)
    count = len(driven.records)
    assert driven.ledger.join("a", b"1", transient=True, now_us=1) is member
    assert len(driven.records) == count
    driven.ledger.leave(member, LeaveReason.LEFT, 2)
    assert driven.ledger.members == {}


def test_out_of_attempts_is_dead_with_the_last_reason(tmp_path: Path) -> None:
    ledger = Driven(tmp_path).ledger
    ledger.set(ResolvedSettings(max_attempts=3, retry_delays_us=(10, 20)))
    member, now, delays = ledger.join("a", b"1", transient=False, now_us=0), 0, []
    ledger.pulled(member, [MessageRange(3, 5, 0, 0, 1)], 1, 0, [])
    for attempt in (1, 2, 3):
        sequence = member.in_flight.next_sequence - 1
        ledger.hand_back(
            member, [DispositionRange(sequence, sequence + 1, Disposition.NACK, None, f"broke {attempt}")], now
        )
        due = ledger.retries.next_due_us()
        if due is None:
            break
        delays.append(due - now)
        assert not ledger.retries.load(due - 1)
        assert ledger.retries.load(due)
        now = due
        (taken,) = take(ledger, ledger.retries.choose(5))
        assert (taken.in_flight.attempt, taken.retry.reason) == (attempt + 1, f"broke {attempt}")
        ledger.pulled_again(member, [taken], 1, now)
    assert delays == [10, 20]
    (items,) = ledger.dead.after(0)
    assert [(item["first"], item["attempt"], item["reason"]) for item in items] == [(5, 3, b"broke 3")]


def test_retries_in_memory_are_bounded_and_all_are_handed_out(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    member = driven.ledger.join("a", b"1", transient=False, now_us=0)
    count = 3 * LOADED_ITEMS
    driven.ledger.pulled(member, [MessageRange(3, 0, 0, 0, count)], 1, 0, [])
    for at in range(count):
        driven.ledger.hand_back(member, [DispositionRange(at, at + 1, Disposition.NACK, 0, "")], 5)
    assert len(unpack_items(driven.ledger.packed()["retries"]["due"], RETRY_DTYPE)) == LOADED_ITEMS
    driven.restart()
    came = list[int]()
    while driven.ledger.retries.load(5):
        taken = take(driven.ledger, driven.ledger.retries.choose(100))
        came += [message for one in taken for message in ids_of(one.in_flight.messages)]
    assert sorted(came) == list(range(count))
    assert driven.ledger.retries.count == 0


def test_a_quarantined_range_is_cut_to_max_count(tmp_path: Path) -> None:
    ledger = Driven(tmp_path).ledger
    member = ledger.join("a", b"1", transient=False, now_us=0)
    ledger.pulled(member, [MessageRange(3, 0, 0, 0, 100)], 1, 0, [])
    ledger.leave(member, LeaveReason.EXPIRED, 1)
    (chosen,) = alone(ledger, 100)
    assert ids_of(chosen.in_flight.messages) == list(range(10)), "a choice changes nothing"
    (first,), (second,) = take(ledger, alone(ledger, 4)), take(ledger, alone(ledger, 100))
    assert (ids_of(first.in_flight.messages), ids_of(second.in_flight.messages)) == (list(range(4)), list(range(4, 10)))


def test_the_state_for_the_checkpoint_is_packed_anew_after_each_change(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    ledger = driven.ledger
    member = ledger.join("c", b"n", False, 0)
    packed = [ledger.packed_bytes()]

    def is_new() -> None:
        assert ledger.packed_bytes() is ledger.packed_bytes()
        assert msgpack.unpackb(ledger.packed_bytes(), strict_map_key=False) == driven.packed()
        assert ledger.packed_bytes() not in packed
        packed.append(ledger.packed_bytes())

    ledger.pulled(member, [MessageRange(3, 0, 0, 0, 100)], 1, 0, [])
    is_new()
    ledger.ack(member, [0, 10], 0)
    is_new()
    ledger.hand_back(member, [DispositionRange(20, 30, Disposition.NACK, 1_000, "")], 0)
    is_new()
    assert ledger.retries.load(1_000)
    is_new()
    ledger.pulled_again(member, ledger.retries.choose(5), 1, 1_000)
    is_new()
    ledger.hand_back(member, [DispositionRange(30, 40, Disposition.REJECT, None, "")], 1_000)
    is_new()
    ledger.set(ledger.settings._replace(max_unacked=7))
    is_new()
    ledger.leave(member, LeaveReason.EXPIRED, 2_000)
    is_new()
    ledger.redrive(numbers_between(ledger.dead, 0, 1 << 62, 100), 3_000)
    is_new()
    ledger.replay(RecordKind.JOIN, [[1, 1, 1], "d", b"m", False, 4_000, b"", 0, 0, 0])
    is_new()
    ledger.drop_in_flight(5_000, clear_retries=False)
    is_new()


def test_a_replayed_pull_begins_at_its_own_delivery_sequence(tmp_path: Path) -> None:
    """Records of pulls before it may be lost."""
    ledger = Driven(tmp_path).ledger
    member = ledger.join("c", b"n", False, 0)
    assert ledger.replay(RecordKind.PULL, [member.number, 5, 1, 1_000, [3, 0, 0, 0, 2, 0], []])
    assert member.in_flight.unhandled() == [(5, 7)]
    assert (member.pulled_us, ledger.totals.handed) == (1_000, 2)


@pytest.mark.parametrize("where", [[], [["a.", [7]]]])
def test_ranges_of_each_form_are_the_same_after_a_start(tmp_path: Path, where: list[Any]) -> None:
    log, forms = (1 << 31) + 2, list[list[MessageRange]]()
    forms += [[MessageRange(log, 90, run, skip, 4, end)] for run in (0, 1) for skip in (0, 1) for end in (90, 95)]
    forms += [[MessageRange(3, first, 0, 0, 4, 0)] for first in (0, 1)]
    forms += [[MessageRange(log, 90, 0, 0, 4, 90), MessageRange(3, 5, 0, 0, 1, 0)]]
    for at, ranges in enumerate(forms):
        driven = Driven(tmp_path / f"{at}")
        member = driven.ledger.join("c", b"n", False, 0)
        pull = driven.ledger.pulled(member, ranges, 7, 1_000, where)
        driven.restart()
        in_flight = driven.ledger.by_name["c"].in_flight
        assert list(in_flight.between(0, pull.total)) == [InFlightRange(messages, 1, 0) for messages in ranges]
        assert (in_flight.size, in_flight.pulls[0].taken_us) == (7, 1_000)


def test_one_answer_has_so_many_retries_at_most(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    ledger = driven.ledger
    member = ledger.join("c", b"n", False, 0)
    count = MOST_TAKEN + 100
    ledger.pulled(member, [MessageRange(3, 0, 0, 0, 2 * count)], 1, 0, [])
    ledger.hand_back(
        member, [DispositionRange(number, number + 1, Disposition.NACK, 0, "") for number in range(0, 2 * count, 2)], 0
    )
    took = []
    while ledger.retries.load(0, count):
        took.append(len(take(ledger, ledger.retries.choose(2 * count))))
    assert took == [MOST_TAKEN, count - MOST_TAKEN]
