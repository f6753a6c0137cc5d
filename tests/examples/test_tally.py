"""examples/tally.py and screen.py: missing, doubled and changed messages are found."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from rich.console import Console

from examples.packer import digest
from examples.retail import InvoiceMessage
from examples.screen import Screen, Summary, account, summary_table
from examples.tally import GroupTally
from qmq import GroupInfo

INVOICES = [InvoiceMessage("retail.eire.order", str(number), b"{}") for number in range(3)]


@pytest.fixture
def group() -> GroupTally:
    return GroupTally("fulfilment", INVOICES, ["packer-1", "packer-2"])


def nothing_left(**counts: int) -> GroupInfo:
    none: dict[str, Any] = dict.fromkeys((field.name for field in fields(GroupInfo)), 0)
    named = {"name": "fulfilment", "follows": ["retail."], "settings": {}}
    return GroupInfo(**(none | named | counts))


def summary(group: GroupTally, run: int = 1, stored: int = 3, **counts: int) -> Summary:
    return Summary(run, 3, 0.5, [group], stored, [nothing_left(**counts)])


def handles(group: GroupTally, consumer: str, invoice: InvoiceMessage, attempt: int = 1, this_run: bool = True) -> None:
    group.hear(consumer, "began", [invoice.key])
    group.hear(consumer, "handled", [invoice.subject, invoice.key, digest(invoice.body), attempt, this_run])


def shown_table(summary: Summary) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(summary_table(summary))
    return capture.get()


def test_all_of_them_once_is_right(group: GroupTally) -> None:
    for invoice in INVOICES:
        assert not group.complete
        handles(group, "packer-1", invoice)
    assert group.complete
    assert group.verdict == {"missing": 0, "doubled": 0, "changed": 0}
    assert summary(group).is_right
    assert (group.consumers["packer-1"].handled, group.consumers["packer-2"].handled) == (3, 0)


def test_what_the_broker_still_has_is_not_right(group: GroupTally) -> None:
    for invoice in INVOICES:
        handles(group, "packer-1", invoice)
    for where in ("ready", "in_flight", "in_retry", "dead"):
        assert not summary(group, **{where: 1}).is_right


def test_what_is_wrong_is_counted(group: GroupTally) -> None:
    handles(group, "packer-1", INVOICES[0])
    group.hear("packer-1", "confirmed", [[INVOICES[0].key]])
    handles(group, "packer-2", INVOICES[0])  # though the acknowledgement is confirmed
    handles(group, "packer-2", INVOICES[1]._replace(body=b"{ }"))  # other bytes
    handles(group, "packer-2", INVOICES[1]._replace(key="C9"))  # not in the file
    assert group.verdict == {"missing": 1, "doubled": 2, "changed": 1}
    assert not group.complete
    assert not summary(group).is_right


def test_what_comes_again_before_it_was_confirmed_is_no_fault(group: GroupTally) -> None:
    handles(group, "packer-1", INVOICES[0])
    for invoice in INVOICES:
        handles(group, "packer-2", invoice)
    assert (group.handled, group.again, group.doubled) == (3, 1, 0)
    assert summary(group).is_right
    assert "4 attempts = 3 handled (3 at attempt 1) + 1 again, as a kill" in account(group, nothing_left())


def test_the_attempts_add_up(group: GroupTally) -> None:
    group.hear("packer-1", "began", [INVOICES[0].key])  # and was killed at it
    group.hear("packer-2", "began", [INVOICES[1].key])
    group.hear("packer-2", "failed", [INVOICES[1].key])
    handles(group, "packer-2", INVOICES[0])
    handles(group, "packer-2", INVOICES[1], attempt=2)
    handles(group, "packer-2", INVOICES[2])
    told = account(group, nothing_left())
    assert "5 attempts = 3 handled (2 at attempt 1, 1 at attempt 2) + 1 failed + 1 cut short." in told
    assert "0 ready, 0 in flight, 0 in retry, 0 dead" in told


def test_what_earlier_runs_left_counts_for_nothing_else(group: GroupTally) -> None:
    for invoice in INVOICES:
        handles(group, "packer-1", invoice, this_run=False)
    assert (group.left_over, group.missing, group.doubled) == (3, 3, 0)
    assert "of earlier runs" in shown_table(summary(group, run=2, stored=6))


def test_the_table_shows_who_handled_what(group: GroupTally) -> None:
    for invoice, packer in zip(INVOICES, ["packer-1", "packer-2", "packer-1"], strict=True):
        handles(group, packer, invoice)
    shown = shown_table(summary(group, run=2, stored=6))
    for words in (
        ["Run 2"],
        ["sent", "3", "6"],
        ["fulfilment", "3", "0 "],
        ["packer-1", "2"],
        ["packer-2", "1"],
    ):
        assert any(all(word in line for word in words) for line in shown.splitlines()), words
    assert "stored, 2 runs" in shown


def test_without_a_terminal_progress_is_lines(group: GroupTally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.screen.PLAIN_EVERY", 0)
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture, Screen(console, 3, [group]) as screen:
        handles(group, "packer-1", INVOICES[0])
        screen.acknowledged = 2
        screen.refresh()
    assert capture.get() == "acknowledged 2 of 3; handled: fulfilment 1 of 3\n"


def test_on_a_terminal_progress_is_bars(group: GroupTally) -> None:
    console = Console(width=100, force_terminal=True)
    with console.capture() as capture, Screen(console, 3, [group]) as screen:
        handles(group, "packer-1", INVOICES[0])
        screen.refresh()
    assert all(name in capture.get() for name in ("acknowledged", "fulfilment", "packer-1", "packer-2", "1/3"))
