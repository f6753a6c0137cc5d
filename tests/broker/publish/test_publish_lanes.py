"""Priorities and slots of order keys: each lane of a subject has its own number and sequences, lists add them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups.lag import ready, waiting
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.ports.commands import Administer, HandOver, ListSubjects, Restore, Send
from qmq.broker.ports.effects import InfoWanted, Refused, Sent, SubjectList
from qmq.broker.ports.work import whole
from qmq.errors import BadBatch
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.copies.for_group import private_batch
from qmq.format.copies.restored import numbered, restored_batches
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, LANE_ORDERED_LOW
from qmq.net.protocol.types import Disposition
from qmq.storage import store
from qmq.storage.store import Store
from tests.broker.harness import START_US, Driven, batch_of, bodies_of
from tests.format.contents import reseal, set_run
from tests.format.test_private import run_of

SLOT = LANE_ORDERED | 4_095


def run(subject: str, lane: int, *bodies: bytes) -> RunContent:
    return RunContent(subject, bodies, None, lane)


def lanes_of(store: Store) -> list[tuple[str, int, int]]:
    """Return (name, lane, next sequence) of each number."""
    subjects = store.subjects
    return [
        (subjects.name(number), subjects.lane(number), int(subjects.ends[number])) for number in range(subjects.count)
    ]


def send_all(driven: Driven) -> None:
    driven.send("a.x", b"1", b"2")
    driven.send_runs(run("a.x", LANE_HIGH, b"3"))
    driven.send_runs(run("a.x", SLOT, b"4"), run("a.y", LANE_LOW, b"5"), run("a.x", LANE_NORMAL, b"6"))


EXPECTED = [("a.x", LANE_NORMAL, 3), ("a.x", LANE_HIGH, 1), ("a.x", SLOT, 1), ("a.y", LANE_LOW, 1)]


@pytest.mark.parametrize("partitions", [1, 2])
def test_each_lane_has_a_number_and_sequences_of_its_own(tmp_path: Path, partitions: int) -> None:
    driven = Driven(tmp_path, partitions=partitions)
    send_all(driven)
    assert lanes_of(driven.store) == EXPECTED
    driven.restart()  # the log is read again
    assert sorted(lanes_of(driven.store)) == sorted(EXPECTED)
    driven.checkpoint()
    driven.restart()
    assert sorted(lanes_of(driven.store)) == sorted(EXPECTED)
    driven.close()


def test_a_prefix_takes_all_lanes(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", start="first")
    send_all(driven)
    found = [(one.subject, one.lane, one.bodies()) for one in driven.pull(subscription)]
    assert sorted(found) == [
        ("a.x", LANE_NORMAL, [b"1", b"2"]), ("a.x", LANE_NORMAL, [b"6"]), ("a.x", LANE_HIGH, [b"3"]),
        ("a.x", SLOT, [b"4"]), ("a.y", LANE_LOW, [b"5"]),
    ]  # fmt: skip
    assert driven.pull(subscription) == []
    driven.close()


def test_lists_add_the_lanes_of_a_subject_up(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.subscribe("a.", start="first")
    send_all(driven)
    (found,) = driven.do(ListSubjects(1, 1, "", 0, 100))
    assert isinstance(found, SubjectList)
    assert found.rows == [("a.x", 0, 3, 5, 0, 1, 0, 1), ("a.y", 0, 1, 1, 0, 0, 1, 0)]
    assert found.after is None
    (found,) = driven.do(ListSubjects(1, 1, "a.y", 0, 100))
    assert isinstance(found, SubjectList)
    assert found.rows == [("a.y", 0, 1, 1, 0, 0, 1, 0)]
    rows = list[str]()
    after: int | None = 0
    while after is not None:  # one at a time
        (found,) = driven.do(ListSubjects(1, 1, "a.", after, 1))
        assert isinstance(found, SubjectList)
        rows += [row[0] for row in found.rows]
        after = found.after
    assert rows == ["a.x", "a.y"]
    (info,) = driven.do(Administer(1, 2, "info", {}))
    assert isinstance(info, InfoWanted)
    assert info.fields["subjects"] == 2
    group = driven.broker.groups["g"]
    order, times = NameOrder(driven.store.subjects), TimeStarts(driven.store)
    assert whole(ready(driven.store, group, order, times)) == (6, True)
    rows, _ = whole(waiting(driven.store, group, times, 0, 10))
    assert {(row.subject, row.lane, row.end - row.start) for row in rows} == {
        (name, lane, count) for name, lane, count in EXPECTED
    }
    driven.close()


def test_a_lane_that_is_none_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    before = driven.store.subjects.count
    with pytest.raises(AssertionError, match="lane 7"):
        driven.send_runs(run("a", 7, b"1"))
    with pytest.raises(AssertionError, match="neither a priority nor a slot"):
        driven.send_runs(run("a", 7, b"1"), run("b", 0, b"2"))
    assert driven.store.subjects.count == before
    driven.send("a", b"good")
    driven.close()


UNKNOWN_LANES = (3, 7, 0xFFF, LANE_ORDERED_LOW + 4_096, 0xFFFF)


def with_lane(batch: bytes | memoryview, lane: int) -> memoryview:
    """Return a batch whose first run says that it has another lane; the checksums fit."""
    view = memoryview(bytearray(batch))
    set_run(view, 0, lane=lane)
    reseal(view)
    return view


def frames_with(driven: Driven, lane: int) -> dict[str, Send | HandOver | Restore]:
    """Return a request of each kind that brings a batch, with messages in a lane."""
    archived = run_of(b"x", b"y")
    (restored,) = restored_batches([("a.x", archived)], START_US, 1 << 20)
    numbered(restored.buffer, b"r" * 16, 0)
    private = private_batch(archived, 0, "g", b"q" * 16, 0)
    delayed = [make_header(deliver_at=60_000_000)]
    late = build_batch(
        [RunContent("a.x", [b"x"], delayed)], created_at_us=START_US, producer_id=b"d" * 16, producer_sequence=0
    )
    over = with_lane(private, lane)
    return {
        "send": Send(2, 1, with_lane(batch_of({"a.x": [b"x"]}, 0, b"p" * 16), lane), True),
        "several": Send(2, 2, with_lane(batch_of({"a.x": [b"x"], "a.y": [b"y"]}, 0, b"s" * 16), lane), True),
        "delayed": Send(2, 3, with_lane(b"".join(late), lane), True),
        "handover": HandOver(2, 4, over, "g", 1, Disposition.NACK, 0, "broke"),
        "restore": Restore(2, 5, with_lane(restored.buffer, lane)),
    }


@pytest.mark.parametrize("kind", ["send", "several", "delayed", "handover", "restore"])
def test_an_unknown_lane_of_any_request_hurts_nobody_else(tmp_path: Path, kind: str) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", start="first")
    begin = Administer(2, 6, "restore", {"run": b"r" * 16, "group": None, "since": None})
    for _ in range(3):
        driven.do(begin)
    before = driven.store.subjects.count
    for lane in UNKNOWN_LANES:
        said = driven.do(frames_with(driven, lane)[kind], driven.send_command({"a.x": [b"good"]}))
        (refused,) = [one for one in said if isinstance(one, Refused)]
        assert isinstance(refused.error, BadBatch), refused.error
        assert f"lane {lane}" in str(refused.error)
        assert sum(isinstance(one, Sent) for one in said) == 1, "the other client's message is stored"
    assert driven.store.subjects.count == before + 1
    assert [one.bodies() for one in driven.pull(subscription)] == [[b"good"]] * len(UNKNOWN_LANES)
    driven.do(frames_with(driven, LANE_HIGH)[kind])
    driven.close()


def test_lanes_do_not_count_as_subjects_and_have_a_bound_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_LANES", 3)
    driven = Driven(tmp_path, max_subjects=2)
    driven.send("a", b"1")
    for lane in (LANE_HIGH, LANE_LOW, LANE_ORDERED):
        driven.send_runs(run("a", lane, b"2"))
    driven.send_runs(run("b", LANE_ORDERED, b"3"))  # its first lane
    with pytest.raises(AssertionError, match="priorities and slots of order keys, the most"):
        driven.send_runs(run("a", LANE_ORDERED + 1, b"4"))
    with pytest.raises(AssertionError, match="there are 2 subjects"):
        driven.send_runs(run("c", LANE_ORDERED, b"5"))
    driven.send_runs(run("a", LANE_ORDERED, b"6"))
    driven.close()


def test_the_short_way_and_lanes_are_told_apart(tmp_path: Path) -> None:
    """A plain batch whose table is known takes the short way; one with the same table and a lane must not."""
    driven = Driven(tmp_path)
    for lane, body in ((LANE_NORMAL, b"1"), (LANE_HIGH, b"2"), (LANE_NORMAL, b"3")):
        if lane:
            driven.send_runs(run("a", lane, body))
        else:
            view = batch_of({"a": [body]}, driven.produced)
            driven.produced += 1
            assert driven.broker.short_way is not None
            done = driven.broker.short_way.send(1, driven.request(), view, len(view), False, driven.now)
            assert (done is not None) == (body == b"3")
            if body == b"1":
                driven.do(Send(1, driven.request(), view, False))
    assert {(name, lane) for name, lane, _ in lanes_of(driven.store)} == {("a", LANE_NORMAL), ("a", LANE_HIGH)}
    driven.close()


def test_a_slot_becomes_visible_in_order_over_subjects_and_partitions(tmp_path: Path) -> None:
    """A later message of another subject is in a partition whose disk is ready, and waits for the earlier one."""
    driven = Driven(tmp_path, partitions=2, auto_sync=False)
    lane, partitions = LANE_ORDERED | 7, set[int]()
    subscription = driven.subscribe("", group=None, start="first")
    driven.do(driven.send_command({"a.b": [b"first"]}, lane=lane, flush=True))
    for number in range(10):
        said = driven.do(driven.send_command({f"c.{number}": [b"later"]}, lane=lane, flush=False))
        partitions.update(sent.partition for sent in said if isinstance(sent, Sent))
    assert partitions == {0, 1}
    assert driven.pull(subscription) == []
    driven.sync()
    assert bodies_of(driven.pull(subscription)) == [b"first", *[b"later"] * 10]
    driven.close()
