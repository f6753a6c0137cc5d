"""examples/tally.py and screen.py: nothing missing, doubled or changed goes unseen."""

from __future__ import annotations

import pytest
from rich.console import Console

from examples.retail import InvoiceMessage
from examples.screen import Screen, Summary, summary_table
from examples.tally import GroupTally

INVOICES = [InvoiceMessage("retail.eire.order", str(number), b"{}") for number in range(3)]


@pytest.fixture
def group() -> GroupTally:
    return GroupTally("fulfilment", INVOICES, ["packer-1", "packer-2"])


def shown_table(summary: Summary) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(summary))
    return capture.get()


def test_all_of_them_once_is_right(group: GroupTally) -> None:
    for invoice in INVOICES:
        assert not group.complete
        group.take("packer-1", invoice, this_run=True)
    assert group.complete
    assert group.verdict == {"missing": 0, "doubled": 0, "changed": 0}
    assert Summary(1, 3, 0.5, [group], 3).is_right
    assert (group.consumers["packer-1"].received, group.consumers["packer-2"].received) == (3, 0)


def test_what_is_wrong_is_counted(group: GroupTally) -> None:
    group.take("packer-1", INVOICES[0], this_run=True)
    group.take("packer-2", INVOICES[0], this_run=True)  # twice
    group.take("packer-2", INVOICES[1]._replace(body=b"{ }"), this_run=True)  # other bytes
    group.take("packer-2", INVOICES[1]._replace(key="C9"), this_run=True)  # not in the file
    assert group.verdict == {"missing": 1, "doubled": 2, "changed": 1}
    assert not group.complete
    assert not Summary(1, 3, 0.5, [group], 3).is_right


def test_what_earlier_runs_left_counts_for_nothing_else(group: GroupTally) -> None:
    for invoice in INVOICES:
        group.take("packer-1", invoice, this_run=False)
    assert (group.left_over, group.missing, group.doubled) == (3, 3, 0)
    assert "left by earlier runs" in shown_table(Summary(2, 3, 0.5, [group], 6))


def test_the_table_shows_who_received_what(group: GroupTally) -> None:
    for invoice, packer in zip(INVOICES, ["packer-1", "packer-2", "packer-1"], strict=True):
        group.take(packer, invoice, this_run=True)
    shown = shown_table(Summary(2, 3, 0.5, [group], 6))
    for words in (
        ["Run 2"],
        ["sent", "3", "6"],
        ["fulfilment", "3", "0 "],
        ["packer-1", "2", "67%"],
        ["packer-2", "1", "33%"],
    ):
        assert any(all(word in line for word in words) for line in shown.splitlines()), words
    assert "stored, 2 runs" in shown


def test_without_a_terminal_progress_is_lines(group: GroupTally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.screen.PLAIN_EVERY", 0)
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture, Screen(console, 3, [group]) as screen:
        group.take("packer-1", INVOICES[0], this_run=True)
        screen.acknowledged = 2
        screen.refresh()
    assert capture.get() == "acknowledged 2 of 3; received: fulfilment 1 of 3\n"


def test_on_a_terminal_progress_is_bars(group: GroupTally) -> None:
    console = Console(width=100, force_terminal=True)
    with console.capture() as capture, Screen(console, 3, [group]) as screen:
        group.take("packer-1", INVOICES[0], this_run=True)
        screen.refresh()
    assert all(name in capture.get() for name in ("acknowledged", "fulfilment", "packer-1", "packer-2", "1/3"))
