"""Clients whose connections were closed: those that do not come back in time have gone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import Membership
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.ports.commands import Now
from tests.broker.groups.test_group_state import Driven

SESSION_TIMEOUT_US: Final = 30_000_000
RECONNECT_TIMEOUT_US: Final = 5_000_000
CLIENT: Final = b"client"


def at(us: int) -> Now:
    return Now(us, us)


class Joined:
    """A consumer that joined a group at time 0 over connection 1."""

    def __init__(self, tmp_path: Path) -> None:
        self.ledger = Driven(tmp_path).ledger
        self.members = Membership(SESSION_TIMEOUT_US, lambda _: None, RECONNECT_TIMEOUT_US)
        self.member = self.join(1, 0)

    def join(self, connection: int, us: int, name: str = "a", client: bytes = CLIENT) -> Member:
        member = self.ledger.join(name, b"1", transient=False, now_us=us)
        self.members.joined(self.ledger, member, client, at(us))
        self.members.connected(connection, client)
        return member

    def close(self, connection: int, us: int, *, by_client: bool = True) -> None:
        self.members.disconnected(connection, at(us), by_client=by_client)

    def expired(self, us: int) -> list[tuple[Ledger, Member]]:
        return self.members.tick(at(us))


def test_a_client_that_does_not_come_back_is_gone(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.close(1, 100)
    assert joined.members.next_deadline_us(at(100)) == 100 + RECONNECT_TIMEOUT_US
    assert joined.expired(99 + RECONNECT_TIMEOUT_US) == []
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == [(joined.ledger, joined.member)]


def test_a_client_that_comes_back_in_time_is_not(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.close(1, 100)
    joined.join(2, 99 + RECONNECT_TIMEOUT_US)
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == []
    assert joined.expired(98 + RECONNECT_TIMEOUT_US + SESSION_TIMEOUT_US) == []
    assert joined.expired(99 + RECONNECT_TIMEOUT_US + SESSION_TIMEOUT_US) == [(joined.ledger, joined.member)]


def test_a_heartbeat_by_another_connection_says_that_it_is_there(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.close(1, 100)
    joined.members.heartbeat(2, CLIENT, 0, at(200))
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == []
    joined.close(2, 300)
    assert joined.expired(299 + RECONNECT_TIMEOUT_US) == []
    assert joined.expired(300 + RECONNECT_TIMEOUT_US) == [(joined.ledger, joined.member)]


def test_one_connection_of_several_may_close(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    for _ in range(3):
        joined.members.heartbeat(2, CLIENT, 0, at(10))
    joined.close(1, 100)
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == []
    joined.close(2, 200 + RECONNECT_TIMEOUT_US)
    assert joined.expired(200 + 2 * RECONNECT_TIMEOUT_US) == [(joined.ledger, joined.member)]


def test_a_connection_that_the_broker_or_the_network_ended_counts_as_silence(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.close(1, 100, by_client=False)
    assert joined.expired(SESSION_TIMEOUT_US - 1) == []
    assert joined.expired(SESSION_TIMEOUT_US) == [(joined.ledger, joined.member)]


def test_a_restart_of_the_broker_counts_as_silence(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    restarted = Membership(SESSION_TIMEOUT_US, lambda _: None, RECONNECT_TIMEOUT_US)
    joined.member.is_timed = False  # as a start makes it
    restarted.restore([joined.ledger], at(0))
    restarted.disconnected(1, at(1), by_client=True)
    assert restarted.tick(at(SESSION_TIMEOUT_US - 1)) == []
    assert restarted.tick(at(SESSION_TIMEOUT_US)) == [(joined.ledger, joined.member)]


def test_a_group_may_set_its_own_time(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.ledger.set(ResolvedSettings(reconnect_timeout_us=0))
    joined.close(1, 100)
    assert joined.expired(100) == [(joined.ledger, joined.member)]


def test_the_session_timeout_bounds_the_time_of_a_group(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.ledger.set(ResolvedSettings(reconnect_timeout_us=10 * SESSION_TIMEOUT_US))
    joined.close(1, 100)
    assert joined.expired(SESSION_TIMEOUT_US) == [(joined.ledger, joined.member)]
    assert joined.expired(11 * SESSION_TIMEOUT_US) == []


def test_all_consumers_of_the_client_go_and_no_others(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    second, other = joined.join(1, 0, "b"), joined.join(3, 0, "c", b"other")
    joined.close(1, 100)
    gone = [member for _, member in joined.expired(100 + RECONNECT_TIMEOUT_US)]
    assert gone == [joined.member, second]
    assert other.is_there


def test_a_consumer_taken_over_by_another_process_stays(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    again = joined.ledger.join("a", b"2", transient=False, now_us=50)
    joined.members.joined(joined.ledger, again, b"other", at(50))
    joined.members.connected(2, b"other")
    joined.close(1, 100)
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == []


def test_a_client_that_comes_and_goes_leaves_no_state_behind(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    for us in range(1, 100):
        joined.close(us, us)
        joined.join(us + 1, us)
    assert len(joined.members._returns) == 1
    assert joined.expired(100 + RECONNECT_TIMEOUT_US) == []
    assert joined.members._returns == []
    joined.close(100, 101 + RECONNECT_TIMEOUT_US)
    assert joined.members._connections._counts == {}
