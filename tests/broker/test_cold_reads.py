"""Pulls of messages that are not in memory wait for a read, alone; none is lost, doubled or out of order."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Administer, Disconnected, Subscribe, Unsubscribe, Withdraw
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Sent, Subscribed
from qmq.errors import BrokerStopping, StorageFailed
from qmq.format.pieces import Run, read_answer
from qmq.net.protocol.types import Disposition
from qmq.storage.disk.disk import PAGE
from tests.broker.cut_files import BATCHES, SUBJECTS
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.test_consuming import Consumer
from tests.fake_disk import FakeDisk

BODY = bytes(3_000)


def cold(tmp_path: Path, messages: int = 12, partitions: int = 1) -> tuple[Driven, FakeDisk, list[bytes]]:
    """Return a broker with no message in memory; its reads are run by hand."""
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, segment_bytes=64 << 10, max_frame_bytes=32 << 10, partitions=partitions)
    bodies = [b"%d." % number + BODY for number in range(messages)]
    for body in bodies:
        driven.send("a.x", body)
    disk.forget()
    driven.auto_read = False
    return driven, disk, bodies


def messages_of(effects: Sequence[Effect]) -> list[PulledMessages]:
    return [effect for effect in effects if isinstance(effect, PulledMessages)]


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_pull_is_answered_when_its_read_is_done(tmp_path: Path, prefix: str, partitions: int) -> None:
    driven, _, bodies = cold(tmp_path, partitions=partitions)
    subscription = driven.subscribe(prefix)
    got: list[bytes] = []
    rounds = 0
    while len(got) < len(bodies):
        assert driven.do(driven.pull_command(subscription)) == []
        assert len(driven.reads) == 1
        while not (answers := messages_of(driven.read())):
            rounds += 1
            assert rounds < 100
        got += bodies_of(runs_of_answer(answers[0]))
        while driven.reads:
            driven.read()
    assert got == bodies
    driven.auto_read = True
    assert driven.pull(subscription) == []
    driven.close()


def test_other_groups_go_on_during_a_read(tmp_path: Path) -> None:
    driven, _, bodies = cold(tmp_path)
    behind, ahead = driven.subscribe("a.x", group="behind"), driven.subscribe("", group="ahead", start="new")
    assert driven.do(driven.pull_command(behind)) == []
    (read,) = driven.reads
    waiting = driven.pull_command(ahead, timeout_ms=1_000)
    assert driven.do(waiting) == []
    driven.disk.hot_bytes = 4_096  # what is sent now is in memory
    said = driven.do(driven.send_command({"b": [b"new"]}, flush=False))
    assert [bodies_of(runs_of_answer(answer)) for answer in messages_of(said)] == [[b"new"]]
    assert driven.reads == [read]
    (answer,) = messages_of(driven.read())
    assert bodies_of(runs_of_answer(answer))[0] == bodies[0]
    driven.close()


def test_two_pulls_of_a_group_share_one_read_and_get_different_messages_in_order(tmp_path: Path) -> None:
    driven, _, bodies = cold(tmp_path)
    subscription = driven.subscribe("a.")
    first, second = (driven.pull_command(subscription, max_count=2) for _ in range(2))
    assert driven.do(first) == []
    assert driven.do(second) == []
    assert len(driven.reads) == 1
    answers = messages_of(driven.read())
    assert [answer.request for answer in answers] == [first.request, second.request]
    assert [bodies_of(runs_of_answer(answer)) for answer in answers] == [bodies[:2], bodies[2:4]]
    driven.close()


def test_a_pull_without_a_wait_does_not_say_that_nothing_is_there(tmp_path: Path) -> None:
    driven, _, bodies = cold(tmp_path)
    pull = driven.pull_command(driven.subscribe("a."), timeout_ms=50)
    assert driven.do(pull) == []
    assert driven.advance(20_000) == []
    (answer,) = messages_of(driven.read())
    assert bodies_of(runs_of_answer(answer))[0] == bodies[0]
    driven.close()


def test_an_overdue_pull_whose_messages_went_to_another_is_answered_with_none(tmp_path: Path) -> None:
    driven, _, _ = cold(tmp_path, messages=2)
    subscription = driven.subscribe("a.")
    first, second = driven.pull_command(subscription), driven.pull_command(subscription)
    assert driven.do(first, second) == []
    answers = messages_of(driven.read())
    assert [(answer.request, answer.messages) for answer in answers] == [(first.request, 2), (second.request, 0)]
    driven.close()


@pytest.mark.parametrize("how", ["withdraw", "unsubscribe", "disconnect", "stop"])
def test_who_leaves_during_a_read_takes_nothing(tmp_path: Path, how: str) -> None:
    driven, _, bodies = cold(tmp_path)
    subscription = driven.subscribe("a.", connection=7)
    pull = driven.pull_command(subscription, connection=7, timeout_ms=1_000)
    assert driven.do(pull) == []
    if how == "stop":
        driven.broker.stop()
        (refused,) = driven.effects()
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, BrokerStopping)
        assert driven.read() == []
        return
    command = {
        "withdraw": Withdraw(7, pull.request),
        "unsubscribe": Unsubscribe(7, driven.request(), subscription),
        "disconnect": Disconnected(7),
    }[how]
    said = messages_of(driven.do(command))
    assert [(answer.request, answer.messages) for answer in said] == (
        [] if how == "disconnect" else [(pull.request, 0)]
    )
    assert driven.read() == []
    assert driven.broker.waiting_pulls() == 0
    driven.auto_read = True
    assert [run.body(0) for run in drain(driven, driven.subscribe("a."))] == bodies
    driven.close()


def test_a_minimum_that_is_not_in_memory_is_waited_for(tmp_path: Path) -> None:
    driven, _, bodies = cold(tmp_path)
    driven.auto_read = True
    pull = driven.pull_command(driven.subscribe("a.x"), min_count=12, timeout_ms=1_000)
    (answer,) = messages_of(driven.do(pull))
    assert bodies_of(runs_of_answer(answer)) == bodies
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
def test_what_is_forgotten_at_once_is_served_a_little_at_a_time(tmp_path: Path, prefix: str) -> None:
    driven, disk, bodies = cold(tmp_path)
    disk.forgets = 1.0  # at every question
    driven.auto_read = True
    subscription = driven.subscribe(prefix)
    got: list[bytes] = []
    while came := bodies_of(driven.pull(subscription)):
        got += came
    assert got == bodies
    disk.forgets = 0.0
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
def test_what_is_forgotten_at_once_is_no_more_than_the_pull_asked_for(tmp_path: Path, prefix: str) -> None:
    driven, disk, bodies = cold(tmp_path)
    subscription = driven.subscribe(prefix)
    said = driven.do(driven.pull_command(subscription, max_bytes=2 * len(BODY), timeout_ms=1_000))
    for _ in range(4):
        driven.run_reads()
        disk.forget()
        driven.finish_reads()
        said += driven.effects()
    (answer,) = messages_of(said)
    assert bodies_of(runs_of_answer(answer)) == bodies[:1]
    assert answer.size <= 2 * len(BODY)
    driven.auto_read = True
    assert [run.body(0) for run in drain(driven, subscription)] == bodies[1:]
    driven.close()


# --- rows ------------------------------------------------------------------------------------------------------------


def old(tmp_path: Path, messages: int = 60, partitions: int = 1) -> tuple[Driven, FakeDisk, list[bytes]]:
    """Return a broker just started on several sealed segments, with nothing of them in memory."""
    driven, disk, bodies = cold(tmp_path, messages, partitions)
    driven.checkpoint()  # seals
    driven.restart()
    disk.forget()
    assert len(list(driven.directory.glob("consumer-log/*/*.order"))) >= 2
    return driven, disk, bodies


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_the_loop_reads_nothing_itself(tmp_path: Path, prefix: str, partitions: int) -> None:
    driven, disk, bodies = old(tmp_path, partitions=partitions)
    mine: Counter[str] = Counter()
    subscription = driven.subscribe(prefix)
    got: list[bytes] = []
    while len(got) < len(bodies):
        before = disk.calls.copy()
        said = driven.do(driven.pull_command(subscription))
        mine += disk.calls - before
        while not said:
            driven.run_reads()
            before = disk.calls.copy()
            driven.finish_reads()
            said = driven.effects()
            mine += disk.calls - before
        got += [body for answer in messages_of(said) for body in bodies_of(runs_of_answer(answer))]
    assert got == bodies
    assert mine["pread"] <= 2 * len(list(driven.directory.glob("consumer-log/*/*.order")))  # headers of orders
    driven.auto_read = True
    driven.close()


@pytest.mark.parametrize("suffix", ["entries", "order"])
@pytest.mark.parametrize("prefix", ["a.", "a.x"])
@pytest.mark.parametrize("ready", [False, True])
def test_rows_that_cannot_be_read_are_made_again(tmp_path: Path, suffix: str, prefix: str, ready: bool) -> None:
    driven, disk, bodies = old(tmp_path)
    driven.auto_read = True
    if ready:  # all is mapped and was checked
        assert bodies_of(driven.pull(driven.subscribe("a.x", group="first")))
        assert [run.body(0) for run in drain(driven, driven.subscribe("", group="before"))] == bodies
        disk.forget()
    path = sorted(driven.directory.glob(f"consumer-log/0/*.{suffix}"))[1]
    before = path.read_bytes()
    disk.spoil(path, 70)
    assert [run.body(0) for run in drain(driven, driven.subscribe(prefix))] == bodies
    assert disk.struck["unreadable"] > 0 or (suffix, prefix) == ("order", "a.")  # a prefix needs no order
    assert path.read_bytes() == before
    disk.bad.clear()
    driven.close()


@pytest.mark.parametrize(("suffix", "prefix"), [("entries", "a."), ("entries", "a.3"), ("order", "a.3")])
def test_files_that_are_cut_beneath_a_broker_do_not_end_it(tmp_path: Path, suffix: str, prefix: str) -> None:
    command = [sys.executable, "-m", "tests.broker.cut_files", str(tmp_path / "data"), suffix, prefix]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == (BATCHES * SUBJECTS if prefix == "a." else BATCHES)


def test_a_start_by_time_is_looked_up_by_a_read(tmp_path: Path) -> None:
    driven, disk, bodies = old(tmp_path)
    driven.store.may_wait(True)
    stamp = driven.store.partitions[0].consumer_log.read_entry(20)[2]
    driven.store.may_wait(False)
    disk.forget()
    subscribe = Subscribe(1, 500, "g", ("a.",), "c", ("time", stamp))
    gone = Subscribe(2, 500, "h", ("a.",), "c", ("time", stamp))
    assert driven.do(subscribe, gone, Disconnected(2)) == []
    said: list[Effect] = []
    while driven.reads:
        said += driven.read()
    (answer,) = said
    assert isinstance(answer, Subscribed)
    assert (answer.connection, answer.request) == (1, 500)
    driven.auto_read = True
    assert [run.body(0) for run in drain(driven, answer.subscription)] == bodies[20:]
    driven.close()


def test_a_checkpoint_reads_no_rows_and_the_next_start_doubles_nothing(tmp_path: Path) -> None:
    driven, disk, bodies = old(tmp_path)
    driven.auto_read = True
    driven.checkpoint()
    driven.send("a.x", b"last")
    got = bodies_of(driven.pull(driven.subscribe("a."), max_count=7))
    disk.forget()
    calls = disk.calls["pread"]
    driven.broker.checkpoint_state(driven.now)
    assert disk.calls["pread"] == calls
    driven.restart()
    got += [run.body(0) for run in drain(driven, driven.subscribe("a."))]
    assert got == [*bodies, b"last"]
    driven.close()


def test_a_repeat_of_what_is_not_in_memory_reads_a_header_by_a_call(tmp_path: Path) -> None:
    driven, disk, _ = cold(tmp_path)
    first = driven.send_command({"a.x": [b"sent twice"], "a.y": [b"and this"]})
    again = first._replace(request=9_999, batch=memoryview(bytearray(first.batch)))
    once = again._replace(batch=memoryview(bytearray(first.batch)))
    (sent,) = driven.do(first)
    assert isinstance(sent, Sent)
    disk.forget()
    before = disk.calls["pread"]
    (repeated,) = driven.do(again)
    assert isinstance(repeated, Sent)
    assert (repeated.request, repeated.position) == (9_999, sent.position)
    assert list(repeated.first_sequences) == list(sent.first_sequences)
    assert 1 <= disk.calls["pread"] - before <= 2
    disk.spoil(*log_path(driven, sent.position))
    (refused,) = driven.do(once)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, StorageFailed)
    disk.bad.clear()
    driven.auto_read = True
    driven.close()


# --- bad sectors -----------------------------------------------------------------------------------------------------


def log_path(driven: Driven, position: int) -> tuple[Path, int]:
    """Return the segment that contains *position*, and the offset in it."""
    bases = sorted(int(path.stem, 16) for path in driven.directory.glob("log-0/*.messages"))
    base = max(base for base in bases if base <= position)
    return driven.directory / "log-0" / f"{base:016x}.messages", position - base


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
@pytest.mark.parametrize("which", range(0, 40, 3))
def test_a_bad_sector_costs_only_what_lies_on_it(tmp_path: Path, prefix: str, which: int) -> None:
    driven, disk, _ = cold(tmp_path, messages=40)
    driven.auto_read = True
    reader = driven.subscribe("", group=None, start="first")
    places = [run.position for run in drain(driven, reader)]
    disk.forget()
    path, offset = log_path(driven, places[which] + 1_500)
    disk.spoil(path, offset)
    page = places[which] + 1_500 - offset % PAGE
    lost = [place for place in places if place < page + PAGE and page < place + 3_200]
    for group in ("g", "h"):
        got = drain(driven, driven.subscribe(prefix, group=group))
        assert [run.position for run in got] == [place for place in places if place not in lost]
    assert disk.struck["unreadable"] > 0
    (told,) = driven.broker.take_damaged()  # once, not for each group
    assert str(path) in str(told)
    assert "Input/output error" in str(told)
    disk.bad.clear()
    driven.close()


@pytest.mark.parametrize("what", ["pread", "open"])
def test_a_disk_that_fails_as_a_whole_makes_groups_wait_and_lose_nothing(tmp_path: Path, what: str) -> None:
    driven, disk, bodies = cold(tmp_path)
    driven.auto_read = True
    subscription = driven.subscribe("a.")
    disk.fail_always(what, errno.EIO, ".messages")
    for _ in range(3):
        (refused,) = driven.do(driven.pull_command(subscription))
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, StorageFailed)
        assert refused.error.retryable
    disk.heal()
    assert [run.body(0) for run in drain(driven, subscription)] == bodies
    driven.close()


def drain(driven: Driven, subscription: int) -> list[Run]:
    """Pull everything that is left for a subscription."""
    runs: list[Run] = []
    while True:
        (answer,) = messages_of(driven.do(driven.pull_command(subscription)))
        if not answer.messages:
            return runs
        found, damaged = read_answer(memoryview(b"".join(answer.buffers)))
        assert not damaged
        runs += found


def ask(driven: Driven, action: str, **fields: object) -> Administer:
    return Administer(1, driven.request(), action, fields)


@pytest.mark.parametrize("disconnects", [False, True])
def test_a_group_that_goes_to_a_time_that_is_not_in_memory_waits_for_a_read(tmp_path: Path, disconnects: bool) -> None:
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, segment_bytes=64 << 10, max_frame_bytes=32 << 10)
    stamps = [driven.send("a.x", b"%d." % number + BODY).stored_at_us for number in range(60)]
    subscription = driven.subscribe("a.")
    driven.restart()
    disk.forget()
    driven.auto_read = False
    assert driven.do(ask(driven, "seek_group", group="g", to=["time", stamps[3]])) == []
    assert driven.reads
    if disconnects:
        driven.do(Disconnected(1))
    said = list[Effect]()
    while driven.reads:
        said += driven.read()
    driven.auto_read = True
    assert [type(effect) for effect in said] == ([] if disconnects else [Administered])
    subscription = driven.subscribe("a.", connection=2)
    found = bodies_of(driven.pull(subscription, connection=2, max_count=1))
    assert found == [b"%d." % (0 if disconnects else 3) + BODY]
    driven.close()


def test_dead_letters_that_are_not_in_memory_are_listed_as_they_are_read(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, segment_bytes=64 << 10, max_frame_bytes=32 << 10)
    for number in range(60):
        driven.send("a.x", b"%d." % number + BODY)
    consumer = Consumer(driven, "c", "a.")
    while consumer.pull(20):
        pass
    for number in range(0, 60, 10):
        consumer.back(number, number + 1, Disposition.REJECT)
    driven.restart()
    driven.auto_read = False
    rows, after = list[dict[str, object]](), 0
    while after is not None:
        disk.forget()
        said = driven.do(ask(driven, "dead_letters", group="g", after=after))
        assert said == []
        while driven.reads:
            said += driven.read()
        (answer,) = said
        assert isinstance(answer, Administered)
        assert answer.fields["rows"], "it waits for nothing else"
        rows += answer.fields["rows"]
        after = answer.fields["after"]
    assert [row["sequence"] for row in rows] == list(range(0, 60, 10))
    driven.auto_read = True
    driven.close()
