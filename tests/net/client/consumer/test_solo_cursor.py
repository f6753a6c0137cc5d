"""Where a solo consumer resumes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.format.pieces import piece_of_run, read_answer
from qmq.format.run import Run
from qmq.net.client.consumer.message import each_message
from qmq.net.client.consumer.solo_cursor import SoloCursor, without_covered
from tests.net.scripted import START_US, stored_batch


def log_of(sizes: Sequence[dict[str, int]]) -> list[bytes]:
    """Return batches with these numbers of messages per subject, a microsecond apart."""
    log, ends, position = [], dict[str, int](), 1_000
    for number, batch in enumerate(sizes):
        contents = {
            subject: [b"%s %d" % (subject.encode(), ends.get(subject, 0) + i) for i in range(count)]
            for subject, count in batch.items()
        }
        log.append(stored_batch(contents, position=position, stored_at_us=START_US + number))
        for subject, count in batch.items():
            ends[subject] = ends.get(subject, 0) + count
        position += len(log[-1])
    return log


def bodies(runs: Sequence[Run]) -> list[bytes]:
    return [message.body for message in each_message(runs)]


def read(answer: bytes) -> list[Run]:
    return read_answer(memoryview(answer))[0]


def test_names_that_others_cover_are_left_out() -> None:
    assert without_covered(["a.", "a.b.", "a.b", "a", "b", "a."]) == ["a.", "a", "b"]
    assert without_covered(["a.b", "", "c."]) == [""]
    assert without_covered(["ab.", "a."]) == ["ab.", "a."]


def test_it_begins_where_the_subscription_begins_until_messages_came() -> None:
    progress = SoloCursor([""], None)
    assert progress.floor_us is None
    progress.begin_at(77)
    assert progress.floor_us == 77
    progress.take(read(log_of([{"a": 1}])[0]))
    assert progress.floor_us == START_US


def test_received_messages_are_dropped_when_they_come_again() -> None:
    log = log_of([{"a": 2}, {"a": 1, "b": 3}, {"b": 2}])
    progress = SoloCursor([""], None)
    first = progress.take([*read(log[0]), *read(log[1])])
    assert progress.floor_us == START_US + 1
    progress.resume(same_store=True)
    again = progress.take([*read(log[1]), *read(log[2])])
    assert bodies([*first, *again]) == [b"a 0", b"a 1", b"a 2", b"b 0", b"b 1", b"b 2", b"b 3", b"b 4"]


def test_a_run_that_came_in_part_comes_on() -> None:
    (batch,) = log_of([{"a": 2, "b": 10}])
    part = piece_of_run(memoryview(batch), 1, 0, 4)[0]
    progress = SoloCursor([""], None)
    first = progress.take([*read(batch)[:1], *read(b"".join(part))])
    progress.resume(same_store=True)
    assert bodies(first) + bodies(progress.take(read(batch))) == bodies(read(batch))


def test_another_store_gives_all_from_the_last_stamp_on() -> None:
    log = log_of([{"a": 1}, {"a": 1}])
    progress = SoloCursor([""], None)
    progress.take(read(log[1]))
    progress.resume(same_store=False)
    assert progress.floor_us == START_US + 1
    assert len(progress.take(read(log[0]) + read(log[1]))) == 2


def test_prefixes_at_different_stamps_begin_at_the_earlier_one() -> None:
    log = log_of([{"a.x": 1}, {"b.x": 1}, {"a.x": 1}, {"b.x": 1}])
    progress = SoloCursor(["a.", "b."], None)
    progress.take(read(log[0]) + read(log[2]))
    assert progress.floor_us is None  # b had no turn yet
    progress.take(read(log[1]))
    assert progress.floor_us == START_US + 1
    progress.resume(same_store=True)
    assert bodies(progress.take([run for batch in log[1:] for run in read(batch)])) == [b"b.x 1"]


def test_a_prefix_without_messages_does_not_delay_the_others() -> None:
    log = log_of([{"a.x": 1}, {"a.x": 1}, {"a.x": 1}])
    progress = SoloCursor(["a.", "b"], None)
    progress.begin_at(5)
    progress.take(read(log[0]))
    assert progress.floor_us == 5
    progress.take(read(log[1]))
    assert progress.floor_us == START_US  # b may have been asked first the time before, and messages were stored since
    progress.take(read(log[2]))
    assert progress.floor_us == START_US + 1


def test_messages_of_a_slow_partition_come_after_the_reconnect() -> None:
    late = stored_batch({"a.x": [b"late"]}, stored_at_us=START_US)
    quick = stored_batch({"a.x": [b"quick"]}, stored_at_us=START_US + 1, partition=1)
    progress = SoloCursor(["a."], None)
    assert bodies(progress.take(read(quick), START_US)) == [b"quick"]
    assert progress.floor_us == START_US
    progress.resume(same_store=True)
    assert progress.floor_us == START_US
    assert bodies(progress.take(read(late) + read(quick))) == [b"late"]
    assert progress.floor_us == START_US + 1
    progress.resume(same_store=True)
    assert progress.take(read(late) + read(quick)) == []


@pytest.mark.parametrize("prefixes", [[""], ["a."], ["a.", "b"], ["a.x", "a.y", "b"]])
@given(data=st.data())
def test_over_any_reconnects_each_message_comes_once_and_in_order(prefixes: list[str], data: st.DataObject) -> None:
    subjects = ["a.x", "a.y", "b"]
    log = log_of(
        data.draw(
            st.lists(st.dictionaries(st.sampled_from(subjects), st.integers(1, 4), min_size=1), min_size=1, max_size=8)
        )
    )
    progress = SoloCursor(prefixes, None)
    came: dict[str, list[bytes]] = {}
    tracks = [
        [run for batch in log for run in read(batch) if run.subject == name or run.subject.startswith(name or ".")]
        if name
        else [run for batch in log for run in read(batch)]
        for name in prefixes
    ]
    places = [0] * len(tracks)  # messages served, by prefix
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            progress.resume(same_store=True)
            floor = progress.floor_us or 0
            places = [sum(run.count for run in track if run.stored_at_us < floor) for track in tracks]
        for number, track in enumerate(tracks):
            take(progress, track, places, number, data.draw(st.integers(1, 5)), came)
    for number, track in enumerate(tracks):
        take(progress, track, places, number, 1_000, came)
    wanted: dict[str, list[bytes]] = {}
    for track in tracks:
        for run in track:
            wanted.setdefault(run.subject, []).extend(bodies([run]))
    assert came == wanted


def take(
    progress: SoloCursor, track: list[Run], places: list[int], number: int, count: int, came: dict[str, list[bytes]]
) -> None:
    """Serve the next *count* messages of a prefix, cut as a broker cuts them."""
    served, at = [], 0
    for run in track:
        start, stop = max(places[number] - at, 0), min(places[number] + count - at, run.count)
        if start < stop:
            served.append(run if stop - start == run.count else run.slice(start, stop))
        at += run.count
    places[number] += count
    for run in progress.take(served):
        came.setdefault(run.subject, []).extend(bodies([run]))
