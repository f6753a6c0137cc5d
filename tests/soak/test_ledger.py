"""The ledger of a soak: it passes what is as it should be, and finds each thing that is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.soak.ledger import FAILED, MAYBE_TWICE, OPEN, UNKNOWN, Ledger, Row, id_number
from tests.soak.plan import GROUPS, NAMED

MESSAGES = 4_096
COPY = NAMED["copy"]


@dataclass
class Received:
    """What the ledger looks at of a received message."""

    subject: str
    body: bytes
    key: str | None
    tags: tuple[str, ...]
    created_at_us: int = 0


def received(ledger: Ledger, number: int) -> Any:
    planned = ledger.plan.message(number)
    return Received(planned.subject, planned.body, planned.key, planned.tags)


def message_id(number: int) -> str:
    return f"{0xABCDEF:012x}0001{number:016x}"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """One of two senders, of whom the first has sent a thousand messages, and every group has handled its own."""
    made = Ledger.create(tmp_path / "ledger", 7, 2, MESSAGES)
    numbers = list(range(1_008))
    made.sent[: len(numbers)] = OPEN
    for number in numbers:
        made.acknowledged(number, message_id(number), False)
    for group in GROUPS:
        mine = np.flatnonzero(made.plan.is_for(group, np.array(numbers, np.uint64))).tolist()
        for name in group.rows:
            row = made.row(name)
            for number in mine:
                made.got(row, received(made, number), 1 << 60)
                row.handled[number] = 1
            made.confirmed(row, mine)
    return made


def copy_of(ledger: Ledger) -> Row:
    return ledger.row(COPY.rows[0])


def forget(row: Row, number: int) -> None:
    """It was never handed out."""
    row.got[number] = row.handled[number] = row.confirmed[number] = 0


def test_a_soak_without_a_fault_is_good(ledger: Ledger) -> None:
    account = ledger.check()
    assert account.is_good, str(account)
    assert account.counts["acknowledged"] == 1_008
    assert account.rows["copy"]["due"] == account.rows["copy"]["confirmed"] == 1_008
    assert 0 < account.rows["mail"]["due"] < account.rows["billing"]["due"] < 1_008


def test_another_process_sees_the_same(ledger: Ledger) -> None:
    another = Ledger(ledger.directory)
    copy_of(another).handled[5] = 0
    assert ledger.check().wrong == {"copy: lost": 1}


def test_a_lost_message_is_found_and_named(ledger: Ledger) -> None:
    forget(copy_of(ledger), 17)
    account = ledger.check()
    assert account.wrong == {"copy: lost": 1}
    assert account.named == {"copy: lost": [17]}
    assert "WRONG copy: lost: 1, messages [17]" in str(account)


def test_many_lost_messages_are_counted_and_some_named(ledger: Ledger) -> None:
    copy_of(ledger).handled[100:600] = 0
    account = ledger.check()
    assert account.wrong == {"copy: lost": 500}
    assert account.named["copy: lost"] == [100, 101, 102, 103, 104]


def test_a_dead_letter_is_no_loss_if_it_was_handed_out(ledger: Ledger) -> None:
    row = copy_of(ledger)
    row.handled[17] = row.confirmed[17] = 0
    assert ledger.bury(row, map(id_number, [message_id(17), message_id(17), message_id(999_999)])) == 1
    account = ledger.check()
    assert account.is_good, str(account)
    assert account.rows["copy"]["dead"] == 1


def test_what_died_unseen_must_have_had_an_expiry(ledger: Ledger) -> None:
    numbers = np.arange(1_008, dtype=np.uint64)
    expiring = ledger.plan.expires(numbers)
    row = copy_of(ledger)
    old, young = int(np.flatnonzero(expiring)[0]), int(np.flatnonzero(~expiring)[0])
    for number in (old, young):
        forget(row, number)
    ledger.bury(row, map(id_number, [message_id(old), message_id(young)]))
    account = ledger.check()
    assert account.named == {"copy: dead, and never handed out": [young]}
    assert account.rows["copy"]["never handed out, expired"] == 2


def test_what_was_confirmed_may_not_come_again(ledger: Ledger) -> None:
    ledger.got(copy_of(ledger), received(ledger, 3), 1 << 60)
    ledger.confirmed(copy_of(ledger), [3, 4])
    account = ledger.check()
    assert account.wrong == {"copy: confirmed, and handed out again": 1, "copy: confirmed twice": 2}


def test_what_its_receipt_calls_a_maybe_duplicate_may_come_twice(ledger: Ledger) -> None:
    ledger.sent[3] = MAYBE_TWICE
    ledger.got(copy_of(ledger), received(ledger, 3), 1 << 60)
    account = ledger.check()
    assert account.is_good, str(account)
    assert account.counts["came twice, as the receipt says"] == 1


def test_what_was_got_again_before_it_was_confirmed_is_counted(ledger: Ledger) -> None:
    row = copy_of(ledger)
    row.confirmed[3] = 0
    ledger.got(row, received(ledger, 3), 1 << 60)
    ledger.confirmed(row, [3])
    account = ledger.check()
    assert account.is_good, str(account)
    assert account.rows["copy"]["got again"] == 1


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        (OPEN, {"senders: sent and never answered": 1}),
        (FAILED, {"copy: sent in vain, and got": 1}),
        (UNKNOWN, {}),
    ],
)
def test_of_a_send_without_a_receipt_only_the_unknown_may_be_there(
    ledger: Ledger, state: int, wrong: dict[str, int]
) -> None:
    number = next(n for n in range(1_008) if ledger.plan.message(n).subject == "soak.slow")
    audit = ledger.row("audit")
    forget(audit, number)
    ledger.sent[number] = state
    assert ledger.check().wrong == wrong


def test_a_message_that_nobody_sent_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="2000"):
        ledger.got(copy_of(ledger), received(ledger, 2_000), 0)
    assert ledger.check().wrong == {"copy: never sent": 1}


def test_a_message_of_another_group_is_found(ledger: Ledger) -> None:
    number = next(n for n in range(1_008) if ledger.plan.message(n).subject == "soak.slow")
    ledger.got(ledger.row("billing"), received(ledger, number), 1 << 60)
    assert ledger.check().wrong == {"billing: not for this group": 1}


def test_a_message_that_came_otherwise_than_it_was_sent_is_found(ledger: Ledger) -> None:
    row = copy_of(ledger)
    row.confirmed[8] = 0
    message = received(ledger, 8)
    message.body += b"!"
    ledger.got(row, message, 1 << 60)
    assert ledger.check().wrong == {"copy: not what was sent": 1}


def test_a_delayed_message_that_comes_too_early_is_found(ledger: Ledger) -> None:
    number, delay = next((n, ledger.plan.message(n).delay) for n in range(1_008) if ledger.plan.message(n).delay)
    row = copy_of(ledger)
    row.confirmed[number] = 0
    ledger.got(row, received(ledger, number), int(delay * 1e6))
    assert ledger.check().is_good
    ledger.got(row, received(ledger, number), int(delay * 1e6) - 5_000)
    assert ledger.check().wrong == {"copy: delivered before it was due": 1}


def test_ids_of_messages_side_by_side_have_numbers_of_their_own() -> None:
    assert len({id_number(message_id(number)) for number in range(10_000)}) == 10_000


def test_an_hour_of_messages_takes_no_room_before_they_are_sent(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 7, 2, 10_000_000)
    ledger.sent[-1] = OPEN
    used = sum(file.stat().st_blocks * 512 for file in ledger.directory.iterdir())
    assert used < 100_000
