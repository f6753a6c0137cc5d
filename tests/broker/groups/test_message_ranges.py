"""Ranges name the messages of a pull for good: they lead back to the chosen messages, whole or in part."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.delivery.select import PullSelection
from qmq.broker.groups.group import Group, GroupStart, StartRule, SubjectFilter, Subscription
from qmq.broker.groups.message_ranges import PARTITIONS, MessageParts, RunPart, WholeRuns, parts_of, ranges_of
from qmq.broker.journal.record_types import MessageRange
from qmq.storage.store import Store
from tests.broker.harness import Driven
from tests.effort import part_of

Place = tuple[int, int, int, int]  # partition, batch position, run, ordinal in the run


def filled(tmp_path: Path, seed: int, partitions: int) -> Driven:
    chance = random.Random(seed)
    driven = Driven(tmp_path, partitions=partitions)
    for _ in range(60):
        subjects = chance.sample(["a.x", "a.y", "b", "c"], chance.randrange(1, 4))
        contents = {subject: [b"m"] * chance.randrange(1, 8) for subject in subjects}
        driven.do(driven.send_command(contents, connection=chance.randrange(3)))
    if seed % 2:
        driven.checkpoint()
    return driven


def places_of(parts: MessageParts) -> list[Place]:
    found = list[Place]()
    for part in parts:
        entries = [part.entry] if isinstance(part, RunPart) else [row.item() for row in part.rows]
        for entry in entries:
            start, stop = (part.start, part.stop) if isinstance(part, RunPart) else (0, entry[4])
            found += [(part.partition, entry[1], entry[5], ordinal) for ordinal in range(start, stop)]
    return found


def followed(store: Store, prefix: str) -> SubjectFilter:
    rows = [part.consumer_log.first_row for part in store.partitions]
    return Group("g").follow(
        prefix, GroupStart(StartRule("first", 0, store.subjects.count), rows, [0] * len(store.partitions))
    )


def subscribed(*filters: SubjectFilter) -> Subscription:
    return Subscription(1, 1, "c", filters[0].group, list(filters), [one.prefix for one in filters])


def chosen(store: Store, subject_filter: SubjectFilter, max_count: int) -> MessageParts:
    selection = PullSelection(store, subscribed(subject_filter), max_count, 1 << 20, 1)
    selection.take(subject_filter)
    selection.apply()
    return selection.parts


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("prefix", ["", "a.", "a.x", "b"])
@pytest.mark.parametrize("seed", range(part_of(6)))
def test_ranges_lead_back_to_the_chosen_messages(tmp_path: Path, prefix: str, partitions: int, seed: int) -> None:
    driven, chance = filled(tmp_path, seed, partitions), random.Random(seed)
    store = driven.store
    subject_filter = followed(store, prefix)
    pulls = whole = 0
    while parts := chosen(store, subject_filter, chance.randrange(1, 40)):
        pulls += 1
        wanted = places_of(parts)
        ranges = ranges_of(store, parts, [subject_filter])
        assert sum(messages.total for messages in ranges) == len(wanted)
        assert [
            place for messages in ranges for place in places_of(parts_of(store, subject_filter.group, messages))
        ] == wanted
        whole += any(isinstance(part, WholeRuns) for part in parts)
        at = 0
        for messages in ranges:
            start = chance.randrange(messages.total)
            end = chance.randrange(start, messages.total) + 1
            assert (
                places_of(parts_of(store, subject_filter.group, messages.part(start, end)))
                == wanted[at + start : at + end]
            )
            at += messages.total
    assert pulls > 2
    driven.close()


def test_neighbours_in_the_log_are_one_range(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for _ in range(10):
        driven.do(driven.send_command({f"a.{number}": [b"m"] * 5 for number in range(20)}))
    store = driven.store
    subject_filter = followed(store, "")
    (messages,) = ranges_of(store, chosen(store, subject_filter, 10_000), [subject_filter])
    assert (messages.log, messages.run, messages.skip, messages.total) == (PARTITIONS, 0, 0, 1_000)
    subject_filter = followed(store, "a.7")
    number = subject_filter.subject(store)
    assert number is not None
    parts = chosen(store, subject_filter, 10_000)
    assert {messages.log for messages in ranges_of(store, parts, [subject_filter])} == {PARTITIONS}, (
        "its number may change"
    )
    driven.checkpoint()
    assert ranges_of(store, parts, [subject_filter]) == [MessageRange(number, 0, 0, 0, 50)]
    driven.close()


def spread(driven: Driven, batches: int, per_batch: int) -> None:
    """Send batches to subjects of two prefixes in turn, one message each."""
    for number in range(batches):
        contents = {f"{'ab'[(number + at) % 2]}.{at}": [b"m"] for at in range(per_batch)}
        driven.do(driven.send_command(contents))


def test_messages_of_a_prefix_among_others_are_one_range(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    spread(driven, 40, 50)
    store = driven.store
    subject_filter = followed(store, "b.")
    parts = chosen(store, subject_filter, 10_000)
    wanted = places_of(parts)
    assert len(wanted) == 1_000
    (messages,) = ranges_of(store, parts, [subject_filter])
    assert messages.total == 1_000
    assert places_of(parts_of(store, subject_filter.group, messages)) == wanted
    for start in range(0, 1_000, 37):
        part = messages.part(start, start + 29 if start < 970 else 1_000)
        assert places_of(parts_of(store, subject_filter.group, part)) == wanted[start : start + part.total]
    # Later messages of its subjects are not in it, nor messages of other subjects between.
    spread(driven, 3, 50)
    assert places_of(parts_of(store, subject_filter.group, messages)) == wanted
    driven.close()


def test_messages_handed_out_before_are_not_in_the_range_around_them(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    spread(driven, 40, 50)
    store = driven.store
    subject_filter = followed(store, "b.")
    number = store.subjects.number("b.7")
    assert number is not None
    subject_filter.group.cursors.set(number, 12)
    parts = chosen(store, subject_filter, 10_000)
    wanted = places_of(parts)
    assert len(wanted) == 1_000 - 12
    ranges = ranges_of(store, parts, [subject_filter])
    assert len(ranges) > 12
    assert [place for one in ranges for place in places_of(parts_of(store, subject_filter.group, one))] == wanted
    driven.close()


def test_each_of_many_subjects_is_a_range(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    spread(driven, 40, 10)
    driven.checkpoint()
    store, group = driven.store, Group("g")
    rows = [part.consumer_log.first_row for part in store.partitions]
    begin = GroupStart(StartRule("first", 0, store.subjects.count), rows, [0] * len(store.partitions))
    filters = [group.follow(f"a.{number}", begin) for number in range(10)]
    selection = PullSelection(store, subscribed(*filters), 10_000, 1 << 20, 1)
    for subject_filter in filters:
        selection.take(subject_filter)
    wanted = places_of(selection.parts)
    assert len(wanted) == 200
    ranges = ranges_of(store, selection.parts, filters)
    assert [messages.total for messages in ranges] == [20] * 10
    assert [place for one in ranges for place in places_of(parts_of(store, group, one))] == wanted
    driven.close()


def test_with_several_prefixes_each_has_its_range(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    spread(driven, 40, 50)
    store, group = driven.store, Group("g")
    begin = GroupStart(StartRule("first", 0, store.subjects.count), [store.partitions[0].consumer_log.first_row], [0])
    filters = [group.follow(prefix, begin) for prefix in ("b.", "a.")]
    selection = PullSelection(store, subscribed(*filters), 10_000, 1 << 20, 1)
    for subject_filter in filters:
        selection.take(subject_filter)
    wanted = places_of(selection.parts)
    ranges = ranges_of(store, selection.parts, filters)
    assert [messages.total for messages in ranges] == [1_000, 1_000]
    assert [place for one in ranges for place in places_of(parts_of(store, group, one))] == wanted
    driven.close()


def test_a_run_far_back_in_its_batch_is_found(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    spread(driven, 3, 100)
    store = driven.store
    position = int(store.partitions[0].consumer_log.rows(store.partitions[0].consumer_log.first_row, 1)["position"][0])
    far = MessageRange(PARTITIONS, position, 99, 0, 1, position)
    assert places_of(parts_of(store, Group("g"), far)) == [(0, position, 99, 0)]
    driven.close()


@pytest.mark.parametrize("number", range(4))  # directories begin at random positions, half of them far enough
def test_a_range_ends_at_its_last_batch_and_not_at_one_that_lies_close_behind(tmp_path: Path, number: int) -> None:
    driven = Driven(tmp_path)
    row_partitions = [driven.send("a", b"m").position for _ in range(8)]
    group = followed(driven.store, "").group
    for place in row_partitions:
        found = parts_of(driven.store, group, MessageRange(PARTITIONS, place, 0, 0, 2, place))  # of two one is missing
        assert [one[1] for one in places_of(found)] == [place], number
