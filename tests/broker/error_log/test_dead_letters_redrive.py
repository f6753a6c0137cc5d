"""Redriving dead letters, some in each turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.error_log import dead_letters
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered, Effect
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven
from tests.broker.test_admin import ask, counts, filled
from tests.broker.test_consuming import Consumer

DEAD = 40


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "LETTERS", 6)
    monkeypatch.setattr(dead_letters, "NAMED", 5)
    monkeypatch.setattr(dead_letters, "DELETED", 4)
    monkeypatch.setattr("qmq.storage.error_log.item_file.MEMORY_ITEMS", 16)


def buried(tmp_path: Path) -> tuple[Driven, Consumer]:
    driven = filled(tmp_path, messages=DEAD + 10)
    consumer = Consumer(driven, "one", "a.")
    while len(consumer.got) < DEAD + 10:
        consumer.pull()
    for number in range(DEAD):
        consumer.back(number, number + 1, Disposition.REJECT)
    return driven, consumer


def begin(driven: Driven, action: str = "redrive", numbers: list[int] | None = None) -> list[Effect]:
    return driven.do(Administer(99, driven.request(), action, {"group": "g", "numbers": numbers}))


def answers(said: list[Effect]) -> list[int]:
    return [int(effect.fields["messages"]) for effect in said if isinstance(effect, Administered)]


def test_a_redrive_of_all_takes_many_turns_and_is_answered_at_the_end(tmp_path: Path) -> None:
    driven, consumer = buried(tmp_path)
    ask(driven, "delete_dead", group="g", numbers=[3, 20])
    said, turns = begin(driven), 0
    while not answers(said):
        goes_on = driven.broker.tick(driven.now) == driven.now.monotonic_us
        said += driven.effects()
        assert goes_on or answers(said)
        turns += 1
    assert answers(said) == [DEAD - 2]
    assert turns >= DEAD // 6 - 1
    assert counts(driven) == (0, 10, DEAD - 2, 0)
    consumer.ack(*range(DEAD, DEAD + 10))
    consumer.got.clear()
    while consumer.pull():
        consumer.ack(*consumer.got)
    assert sorted({body for body, _ in consumer.got.values()}) == sorted(
        b"%d" % number for number in range(DEAD) if number not in (2, 19)
    )
    assert {attempt for _, attempt in consumer.got.values()} == {1}
    driven.close()


def test_messages_that_die_meanwhile_stay_dead(tmp_path: Path) -> None:
    driven, consumer = buried(tmp_path)
    said = begin(driven)
    consumer.back(DEAD, DEAD + 3, Disposition.REJECT)
    while not answers(said):
        said += driven.advance(0)
    assert answers(said) == [DEAD]
    assert counts(driven) == (0, 7, DEAD, 3)
    driven.close()


def test_two_redrives_run_one_after_another(tmp_path: Path) -> None:
    driven, _ = buried(tmp_path)
    said = begin(driven) + begin(driven)
    for _ in range(30):
        said += driven.advance(0)
    assert answers(said) == [DEAD, 0]
    driven.close()


def test_deleting_the_group_ends_a_redrive(tmp_path: Path) -> None:
    driven, _ = buried(tmp_path)
    said = begin(driven)
    driven.do(Administer(98, driven.request(), "delete_group", {"group": "g"}))
    said += driven.advance(0)
    assert answers(said) == [6]
    driven.close()


@pytest.mark.parametrize("turns", [0, 2])
def test_a_crash_in_the_middle_leaves_each_letter_in_one_place(tmp_path: Path, turns: int) -> None:
    driven, _ = buried(tmp_path)
    begin(driven)
    for _ in range(turns):
        driven.advance(0)
    driven.store.close(clean=False)
    driven.open()
    _, _, in_retry, dead = counts(driven)
    assert (in_retry, dead) == (6 * (turns + 1), DEAD - 6 * (turns + 1))
    said = begin(driven)
    while not answers(said):
        said += driven.advance(0)
    assert counts(driven)[2:] == (DEAD, 0)
    driven.close()


@pytest.mark.parametrize(("action", "a_turn"), [("redrive", 5), ("delete_dead", 4)])
def test_named_letters_are_done_some_in_each_turn(tmp_path: Path, action: str, a_turn: int) -> None:
    driven, _ = buried(tmp_path)
    meant = [39, 2, 17, 17, 1_000, *range(20, 35)]  # one does not exist
    said, turns, left = begin(driven, action, meant), 0, [counts(driven)[3]]
    while not answers(said):
        said += driven.advance(0)
        turns += 1
        left.append(counts(driven)[3])
    assert answers(said) == [18]
    assert turns >= 18 // a_turn - 1
    assert all(before - after <= a_turn for before, after in zip([DEAD, *left], left, strict=False))
    assert counts(driven)[2:] == (18 * (action == "redrive"), DEAD - 18)
    rows = ask(driven, "dead_letters", group="g")["rows"]
    assert [row["number"] for row in rows] == [number for number in range(1, DEAD + 1) if number not in meant]
    driven.close()
