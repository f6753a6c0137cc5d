"""Subjects without messages are forgotten: they leave lists and bounds, and come back as new, with higher sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import ListSubjects
from qmq.broker.ports.effects import Refused, Sent, SubjectList
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.work import whole
from qmq.broker.retention import idle_subjects
from qmq.errors import TooManySubjects
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, LANE_HIGH, LANE_ORDERED, RUN_SIZE
from qmq.net.protocol.types import Disposition
from qmq.storage import store
from qmq.storage.types import Hole
from tests.broker.delay.test_delay import delay
from tests.broker.harness import Driven, bodies_of
from tests.broker.retention.test_retention import BY_AGE, HOUR_MS, driven_in, settle
from tests.broker.test_admin import ask, group_row
from tests.broker.test_consuming import Consumer, killed


def names(driven: Driven) -> list[str]:
    (answer,) = driven.do_whole(ListSubjects(1, driven.request(), "", 0, 100))
    assert isinstance(answer, SubjectList)
    return [row[0] for row in answer.rows]


def drop_all(driven: Driven) -> None:
    """Have retention drop all messages that there are."""
    driven.advance(HOUR_MS)
    for part in driven.store.partitions:
        part.seal()
    settle(driven, 12)


def idle(driven: Driven, hours: int = 2) -> None:
    """Let looks come and end."""
    for _ in range(hours):
        driven.advance(HOUR_MS)
        while (deadline_us := driven.broker.tick(driven.now)) is not None and deadline_us <= driven.now.monotonic_us:
            driven.effects()


def first_sequence(sent: Sent) -> int:
    assert isinstance(sent.first_sequences, int)
    return sent.first_sequences


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_subject_without_messages_is_forgotten_and_comes_back_as_new(
    tmp_path: Path, partitions: int, restarts: bool
) -> None:
    driven = driven_in(tmp_path, partitions=partitions)
    consumer = Consumer(driven, "c", "a.")
    for _ in range(5):
        for name in ("a.0", "a.1", "b"):
            driven.send(name, b"old")
    assert len(consumer.pull()) == 10
    consumer.ack()
    drop_all(driven)
    driven.send("a.1", b"it stays")
    assert names(driven) == ["a.0", "a.1", "b"]
    idle(driven, 1)
    assert names(driven) == ["a.0", "a.1", "b"], "they were empty at one look only"
    driven.send("a.1", b"it stays too")
    idle(driven, 1)
    assert names(driven) == ["a.1"]
    assert driven.store.subjects.name_count == driven.store.live_subjects == 1
    assert group_row(driven)["ready"] == 2
    if restarts:
        driven.restart()
        assert names(driven) == ["a.1"]
        consumer = Consumer(driven, "c", "a.", nonce=b"x")
    again = driven.send("a.0", b"new")
    assert first_sequence(again) == 5, "above all sequences that it had"
    assert names(driven) == ["a.1", "a.0"]
    assert group_row(driven)["ready"] == 3
    assert sorted(consumer.pull()) == [b"it stays", b"it stays too", b"new"]
    assert consumer.ack() == 0
    killed(driven)
    assert group_row(driven)["ready"] == group_row(driven)["in_flight"] == 0
    assert first_sequence(driven.send("a.0", b"newer")) == 6
    subscription = driven.subscribe("a.0", group=None, start="first")
    assert bodies_of(driven.pull(subscription)) == [b"new", b"newer"]
    driven.close()


@pytest.mark.parametrize("back", ["nothing", "sends", "sends and pulls"])
@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_a_kill_takes_no_message_and_repeats_no_sequence(tmp_path: Path, checkpoints: int, back: str) -> None:
    driven = driven_in(tmp_path)
    consumer = Consumer(driven, "c", "a.")
    for name in ("a.0", "a.1", "a.2"):
        driven.send(name, *[b"old"] * 7)
    consumer.pull()
    consumer.ack()
    drop_all(driven)
    idle(driven, 3)
    assert names(driven) == []
    for _ in range(checkpoints):
        driven.checkpoint()
    sent = list[Sent]()
    if back != "nothing":
        sent = [driven.send("a.2", b"new"), driven.send("a.0", b"new"), driven.send("a.3", b"other")]
    if back == "sends and pulls":
        assert sorted(consumer.pull()) == [b"new", b"new", b"other"]
        consumer.ack()
    killed(driven)
    consumer = Consumer(driven, "c", "a.", nonce=b"x")
    assert len(consumer.pull()) == (3 if back == "sends" else 0)
    after = [driven.send("a.2", b"newer"), driven.send("a.0", b"newer")]
    assert [first_sequence(one) for one in (*sent[:2], *after)] == [*[7] * len(sent[:2]), *[8 if sent else 7] * 2]
    assert sorted(consumer.pull()) == [b"newer"] * 2
    killed(driven)
    driven.close()


def test_a_start_without_a_checkpoint_takes_the_later_of_two_numbers(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    driven.send("a.0", b"old")
    drop_all(driven)
    idle(driven, 3)
    driven.send("a.0", b"new")
    driven.send("b", b"new")
    driven.restart()
    driven.store.close(clean=True)
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    driven.open()
    assert sorted(names(driven)) == ["a.0", "b"]
    subjects = driven.store.subjects
    assert (subjects.number("a.0"), subjects.forgotten_count, subjects.name_count) == (1, 1, 2)
    assert first_sequence(driven.send("a.0", b"newer")) > 1
    subscription = driven.subscribe("a.", group=None, start="first")
    assert bodies_of(driven.pull(subscription)) == [b"new", b"newer"]
    driven.close()


def test_nobody_is_locked_out_for_good(tmp_path: Path) -> None:
    """A program makes a subject for each request: others still get theirs, round after round."""
    driven = driven_in(tmp_path, max_subjects=4)
    for number in range(40):
        (said,) = driven.do(driven.send_command({f"request.{number}": [b"x"]}))
        if isinstance(said, Refused):
            assert isinstance(said.error, TooManySubjects)
            drop_all(driven)
            idle(driven)
            driven.change_producer()
            driven.send(f"request.{number}", b"x")
    assert driven.store.subjects.name_count <= 16
    assert driven.store.subjects.count == 40
    driven.close()


def test_slots_and_priorities_are_given_back_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_LANES", 5)
    driven = driven_in(tmp_path)
    consumer = Consumer(driven, "c", "a.")

    def send(lane: int, body: bytes = b"x") -> Sent | Refused:
        (said,) = driven.do(driven.send_command({"a.x": [body]}, lane=lane))
        assert isinstance(said, Sent | Refused)
        return said

    lanes = [LANE_ORDERED + slot for slot in range(4)]
    for lane in (0, LANE_HIGH, *lanes):
        assert isinstance(send(lane), Sent)
    assert isinstance(send(LANE_ORDERED + 9), Refused)
    driven.change_producer()
    assert len(consumer.pull()) == 6
    consumer.ack()
    drop_all(driven)
    for _ in range(3):
        send(lanes[2], b"it stays")
        idle(driven, 1)
    assert driven.store.subjects.lanes_of("a.x").keys() == {lanes[2]}
    assert (driven.store.subjects.further_lane_count, names(driven)) == (0, ["a.x"])
    assert group_row(driven)["ready"] == 3
    new = 0, LANE_HIGH, LANE_ORDERED + 9, lanes[0]
    for lane in new:
        said = send(lane, b"new %d" % lane)
        assert isinstance(said, Sent)
        assert first_sequence(said) == 1
    assert group_row(driven)["ready"] == 7
    driven.restart()
    consumer = Consumer(driven, "c", "a.", nonce=b"x")
    assert sorted(consumer.pull()) == sorted([b"it stays"] * 3 + [b"new %d" % lane for lane in new])
    consumer.ack()
    killed(driven)
    assert consumer.driven.store.subjects.further_lane_count == 4
    driven.close()


@pytest.mark.parametrize("group", ["g", None])
def test_a_subject_that_is_followed_by_its_name_stays(tmp_path: Path, group: str | None) -> None:
    driven = driven_in(tmp_path)
    subscription = driven.subscribe("a.0", group=group, start="first")
    driven.send("a.0", b"x")
    driven.send("a.1", b"x")
    assert bodies_of(driven.pull(subscription)) == [b"x"]
    drop_all(driven)
    idle(driven, 3)
    assert names(driven) == ["a.0"]
    assert first_sequence(driven.send("a.0", b"y")) == 1
    assert bodies_of(driven.pull(subscription)) == [b"y"]
    driven.close()


def test_a_subject_with_a_retry_or_a_dead_letter_stays(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BY_AGE._replace(retention_max_ms=2 * HOUR_MS))
    consumer = Consumer(driven, "c", "a.", retry_delays_us=[20 * HOUR_MS * 1_000])
    for name in ("a.retry", "a.dead", "a.acked"):
        driven.send(name, name.encode())
    pulled = consumer.pull()
    number = {body: at for at, (body, _) in consumer.got.items()}
    consumer.back(number[b"a.retry"], number[b"a.retry"] + 1)
    consumer.back(number[b"a.dead"], number[b"a.dead"] + 1, Disposition.REJECT)
    consumer.ack(number[b"a.acked"])
    assert len(pulled) == 3
    driven.advance(HOUR_MS)
    drop_all(driven)
    idle(driven, 4)
    assert names(driven) == ["a.retry", "a.dead"]
    row = group_row(driven)
    assert (row["in_retry"], row["dead"], row["ready"]) == (1, 1, 0)
    driven.restart()
    assert names(driven) == ["a.retry", "a.dead"]
    ask(driven, "delete_group", group="g")
    for _ in range(3):
        drop_all(driven)
        idle(driven, 3)
    assert names(driven) == []
    assert driven.store.subjects.name_count == 0, "the private ones are forgotten, too"
    driven.close()


def test_the_counts_of_statistics_never_fall(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)

    def rows() -> dict[str, list[int]]:
        return {name: more for name, *more in whole(driven.broker._statistics.families.rows()) if any(more)}

    for name in ("a.0", "a.1", "b"):
        driven.send(name, b"x", b"y")
    assert rows() == {"a": [2, 4, 4], "b": [1, 2, 2]}
    drop_all(driven)
    idle(driven)
    assert rows() == {"a": [0, 0, 4], "b": [0, 0, 2]}
    driven.send("a.0", b"z")
    assert rows() == {"a": [1, 1, 5], "b": [0, 0, 2]}
    driven.close()


def test_a_look_takes_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_subjects, "_TURN_WORK", 1)
    monkeypatch.setattr(idle_subjects, "_FORGOTTEN", 10)
    driven = driven_in(tmp_path)
    driven.send("a.0", b"x")
    for start in range(0, 100, 20):
        driven.do(driven.send_command({f"b.{number}": [b"x"] for number in range(start, start + 20)}))
    drop_all(driven)
    idle(driven, 1)
    driven.advance(HOUR_MS)
    sizes = list[int]()
    while driven.broker.tick(driven.now) == driven.now.monotonic_us:
        sizes.append(driven.store.subjects.name_count)
        if len(sizes) == 4:
            driven.send("b.99", b"y")
    assert sizes[:3] == [101, 91, 81]
    assert names(driven) == ["b.99"]
    driven.close()


def test_without_retention_nothing_is_forgotten(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits())
    driven.send("a.0", b"x")
    idle(driven, 5)
    assert names(driven) == ["a.0"]
    driven.close()


def test_a_subject_with_delayed_messages_stays(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    driven.subscribe("a.", start="first")
    delay(driven, "a.x", 10 * HOUR_MS * 1_000)
    idle(driven, 4)
    assert names(driven) == ["a.x"]
    driven.restart()
    subscription = driven.subscribe("a.", start="first")
    idle(driven, 7)
    assert bodies_of(driven.pull(subscription)) == [b"0"]
    drop_all(driven)
    idle(driven, 3)
    assert names(driven) == []
    delay(driven, "a.x", HOUR_MS * 1_000)
    killed(driven)
    subscription = driven.subscribe("a.", start="first")
    idle(driven, 1)
    (run,) = driven.pull(subscription)
    assert (run.bodies(), run.first_sequence) == ([b"0"], 1)
    driven.close()


def test_a_start_from_the_checkpoint_before_knows_what_came_back(tmp_path: Path) -> None:
    """The last checkpoint rots; records since name a subject that the one before knows by another number."""
    driven = driven_in(tmp_path)
    Consumer(driven, "d", "z.", group="other")
    driven.send("a.0", b"old")
    driven.send("a.1", b"old")
    drop_all(driven)
    driven.checkpoint()
    idle(driven, 3)
    assert names(driven) == []
    for name in ("a.1", "a.0"):
        driven.send(name, b"new")
    driven.checkpoint()
    consumer = Consumer(driven, "c", "a.0")
    assert consumer.pull() == [b"new"]
    driven.send("a.0", b"newer")
    assert consumer.pull() == [b"newer"]
    consumer.ack(0)
    last = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    last.write_bytes(bytes(200))
    killed(driven)
    assert sorted(names(driven)) == ["a.0", "a.1"]
    row = group_row(driven)
    assert (row["ready"], row["in_flight"]) == (0, 1)
    consumer = Consumer(driven, "c", "a.0", nonce=b"x")
    assert consumer.pull() == [b"newer"]
    assert first_sequence(driven.send("a.0", b"newest")) == 3
    driven.close()


def test_nothing_is_forgotten_while_bytes_are_bad(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    driven.send("a.0", b"old")
    drop_all(driven)
    (part,) = driven.store.partitions
    part.holes.append(Hole(part.message_log.end - 1, part.message_log.end))
    idle(driven, 4)
    assert names(driven) == ["a.0"]
    del part.holes[:]
    idle(driven, 2)
    assert names(driven) == []
    driven.close()


def test_the_short_way_knows_no_number_that_is_forgotten(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    intake, batch = driven.broker._intake, driven.send_command({"a.0": [b"x"]}).batch
    table = bytes(batch[BATCH_HEADER_SIZE + RUN_SIZE : parse_header(batch).data_start])
    driven.change_producer()
    driven.send("a.0", b"x")
    found = intake._sender(1, table)
    assert found is not None
    assert found[0] == intake._senders[1, table][0] == 0
    drop_all(driven)
    idle(driven)
    assert (intake._senders, intake._sender(1, table)) == ({}, None)
    driven.send("a.0", b"y")
    found = intake._sender(1, table)
    assert found is not None
    assert found[0] == 1
    driven.close()
