"""Sessions of consumers and due times of groups, however often consumers come and go."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.membership import MOST_LOOKS, Membership
from qmq.broker.journal.record_types import LeaveReason, MessageRange
from qmq.broker.ports.commands import DispositionRange, Now
from qmq.net.protocol.types import Disposition
from tests.broker.groups.test_group_state import Driven

SESSION_TIMEOUT_US = 30_000_000


def at(us: int) -> Now:
    return Now(us, us)


class Woken:
    """Return the members of one group, and a list that grows each time it is woken."""

    def __init__(self, tmp_path: Path) -> None:
        self.ledger = Driven(tmp_path).ledger
        self.members = Membership(SESSION_TIMEOUT_US, self.wake)
        self.times = 0

    def wake(self, ledger: Ledger) -> None:
        self.times += 1


def test_a_consumer_that_comes_and_goes_leaves_no_state_behind(tmp_path: Path) -> None:
    woken = Woken(tmp_path)
    for us in range(100):
        member = woken.ledger.join("a", b"1", transient=True, now_us=us)
        woken.members.joined(woken.ledger, member, b"client %d" % us, at(us))
    assert len(woken.members._session_deadlines) == 1
    assert list(woken.members._clients) == [b"client 99"]
    woken.ledger.leave(member, LeaveReason.LEFT, 100)
    woken.members.left(woken.ledger, member)
    assert woken.members._clients == {}
    assert woken.members.tick(at(SESSION_TIMEOUT_US + 100)) == []
    assert woken.members._session_deadlines == []


def test_a_consumer_that_came_back_expires_when_it_falls_silent(tmp_path: Path) -> None:
    woken = Woken(tmp_path)
    member = woken.ledger.join("a", b"1", transient=False, now_us=0)
    woken.members.joined(woken.ledger, member, b"c", at(0))
    woken.ledger.leave(member, LeaveReason.LEFT, 1)
    woken.members.left(woken.ledger, member)
    again = woken.ledger.join("a", b"2", transient=False, now_us=2)
    woken.members.joined(woken.ledger, again, b"c", at(2))
    assert woken.members.tick(at(SESSION_TIMEOUT_US + 1)) == []
    woken.members.heartbeat(1, b"c", 0, at(SESSION_TIMEOUT_US + 1))
    assert woken.members.tick(at(2 * SESSION_TIMEOUT_US)) == []
    assert woken.members.tick(at(2 * SESSION_TIMEOUT_US + 1)) == [(woken.ledger, again)]
    third = woken.ledger.join("a", b"3", transient=False, now_us=3 * SESSION_TIMEOUT_US)
    woken.members.joined(woken.ledger, third, b"c", at(3 * SESSION_TIMEOUT_US))
    assert woken.members.tick(at(4 * SESSION_TIMEOUT_US)) == [(woken.ledger, third)]


def test_a_group_is_checked_once_when_its_first_retry_is_due(tmp_path: Path) -> None:
    woken = Woken(tmp_path)
    member = woken.ledger.join("a", b"1", transient=False, now_us=0)
    woken.members.joined(woken.ledger, member, b"c", at(0))
    woken.ledger.pulled(member, [MessageRange(3, 0, 0, 0, 100)], 1, 0, [])
    for number in range(100):
        woken.ledger.hand_back(member, [DispositionRange(number, number + 1, Disposition.NACK, 1_000 - number, "")], 0)
        woken.members.look(woken.ledger)
    assert len(woken.members._due) == 100
    for _ in range(100):
        woken.members.look(woken.ledger)
    assert len(woken.members._due) == 100
    woken.times = 0
    woken.members.tick(at(900))
    assert woken.times == 0
    woken.members.tick(at(901))
    assert woken.times == 1
    assert woken.members.next_deadline_us(at(901)) == 902


def test_after_a_takeover_only_the_new_process_keeps_the_consumer_alive(tmp_path: Path) -> None:
    woken = Woken(tmp_path)
    for us, (nonce, client) in enumerate(((b"1", b"old"), (b"2", b"new"))):
        member = woken.ledger.join("a", nonce, transient=False, now_us=us, client=client)
        woken.members.joined(woken.ledger, member, client, at(us))
    woken.members.heartbeat(1, b"old", 0, at(SESSION_TIMEOUT_US))
    assert woken.members.tick(at(SESSION_TIMEOUT_US + 1)) == [(woken.ledger, member)]
    assert woken.members._clients == woken.members._client_of == {}


def test_one_turn_checks_only_some_of_many_groups(tmp_path: Path) -> None:
    groups = 3 * MOST_LOOKS + 1
    woken = list[Ledger]()
    members = Membership(SESSION_TIMEOUT_US, woken.append)
    for number in range(groups):
        (tmp_path / str(number)).mkdir()
        ledger = Driven(tmp_path / str(number)).ledger
        ledger.number = number
        member = ledger.join("a", b"1", transient=False, now_us=0)
        ledger.pulled(member, [MessageRange(0, 0, 0, 0, 1)], 1, 0, [])
        ledger.hand_back(member, [DispositionRange(0, 1, Disposition.NACK, 1_000, "broke")], 0)
        members.look(ledger)
    woken.clear()
    turns = 0
    while members.next_deadline_us(at(1_000)) == 1_000:
        before = len(woken)
        members.tick(at(1_000))
        turns += 1
        assert 0 < len(woken) - before <= MOST_LOOKS
    assert turns == 4
    assert sorted(ledger.number for ledger in woken) == list(range(groups))
    assert all(ledger.retries.is_due for ledger in woken)
