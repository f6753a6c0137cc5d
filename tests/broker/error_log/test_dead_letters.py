"""Dead letters: one for each message, and the letters with given numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qmq.broker.error_log.dead_letters import chosen, letters_of, numbers_between
from qmq.broker.error_log.error_log import unpacked
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.disk.disk import Disk
from qmq.storage.store import ItemLog
from tests.fake_disk import FakeDisk

IN_FLIGHT = InFlightRange(MessageRange(5, 100, 0, 7, 3), 4, 1)


def test_each_message_of_a_range_is_a_letter_with_its_delivery_sequence() -> None:
    letters = unpacked(letters_of(9, 40, IN_FLIGHT, "why", 77))
    assert [letter.messages for letter in letters] == [MessageRange(5, 100, 0, 7 + at, 1) for at in range(3)]
    assert [letter.delivery_sequence for letter in letters] == [40, 41, 42]
    assert {(letter.consumer, letter.attempt, letter.session_expiries, letter.reason) for letter in letters} == {
        (9, 4, 1, "why")
    }


def filled(tmp_path: Path) -> ItemLog:
    made = ItemLog(Disk(), tmp_path, b"store!", RETRY_DTYPE, [])
    for at in range(0, 300, 3):
        made.add(letters_of(1, at, IN_FLIGHT, "why", 77))
    made.take_out(10, 20)
    return made


@pytest.fixture
def dead(tmp_path: Path) -> ItemLog:
    return filled(tmp_path)


@pytest.mark.parametrize(
    ("after", "before", "most", "found"),
    [
        (0, 1 << 62, 4, [1, 2, 3, 4]),
        (8, 23, 100, [9, 20, 21, 22]),
        (9, 20, 100, []),
        (298, 1 << 62, 100, [299, 300]),
        (300, 1 << 62, 100, []),
    ],
)
def test_numbers_between_are_numbers_of_existing_letters(
    dead: ItemLog, after: int, before: int, most: int, found: list[int]
) -> None:
    assert numbers_between(dead, after, before, most) == found


@pytest.mark.parametrize("numbers", [[], [5], [15], [300], [301, 10_000], [299, 3, 12, 150, 3], range(1, 301)])
def test_chosen_letters_are_found_in_memory_and_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int]
) -> None:
    monkeypatch.setattr("qmq.storage.error_log.item_file.MEMORY_ITEMS", 140)  # two runs, and some in memory
    found = chosen(filled(tmp_path), numbers)["number"].tolist()
    assert found == sorted({number for number in numbers if number <= 300 and not 10 <= number < 20})


def test_only_blocks_with_chosen_letters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.storage.error_log.item_file.MEMORY_ITEMS", 3_000)
    disk = FakeDisk("boot-1")
    made = ItemLog(disk, tmp_path, b"store!", RETRY_DTYPE, [])
    for at in range(0, 3_000, 3):
        made.add(letters_of(1, at, IN_FLIGHT, "why", 77))
    before = disk.calls["pread"]
    assert len(chosen(made, [7, 2_990])) == 2
    assert disk.calls["pread"] - before == 4, "two blocks, and their reasons"
