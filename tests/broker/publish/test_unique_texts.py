"""What is remembered of unique texts: for how long, how many, and over starts."""

from __future__ import annotations

import random

import pytest

from qmq.broker.ports.work import whole
from qmq.broker.publish import unique_texts
from qmq.broker.publish.unique_texts import UniqueTexts
from qmq.format.layout import UNIQUE_ROW

TTL_US = 1_000_000


def key(number: int) -> bytes:
    return b"%032d" % number


def row(number: int, partition: int = 0) -> bytes:
    return UNIQUE_ROW.pack(1_000 + number, 5, number, partition)


def keep(texts: UniqueTexts, numbers: range, now_us: int, partition: int = 0) -> None:
    keys, rows = list(map(key, numbers)), [row(number, partition) for number in numbers]
    texts.stage(keys, rows)
    texts.keep(keys, rows, now_us)


def known(texts: UniqueTexts, count: int) -> list[int]:
    return [number for number in range(count) if key(number) in texts.by_key]


@pytest.mark.parametrize("is_packed", [False, True])
def test_texts_outlive_starts_whose_clocks_begin_anew(is_packed: bool) -> None:
    texts = UniqueTexts(TTL_US, 100)
    for number in range(4):
        keep(texts, range(number, number + 1), 10_000_000 + number * 100_000)
    if is_packed:
        for part in texts._parts:
            part.pack()
    now_us = 10_500_000
    for started_us in (77, 3_000_000, 0):
        packed = texts.packed({}, now_us)
        texts, now_us = UniqueTexts(TTL_US, 100), started_us
        texts.restore(packed, now_us)
        assert known(texts, 4) == [0, 1, 2, 3]
        for part in texts._parts:
            assert part.since[-1] <= now_us
    keep(texts, range(4, 5), now_us)
    texts.expire(now_us + TTL_US - 1)
    assert 4 in known(texts, 5)
    texts.expire(now_us + TTL_US)
    assert known(texts, 5) == []


def test_what_is_not_claimed_is_left_out() -> None:
    texts = UniqueTexts(TTL_US, 1_000)
    for number in range(0, 60, 3):
        keep(texts, range(number, number + 3), number, partition=number % 2)
    for is_packed in (False, True):
        if is_packed:
            for part in texts._parts:
                part.pack()
        again = UniqueTexts(TTL_US, 1_000)
        again.restore(texts.packed({0: 1_030, 1: 1_045}, 60), 60)
        wanted = [n for n in range(60) if n < (30, 45)[(n - n % 3) % 2]]
        assert known(again, 60) == wanted
        again.expire(TTL_US + 100)
        assert len(again) == 0


def test_a_text_that_was_stored_again_stays_when_the_first_is_forgotten() -> None:
    texts = UniqueTexts(TTL_US, 100)
    keep(texts, range(1), 0)
    texts.stage([key(0)], [row(7)])
    texts.keep([key(0)], [row(7)], 500_000)
    texts.expire(TTL_US)
    assert texts.by_key[key(0)] == row(7)
    texts.expire(TTL_US + 500_000)
    assert len(texts) == 0


@pytest.mark.parametrize("seed", range(4))
def test_against_a_dict(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_texts, "_PART_TEXTS", 7)
    draw, texts, most = random.Random(seed), UniqueTexts(50, 40), 40
    batches, now_us, number = list[tuple[int, range]](), 0, 0
    for _ in range(400):
        what = draw.random()
        now_us += draw.randint(0, 5)
        texts.expire(now_us)
        if what < 0.6:
            numbers = range(number, number + draw.randint(0, 5))
            keep(texts, numbers, now_us)
            batches.append((now_us, numbers))
            number = numbers.stop
        elif what < 0.7:
            whole(texts.prepare())
        elif what < 0.8:
            packed = texts.packed({}, now_us)
            texts = UniqueTexts(50, most)
            texts.restore(packed, now_us)
        batches = [batch for batch in batches if batch[0] + 50 > now_us]
        while sum(len(numbers) for _, numbers in batches) > most:
            del batches[0]
        assert known(texts, number) == [one for _, numbers in batches for one in numbers]
