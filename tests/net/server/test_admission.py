"""Which connection ends when all together hold too much."""

from __future__ import annotations

from typing import Any, cast

import pytest

from qmq.net.server.admission import REQUEST_BYTES, Admission
from qmq.net.server.connection import ClientConnection


class Peers:
    """Stand-ins for connections, and how much each has unread."""

    def __init__(self, limit: int) -> None:
        self.unread: dict[Any, int] = {}
        self.admission = Admission(limit, lambda connection: self.unread[connection])

    def frame(self, who: str, size: int, now: float) -> None:
        self.admission.frame(cast(ClientConnection, who), size, now)

    def answers(self, who: str, size: int, now: float) -> None:
        self.unread[who] = size
        self.admission.answers(cast(ClientConnection, who), size, now)

    def over(self) -> str | None:
        """Return the connection that has to end, and end it."""
        gone = self.admission.over()
        if gone is not None:
            self.admission.forget(gone)
        return cast(str | None, gone)


def test_the_limit_itself_is_allowed() -> None:
    peers = Peers(100)
    peers.frame("a", 60, 1)
    peers.answers("b", 40, 2)
    assert peers.over() is None
    peers.frame("c", 1, 3)
    assert peers.over() == "a"
    assert peers.over() is None
    assert peers.admission.total == 41


@pytest.mark.parametrize("first", ["frame", "answers"])
def test_the_connection_behind_for_longest_ends_whatever_its_size(first: str) -> None:
    peers = Peers(100)
    getattr(peers, first)("a", 1, 1)
    peers.answers("b", 20, 2)
    peers.frame("c", 20, 3)
    peers.frame("d", 90, 4)
    assert [peers.over(), peers.over(), peers.over()] == ["a", "b", "c"]
    assert peers.over() is None


def test_one_whose_bytes_move_is_behind_from_then_on_only() -> None:
    peers = Peers(100)
    peers.answers("a", 50, 1)
    peers.frame("b", 50, 2)
    peers.admission.moved(cast(ClientConnection, "a"), 3)
    peers.admission.moved(cast(ClientConnection, "none"), 3)
    assert peers.admission.total == 100
    peers.frame("c", 60, 4)
    assert [peers.over(), peers.over()] == ["b", "a"]


def test_growth_does_not_restart_the_time_behind_and_completion_does() -> None:
    peers = Peers(100)
    peers.answers("a", 10, 1)
    peers.answers("b", 10, 2)
    peers.answers("a", 50, 3)
    peers.frame("c", 60, 4)
    assert peers.over() == "a"
    peers.answers("b", 0, 5)
    peers.answers("b", 50, 6)
    assert peers.over() == "c"


def test_answers_that_were_read_meanwhile_do_not_count() -> None:
    peers = Peers(100)
    peers.answers("a", 90, 1)
    peers.frame("b", 50, 2)
    peers.unread["a"] = 30
    assert peers.over() is None
    assert peers.admission.total == 80


def test_requests_take_half_the_room_at_most_and_then_each_has_its_share() -> None:
    peers = Peers(100 * REQUEST_BYTES)
    admission = peers.admission
    admission.requests(49)
    assert admission.may_ask(49, 10)
    admission.requests(1)
    assert not admission.crowded
    assert admission.may_ask(4, 10)
    assert not admission.may_ask(5, 10)
    admission.requests(1)
    assert admission.crowded
    admission.requests(-51)
    assert admission.total == 0
    assert admission.may_ask(49, 10)
