"""qmq/broker/groups/cursors.py: the cursors of few subjects and of many, with low and high numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from qmq.broker.groups.cursors import Cursors


def drawn_numbers(chance: random.Random, count: int) -> list[int]:
    """Return subject numbers, low ones and high ones."""
    return [chance.choice((chance.randrange(50), chance.randrange(900_000, 900_100))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_that_were_set(seed: int) -> None:
    chance, cursors, known = random.Random(seed), Cursors(), dict[int, int]()
    most = chance.choice((3, 40, 200))
    for _ in range(60):
        numbers = drawn_numbers(chance, chance.randrange(1, most))
        values = [chance.randrange(1, 1 << 40) for _ in numbers]
        kind = chance.randrange(5)
        if kind == 0:
            cursors.set(numbers[0], values[0])
            known[numbers[0]] = values[0]
        elif kind == 1:
            cursors.put(np.array(numbers, np.uint32), np.array(values, np.uint64))
            known.update(zip(numbers, values, strict=True))
        elif kind == 2:
            cursors.raise_to(np.array(numbers, np.uint32), np.array(values, np.uint64))
            for number, value in zip(numbers, values, strict=True):
                known[number] = max(known.get(number, 0), value)
        elif kind == 3 and chance.random() < 0.3:
            forgotten = [number for number in numbers if number in known]
            assert cursors.forget(np.array(sorted(set(numbers)), np.int64)) is bool(forgotten)
            for number in forgotten:
                known.pop(number, None)
        else:
            packed = cursors.packed()
            cursors = Cursors()
            cursors.restore(*packed, np.zeros(1_000_000, np.bool_))
        asked = [*numbers, *drawn_numbers(chance, 3)]
        assert [cursors.get(number) for number in asked] == [known.get(number, 0) for number in asked]
        assert cursors.of(np.array(asked, np.uint32)).tolist() == [known.get(number, 0) for number in asked]
        found, sequences = cursors.items()
        assert list(zip(found.tolist(), sequences.tolist(), strict=True)) == sorted(known.items())


def test_a_high_number_takes_little_memory() -> None:
    cursors = Cursors()
    for number in (3, 900_000, 5_000_000):
        cursors.set(number, 7)
    assert len(cursors.column) < 1_000
    assert cursors.forget(np.arange(4_000_000, 6_000_000)) is True
    assert len(cursors.column) < 1_000
    assert cursors.items()[0].tolist() == [3, 900_000]


def test_a_low_and_a_high_number_that_go_on_take_little_memory() -> None:
    cursors = Cursors()
    for sequence in range(1, 100):
        for number in (3, 900_000):
            cursors.set(number, sequence)
            cursors.put(np.array([number, number]), np.array([0, sequence], np.uint64))
            cursors.raise_to(np.array([3, 900_000]), np.array([sequence, sequence], np.uint64))
    numbers = np.arange(60) * 20_000 + 5
    for sequence in range(1, 5):
        cursors.put(numbers, np.full(60, sequence, np.uint64))
    assert len(cursors.column) < 1_000
    assert (cursors.get(3), cursors.get(900_000), cursors.get(5)) == (99, 99, 4)


def test_what_is_forgotten_writes_no_zeros_elsewhere() -> None:
    """A zero that is written where none is needed takes the memory of a page."""
    cursors = Cursors()
    cursors.put(np.arange(0, 900_000, 9_000), np.ones(100, np.uint64))
    written = list[int]()

    class Watched(np.ndarray[Any, np.dtype[np.uint64]]):
        def __setitem__(self, at: Any, value: Any) -> None:
            written.append(len(at))
            super().__setitem__(at, value)

    cursors.column = cursors.column.view(Watched)
    assert cursors.forget(np.arange(900_000))
    assert written == [100]
    assert cursors.items()[0].tolist() == []


def test_a_restore_leaves_out_forgotten_subjects() -> None:
    cursors, restored, forgotten = Cursors(), Cursors(), np.zeros(100, np.bool_)
    for number in (1, 2, 70):
        cursors.set(number, number)
    forgotten[2] = True
    restored.restore(*cursors.packed(), forgotten)
    assert restored.items()[0].tolist() == [1, 70]
