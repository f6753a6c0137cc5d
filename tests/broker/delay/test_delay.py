"""Delayed messages are delivered never early, never twice, and are cancelled in time, across restarts and crashes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delay import delay as delay_module
from qmq.broker.ports.commands import Administer, Send
from qmq.broker.ports.effects import Administered, Refused, Sent
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, DELIVER_UNIT_US, MAX_DELAY_US
from qmq.format.pieces import Run
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.repair import Outcome, repair
from qmq.storage.verify.verify import verify
from tests.broker.harness import PRODUCER, START_US, Driven
from tests.fake_disk import FakeDisk

S = 1_000_000


def command(
    driven: Driven, subject: str, delays: Sequence[int], flush: bool = True, first: int = 0, connection: int = 1
) -> Send:
    """Return a batch whose messages are delayed by so many microseconds each; bodies are b"0", b"1", ..."""
    headers = [make_header(f"k{number}", deliver_at=delay) for number, delay in enumerate(delays)]
    bodies = [str(first + number).encode() for number in range(len(delays))]
    parts = build_batch(
        [RunContent(subject, bodies, headers)],
        created_at_us=START_US - 7,
        producer_id=PRODUCER,
        producer_sequence=driven.produced,
    )
    driven.produced += len(delays)
    return Send(connection, driven.request(), memoryview(bytearray(b"".join(parts))), flush)


def delay(driven: Driven, subject: str, *delays: int, flush: bool = True, first: int = 0) -> list[str]:
    """Send a batch of delayed messages; return their ids."""
    (sent,) = driven.do(command(driven, subject, delays, flush, first))
    assert isinstance(sent, Sent), sent
    assert sent.partition == DELAY_PARTITION
    return [str(MessageId(driven.store.store_id, sent.partition, sent.position + n)) for n in range(len(delays))]


def crash(driven: Driven) -> None:
    """Stop without a checkpoint, and start again."""
    driven.store.close(clean=False)
    driven.wanted.clear()
    driven.reads.clear()
    driven.open()


def cancel(driven: Driven, name: str) -> bool:
    said = driven.do(Administer(1, driven.request(), "cancel", {"id": name}))
    (answer,) = [effect for effect in said if isinstance(effect, Administered)]
    return bool(answer.fields["cancelled"])


def pulled(driven: Driven, subscription: int) -> list[tuple[bytes, str]]:
    """Return bodies and ids of the messages that a pull gets."""
    return [(run.body(i), str(run.id(i))) for run in driven.pull(subscription) for i in range(run.count)]


def run_of(driven: Driven, subscription: int) -> Run:
    (run,) = driven.pull(subscription)
    return run


def follow(driven: Driven, prefix: str = "") -> int:
    """Follow alone, from the first message on."""
    return driven.subscribe(prefix, group=None, start="first")


def test_a_message_is_delivered_when_due_and_not_before(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (name,) = delay(driven, "a.b", 30 * S)
    subscription = follow(driven)
    driven.advance(29_999)
    assert pulled(driven, subscription) == []
    driven.advance(DELIVER_UNIT_US // 1_000)
    run = run_of(driven, subscription)
    assert (run.bodies(), str(run.id(0)), run.subject) == ([b"0"], name, "a.b")
    assert run.header(0) == {"k": ["k0"]}
    assert run.created_at_us == START_US - 7
    assert run.stored_at_us >= START_US + 30 * S
    driven.advance(60_000)
    assert pulled(driven, subscription) == []
    driven.close()


def test_absolute_times_and_past_times_are_delivered(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = follow(driven)
    delay(driven, "a", START_US + 5 * S, START_US - 5 * S)
    driven.advance(0)
    assert [body for body, _ in pulled(driven, subscription)] == [b"1"]
    driven.advance(4_999)
    assert pulled(driven, subscription) == []
    driven.advance(11)
    assert [body for body, _ in pulled(driven, subscription)] == [b"0"]
    driven.close()


def test_more_than_two_years_is_refused_with_the_limit(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (refused,) = driven.do(command(driven, "a", [MAX_DELAY_US + S]))
    assert isinstance(refused, Refused)
    assert "at most 731 days (two years) are allowed" in str(refused.error)
    driven.produced = 0
    delay(driven, "a", MAX_DELAY_US)
    driven.close()


@pytest.mark.parametrize("how", ["clean", "kill", "kill behind a checkpoint"])
def test_delays_outlive_restarts(tmp_path: Path, how: str) -> None:
    driven = Driven(tmp_path)
    names = delay(driven, "a", 10 * S, 20 * S, 30 * S)
    names += delay(driven, "b", 15 * S, first=3)
    for _ in range(2):
        if how == "clean":
            driven.restart()
        else:
            if "behind" in how:
                driven.checkpoint()
            crash(driven)
    subscription = follow(driven)
    found = []
    for _ in range(4):
        driven.advance(9_000)
        found += pulled(driven, subscription)
    assert found == list(zip([b"0", b"3", b"1", b"2"], [names[0], names[3], names[1], names[2]], strict=True))
    driven.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_messages_due_during_downtime_are_delivered_at_once(tmp_path: Path, is_clean: bool) -> None:
    driven = Driven(tmp_path)
    names = delay(driven, "a", 10 * S, 20 * S, 90 * S)
    if is_clean:
        driven.checkpoint()
    driven.store.close(clean=is_clean)
    driven.wanted.clear()
    driven.now = driven.now._replace(wall_us=driven.now.wall_us + 60 * S)
    driven.open()
    subscription = follow(driven)
    driven.advance(0)
    assert pulled(driven, subscription) == [(b"0", names[0]), (b"1", names[1])]
    driven.advance(29_000)
    assert pulled(driven, subscription) == []
    driven.advance(1_100)
    assert pulled(driven, subscription) == [(b"2", names[2])]
    driven.close()


@pytest.mark.parametrize("checkpoint", ["none", "before", "after"])
def test_no_crash_delivers_twice(tmp_path: Path, checkpoint: str) -> None:
    driven = Driven(tmp_path)
    names = delay(driven, "a", 10 * S, 10 * S, 20 * S)
    if checkpoint == "before":
        driven.checkpoint()
    driven.advance(11_000)
    if checkpoint == "after":
        driven.checkpoint()
    for _ in range(3):
        crash(driven)
        driven.advance(100)
        driven.checkpoint()
    driven.advance(10_000)
    crash(driven)
    driven.advance(10_000)
    found = pulled(driven, follow(driven))
    assert found == list(zip([b"0", b"1", b"2"], names, strict=True))
    driven.close()


def test_cancelled_messages_never_come(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    names = delay(driven, "a", 10 * S, 10 * S, 10 * S, 20 * S)
    assert cancel(driven, names[1])
    assert cancel(driven, names[1])  # asked again, as after a lost answer
    assert driven.broker.delayed() == {"a": 3}
    crash(driven)
    assert driven.broker.delayed() == {"a": 3}
    driven.checkpoint()
    assert cancel(driven, names[3])
    driven.restart()
    driven.advance(30_000)
    assert [name for _, name in pulled(driven, follow(driven))] == [names[0], names[2]]
    assert driven.broker.delayed() == {}
    assert not cancel(driven, names[0])
    assert cancel(driven, names[1])
    driven.close()


@pytest.mark.parametrize("ends", ["crash", "checkpoint", "restart"])
def test_a_cancellation_is_answered_again_after_its_time(tmp_path: Path, ends: str) -> None:
    """A client that lost the answer asks again, also when the message would have been due, or after a restart."""
    driven = Driven(tmp_path)
    names = delay(driven, "a", S, S)
    assert cancel(driven, names[0])
    driven.advance(2_000)
    if ends == "crash":
        crash(driven)
    else:
        driven.checkpoint()
        driven.advance(2_000)
        driven.checkpoint()
    if ends == "restart":
        driven.restart()
    assert cancel(driven, names[0])
    assert not cancel(driven, names[1])
    assert [name for _, name in pulled(driven, follow(driven))] == names[1:]
    driven.close()


def test_old_cancellations_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_module, "_MOST_ANSWERS", 2)
    driven = Driven(tmp_path)
    names = delay(driven, "a", S, S, S)
    for name in names:
        assert cancel(driven, name)
    driven.restart()
    driven.advance(2_000)
    assert [cancel(driven, name) for name in names] == [False, True, True]
    driven.close()


def test_a_cancellation_is_answered_once_it_is_on_disk(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (name,) = delay(driven, "a", 10 * S)
    driven.auto_sync = False
    for _ in range(2):  # a client that lost its connection asks again
        assert driven.do(Administer(1, driven.request(), "cancel", {"id": name})) == []
    assert [type(effect) for effect in driven.sync()] == [Administered] * 2
    assert [type(effect) for effect in driven.do(Administer(1, driven.request(), "cancel", {"id": name}))] == [
        Administered
    ]
    driven.auto_sync = True
    driven.close()


def test_deliveries_stay_known_over_two_starts(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (name,) = delay(driven, "a", 10 * S)
    driven.checkpoint()
    driven.advance(10_010)
    for _ in range(2):
        crash(driven)
        driven.checkpoint()
    driven.advance(1_000)
    assert pulled(driven, follow(driven)) == [(b"0", name)]
    driven.close()


def test_only_delayed_messages_can_be_cancelled(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sent = driven.send("a", b"x")
    here = driven.store.store_id
    assert not cancel(driven, str(MessageId(here, sent.partition, sent.position)))
    (name,) = delay(driven, "a", 10 * S)
    found = MessageId.parse(name)
    assert not cancel(driven, str(found._replace(position=found.position + 1)))
    assert not cancel(driven, str(found._replace(position=found.position - 1)))
    assert not cancel(driven, str(found._replace(store_id=b"others")))
    (refused,) = driven.do(Administer(1, driven.request(), "cancel", {"id": "zz"}))
    assert isinstance(refused, Refused)
    assert "not a message id" in str(refused.error)
    assert cancel(driven, name)
    driven.close()


def test_a_repeated_batch_is_stored_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for stop in ("none", "clean", "kill"):
        first = command(driven, "a", [10 * S])
        again = Send(1, driven.request(), memoryview(bytearray(first.batch)), True)
        (sent,) = driven.do(first)
        if stop == "clean":
            driven.restart()
        elif stop == "kill":
            crash(driven)
        (repeated,) = driven.do(again)
        assert isinstance(sent, Sent)
        assert isinstance(repeated, Sent)
        assert (sent.position, sent.partition) == (repeated.position, repeated.partition)
    driven.advance(20_000)
    assert len(pulled(driven, follow(driven))) == 3
    driven.close()


def test_flush_waits_for_the_delay_log_and_hides_what_is_not_synced(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    assert driven.do(command(driven, "a", [1])) == []
    driven.advance(1_000)
    subscription = follow(driven)
    assert pulled(driven, subscription) == []
    said = driven.sync()
    assert [type(effect) for effect in said] == [Sent]
    driven.advance(1)
    assert pulled(driven, subscription) == [], "that it has fallen due is not on disk"
    driven.sync()
    assert [body for body, _ in pulled(driven, subscription)] == [b"0"]
    driven.auto_sync = True
    driven.close()


def test_unsynced_messages_stay_hidden_behind_flushed_ones(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    said = driven.do(command(driven, "a", [1], flush=False), command(driven, "a", [1], flush=True, first=1))
    assert [type(effect) for effect in said] == [Sent]
    driven.advance(1_000)
    subscription = follow(driven)
    driven.sync()
    assert [body for body, _ in pulled(driven, subscription)] == [b"0"]
    driven.advance(1)
    driven.sync()
    assert [body for body, _ in pulled(driven, subscription)] == [b"1"]
    driven.auto_sync = True
    driven.close()


def test_a_clock_that_is_set_back_delays_by_no_more_than_that(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    delay(driven, "a", 10 * S)
    driven.now = driven.now._replace(wall_us=driven.now.wall_us - 60 * S)
    subscription = follow(driven)
    driven.advance(69_000)
    assert pulled(driven, subscription) == []
    driven.advance(1_100)
    assert len(pulled(driven, subscription)) == 1
    driven.close()


def was_ahead(driven: Driven, seconds: int) -> None:
    """Within this context, the wall clock is ahead; it is set back at the end."""
    driven.now = driven.now._replace(wall_us=driven.now.wall_us + seconds * S)
    driven.send("other", b"x")
    driven.now = driven.now._replace(wall_us=driven.now.wall_us - seconds * S)


@pytest.mark.parametrize("subjects", [1, 2])
@pytest.mark.parametrize("stop", [None, crash, Driven.restart])
def test_delays_count_from_the_clock_after_it_was_ahead(tmp_path: Path, stop: Any, subjects: int) -> None:
    driven = Driven(tmp_path)
    was_ahead(driven, 3_600)
    if subjects == 1:
        names = delay(driven, "a", 30 * S, 60 * S)
    else:
        parts = build_batch(
            [RunContent(name, [name.encode()], [make_header(None, deliver_at=30 * S)]) for name in ("0", "1")],
            created_at_us=START_US, producer_id=PRODUCER, producer_sequence=driven.produced,
        )  # fmt: skip
        driven.produced += 2
        (sent,) = driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
        assert isinstance(sent, Sent)
        names = [str(MessageId(driven.store.store_id, sent.partition, sent.position + at)) for at in range(2)]
    if stop is not None:
        stop(driven)
    first, second = follow(driven, "a" if subjects == 1 else "0"), follow(driven, "a" if subjects == 1 else "1")
    driven.advance(29_990)
    assert pulled(driven, first) == pulled(driven, second) == []
    driven.advance(30)
    assert pulled(driven, first) == [(b"0", names[0])]
    if subjects == 2:
        assert pulled(driven, second) == [(b"1", names[1])]
    else:
        if stop is not None:
            stop(driven)
        assert cancel(driven, names[1]), "it is not due yet"
    driven.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [10, 300 << 10])
def test_expiry_counts_from_the_clock_after_it_was_ahead(tmp_path: Path, size: int, count: int) -> None:
    driven = Driven(tmp_path)
    was_ahead(driven, 3_600)
    header = make_header(None, deliver_at=7_200 * S, expire_at=30 * S)
    parts = build_batch(
        [RunContent("a", [bytes(size)] * count, [header] * count)],
        created_at_us=START_US, producer_id=PRODUCER, producer_sequence=driven.produced,
    )  # fmt: skip
    (sent,) = driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    assert isinstance(sent, Sent)
    driven.advance(7_200_010)
    driven.advance(29_000)
    subscription = driven.subscribe("a", group="g")
    assert sum(run.count for run in driven.pull(subscription)) == count
    driven.close()


def test_a_cancelled_message_never_comes_though_stamps_are_a_little_ahead(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for _ in range(5):
        driven.send("other", b"x")  # in one microsecond
    (name,) = delay(driven, "a", 10 * S)
    driven.advance(10_000)
    was_delivered = bool(pulled(driven, follow(driven, "a")))
    assert cancel(driven, name) is not was_delivered
    driven.advance(20)
    assert bool(pulled(driven, follow(driven, "a"))) is was_delivered
    driven.close()


def test_repeats_are_recognised_after_the_clock_was_ahead(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    was_ahead(driven, 3_600)
    first = command(driven, "a", [30 * S])
    again = first._replace(request=driven.request(), batch=memoryview(bytearray(first.batch)))
    last = first._replace(request=driven.request(), batch=memoryview(bytearray(first.batch)))
    (stored,) = driven.do(first)
    assert isinstance(stored, Sent)
    assert driven.do(again) == [stored._replace(request=again.request)]
    crash(driven)
    assert driven.do(last) == [stored._replace(request=last.request)]
    driven.close()


def test_the_deadline_is_the_next_due_time(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    delay(driven, "a", S // 2)
    deadline = driven.broker.tick(driven.now)
    assert deadline is not None
    assert S // 2 <= deadline - driven.now.monotonic_us <= S // 2 + DELIVER_UNIT_US
    driven.close()


def test_batches_of_many_subjects_fall_due_in_parts(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2)
    headers = [[make_header(deliver_at=(n % 3 + 1) * S) for n in range(5)] for _ in range(3)]
    runs = [
        RunContent(subject, [f"{subject}{n}".encode() for n in range(5)], header)
        for subject, header in zip("abc", headers, strict=True)
    ]
    parts = build_batch(runs, created_at_us=1, producer_id=PRODUCER, producer_sequence=0)
    driven.produced = 15
    (sent,) = driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    assert isinstance(sent, Sent)
    subscription = follow(driven)
    for n in range(3):
        driven.advance(1_010)
        bodies = sorted(body for body, _ in pulled(driven, subscription))
        assert bodies == sorted(f"{s}{k}".encode() for s in "abc" for k in range(5) if k % 3 == n)
    driven.close()


def test_a_group_gets_delayed_messages_as_any_others(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", group="g")
    (name,) = delay(driven, "a.x", S)
    driven.send("a.y", b"now")
    assert [body for body, _ in pulled(driven, subscription)] == [b"now"]
    driven.advance(1_010)
    assert pulled(driven, subscription) == [(b"0", name)]
    driven.close()


def test_verify_and_repair_look_into_the_delay_log(tmp_path: Path) -> None:
    driven = Driven(tmp_path, segment_bytes=1 << 16, max_frame_bytes=1 << 15)
    names = [delay(driven, "a", 3_600 * S, first=number)[0] for number in range(3)]
    driven.restart()
    driven.store.close(clean=True)
    (segment,) = (tmp_path / "delayed" / "log-0").glob("*.messages")
    data = bytearray(segment.read_bytes())
    body = MessageId.parse(names[2]).position - int(segment.stem, 16) - 1  # that of the second is its batch's end
    assert data[body] == ord("1")
    data[body] ^= 1
    segment.write_bytes(data)
    assert [f.file for f in verify(tmp_path, Disk()).findings if f.severity == "fault"] == [segment]
    (entries,) = (tmp_path / "delayed" / "consumer-log" / "0").glob("*.entries")
    entries.unlink()
    repaired = repair(tmp_path, Disk(), START_US)
    assert {treated.outcome for treated in repaired.treated} == {Outcome.LEFT, Outcome.MADE_AGAIN}
    assert [f.file for f in verify(tmp_path, Disk()).findings] == [segment]
    driven.open()
    driven.advance(3_700_000)
    assert sorted(body for body, _ in pulled(driven, follow(driven))) == [b"0", b"2"]
    assert any("rotten" in str(error) for error in driven.broker.take_damaged())
    driven.store.close()


def test_a_group_counts_its_waiting_messages(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for subject, group in (("a.", "prefix"), ("a.x", "exact"), ("b", "other")):
        driven.subscribe(subject, group=group)
    delay(driven, "a.x", S, 2 * S)
    delay(driven, "a.y", S)
    said = driven.do(Administer(1, driven.request(), "groups", {"after": ""}))
    (answer,) = [effect for effect in said if isinstance(effect, Administered)]
    assert {row["group"]: row["delayed"] for row in answer.fields["rows"]} == {"prefix": 3, "exact": 2, "other": 0}
    driven.close()


def test_a_schedule_larger_than_memory_is_delivered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.storage.error_log.timer_queue.MEMORY_ITEMS", 100)
    driven = Driven(tmp_path)
    count = 700
    names = delay(driven, "a", *(10_000 * (count - number) for number in range(count)))
    assert list((tmp_path / "due").iterdir())
    driven.checkpoint()
    crash(driven)
    driven.advance(3_000)
    crash(driven)
    driven.advance(5_000)
    while driven.broker.delayed():
        driven.advance(1)
    assert driven.broker.take_damaged() == []
    subscription, found = follow(driven), list[str]()
    while some := pulled(driven, subscription):
        found += [name for _, name in some]
    assert found == names[::-1]
    driven.close()


def test_messages_due_together_are_delivered_at_the_deadlines(tmp_path: Path) -> None:
    """At the deadlines of ``tick``, messages are never early, and at most its unit late, over any number of turns."""
    driven = Driven(tmp_path, disk=FakeDisk())
    count, due = 10_000, dict[bytes, int]()
    for first in range(0, count, 100):
        delays = [10 * S + (first + number) * 7_919 % 100_000 for number in range(100)]
        stored = driven.now.wall_us
        delay(driven, "a", *delays, flush=False, first=first)
        due |= {str(first + number).encode(): stored + one for number, one in enumerate(delays)}
    turns = 0
    while driven.broker.delayed():
        deadline_us = driven.broker.tick(driven.now)
        driven.effects()
        assert deadline_us is not None or not driven.broker.delayed()
        passed_us = max((deadline_us or 0) - driven.now.monotonic_us, 0)
        driven.now = driven.now._replace(
            monotonic_us=driven.now.monotonic_us + passed_us, wall_us=driven.now.wall_us + passed_us
        )
        turns += 1
        if turns == 90:
            driven.checkpoint()
        if turns == 120:
            crash(driven)
    subscription, late = follow(driven), list[int]()
    while some := driven.pull(subscription):
        late += [run.stored_at_us - due[run.body(at)] for run in some for at in range(run.count)]
    assert len(late) == count
    assert min(late) >= 0
    assert max(late) <= DELIVER_UNIT_US + count, "a stamp is a microsecond behind the one before"
    driven.close()
