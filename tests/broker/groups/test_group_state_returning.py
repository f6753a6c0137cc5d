"""Messages that come back from a consumer: retries with attempt and due time, or dead letters with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.error_log.error_log import unpacked
from qmq.broker.journal.record_types import LeaveReason, MessageRange
from qmq.broker.ports.commands import DispositionRange
from qmq.net.protocol.types import Disposition
from tests.broker.groups.test_group_state import Driven, alone

DELAYS_US = (10, 20)


def in_flight(tmp_path: Path, count: int = 3, *, max_session_expiries: int = 3) -> Driven:
    """Messages from 100 on are in flight at consumer "c", each for the first time."""
    driven = Driven(tmp_path)
    driven.ledger.set(
        driven.ledger.settings._replace(
            max_attempts=2, retry_delays_us=DELAYS_US, max_session_expiries=max_session_expiries
        )
    )
    member = driven.ledger.join("c", b"1", transient=False, now_us=0)
    driven.ledger.pulled(member, [MessageRange(3, 100, 0, 0, count)], 1, 0, [])
    return driven


def state(driven: Driven) -> tuple[list[tuple[int, int, int, int, bool]], list[tuple[int, str]]]:
    """(message, attempt, session_expiries, due, alone) of what is to be handed out again; (message, reason) of the
    dead.
    """
    retries = driven.ledger.retries
    again = [*retries.waiting(), *(one for items in retries.scheduled() for one in unpacked(items))]
    dead = [letter for items in driven.ledger.dead.after(0) for letter in unpacked(items)]
    return (
        sorted(
            (one.messages.first + one.messages.skip, one.attempt, one.session_expiries, one.due_us, one.quarantined)
            for one in again
        ),
        sorted((one.messages.first + one.messages.skip, one.reason) for one in dead),
    )


@pytest.mark.parametrize(
    ("disposition", "delay_us", "again", "dead"),
    [
        (Disposition.NACK, None, [(101, 2, 0, 1_010, False)], []),
        (Disposition.NACK, 500, [(101, 2, 0, 1_500, False)], []),
        (Disposition.RELEASE, None, [(101, 1, 0, 1_000, False)], []),
        (Disposition.REJECT, None, [], [(101, "broke")]),
    ],
)
def test_a_disposition_decides_the_next_state_of_a_message(
    tmp_path: Path, disposition: Disposition, delay_us: int | None, again: list[object], dead: list[object]
) -> None:
    driven = in_flight(tmp_path)
    member = driven.ledger.by_name["c"]
    assert driven.ledger.hand_back(member, [DispositionRange(1, 2, disposition, delay_us, "broke")], 1_000) == []
    assert state(driven) == (again, dead)
    driven.restart()
    assert state(driven) == (again, dead)


@pytest.mark.parametrize(
    ("why", "again"),
    [
        (LeaveReason.LEFT, [(100, 1, 0, 1_000, False)]),
        (LeaveReason.EXPIRED, [(100, 1, 0, 1_000, True), (101, 1, 0, 1_000, True), (102, 1, 0, 1_000, True)]),
        (LeaveReason.CLOSED, []),
    ],
)
def test_the_reason_of_a_leave_decides_the_next_state_of_messages(
    tmp_path: Path, why: LeaveReason, again: list[object]
) -> None:
    driven = in_flight(tmp_path)
    driven.ledger.leave(driven.ledger.by_name["c"], why, 1_000)
    assert state(driven) == (again, [])


def test_a_quarantined_message_is_dead_after_max_session_expiries(tmp_path: Path) -> None:
    driven = in_flight(tmp_path, 1, max_session_expiries=2)
    ledger = driven.ledger
    ledger.leave(ledger.by_name["c"], LeaveReason.EXPIRED, 1)
    for now_us, session_expiries in ((2, 1), (3, 2)):
        member = ledger.join("c", b"%d" % now_us, transient=False, now_us=now_us)
        ledger.pulled_again(member, alone(ledger, 1), 1, now_us)
        ledger.leave(member, LeaveReason.EXPIRED, now_us)
        alive = [(100, 1, session_expiries, now_us, True)] if session_expiries < 2 else []
        assert state(driven) == (alive, [] if alive else [(100, "its consumer fell silent 2 times")])


def test_dead_letters_are_redriven_as_if_for_the_first_time(tmp_path: Path) -> None:
    driven = in_flight(tmp_path)
    ledger = driven.ledger
    ledger.hand_back(
        ledger.by_name["c"],
        [DispositionRange(number, number + 1, Disposition.REJECT, None, "no") for number in (0, 2)],
        5,
    )
    assert state(driven)[1] == [(100, "no"), (102, "no")]
    assert ledger.redrive([2], 9) == 1
    assert state(driven) == ([(102, 1, 0, 9, False)], [(100, "no")])
