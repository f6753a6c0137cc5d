"""Reports of clients: the broker reads the place again, and serves bad bytes no more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.broker import damage
from qmq.broker.ports.commands import Report, Send
from qmq.broker.ports.effects import CheckWanted, Effect, PulledMessages, Refused, Reported
from qmq.format.build import MessageHeader, RunContent, build_batch
from qmq.format.layout import BATCH_HEADER_SIZE
from qmq.format.pieces import read_answer
from tests.broker.harness import PRODUCER, START_US, Driven, bodies_of, runs_of_answer
from tests.fake_disk import FakeDisk
from tests.storage.stores import segment_files

SEVERAL = {"a.x": [b"0", b"1", b"2"], "a.y": [b"3", b"4"], "b": [b"5"]}


def report(driven: Driven, position: int, first: int = 0, messages: int = 0, partition: int = 0) -> Reported:
    (answer,) = driven.do(Report(1, driven.request(), partition, position, first, messages, "it looks bad"))
    assert isinstance(answer, Reported), answer
    return answer


def sent_batch(driven: Driven) -> int:
    """Store a batch of several runs among others, and return its position."""
    driven.send("a.x", b"before")
    position = driven.store.partitions[0].message_log.end
    driven.do(driven.send_command(SEVERAL))
    driven.send("a.x", b"after")
    return position


def rot(driven: Driven, position: int, offset: int) -> None:
    place = driven.store.partitions[0].message_log.file_offset_of(position + offset)
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 4]))


def test_what_is_sound_is_told_so(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    assert report(driven, position).found == "sound"
    assert report(driven, position, 1, 3).found == "sound"
    assert (driven.broker.counters.reports, driven.broker.counters.sound_reports) == (2, 2)
    assert driven.broker.take_damaged() == []
    driven.close()


def test_what_is_bad_is_told_of_once_and_served_no_more(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    size = driven.store.partitions[0].consumer_log.read_entry(1)[10]
    rot(driven, position, size - 17)  # in the run of a.y, or the last: its columns or bodies
    rotten = driven.store.partitions[0].message_log.view(position, size)
    found, (lost,) = read_answer(rotten)
    assert report(driven, position).found == "bad"
    for _ in range(2):
        assert report(driven, position, lost.first, lost.messages).found == "bad"
    (news,) = driven.broker.take_damaged()
    file, *_ = segment_files(tmp_path)
    assert str(news).startswith(
        f"{file} at offset {driven.store.partitions[0].message_log.file_offset_of(position).offset} "
    )
    assert driven.broker.counters.damaged == {"report": 1}
    rotten_subject = ["a.x", "a.x", "a.x", "a.y", "a.y", "b"][lost.first]
    for prefix in ("", "a.", "a.x", "a.y", "b"):
        left_out = lost.messages if rotten_subject.startswith(prefix) else 0
        got = bodies_of(driven.pull(driven.subscribe(prefix, group=None, start="first"), left_out=left_out))
        others = [b"before", b"after"] if "a.x".startswith(prefix) else []
        matching = [run for run in found if run.subject.startswith(prefix)]
        assert sorted(got) == sorted(bodies_of(matching) + others), prefix
    assert driven.broker.take_damaged() == []


def test_one_bad_message_leaves_the_others_of_its_run(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    bodies = [b"message %02d" % number for number in range(50)]
    position = driven.send("a", *bodies).position
    size = driven.store.partitions[0].consumer_log.read_entry(0)[10]
    rot(driven, position, size - 10 * 20 - 5)
    (bad,) = read_answer(driven.store.partitions[0].message_log.view(position, size))[1]
    assert report(driven, position, bad.first, 1).found == "bad"
    good = bodies[: bad.first] + bodies[bad.first + 1 :]
    assert bodies_of(driven.pull(driven.subscribe("a", group="exact"), left_out=1)) == good
    assert bodies_of(driven.pull(driven.subscribe("", group="all"), left_out=1)) == good
    cut, number = list[bytes](), driven.subscribe("a", group="cut")
    while got := driven.pull(number, left_out=int(len(cut) == 7 * (bad.first // 7)), max_count=7):
        cut += bodies_of(got)
    assert cut == good


def test_a_rotten_header_costs_its_batch(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    rot(driven, position, 40)
    assert report(driven, position).found == "bad"
    assert bodies_of(driven.pull(driven.subscribe(""), left_out=6)) == [b"before", b"after"]
    assert len(driven.broker.take_damaged()) == 1


def test_a_pull_that_comes_upon_a_bad_header_tells_of_it_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    rot(driven, position, 40)
    for group in ("one", "two"):
        assert bodies_of(driven.pull(driven.subscribe("a.x", group=group), left_out=3)) == [b"before", b"after"]
    (news,) = driven.broker.take_damaged()
    assert f"(position {position} of partition 0)" in str(news)
    assert driven.broker.counters.damaged == {"pull": 1}


def test_headers_that_nobody_can_decode_are_bad(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    headers = [MessageHeader(b"\x81\xa1k\x91\xa1k", 0, 0), MessageHeader(b"\xc1junk", 0, 0), MessageHeader(b"", 0, 0)]
    parts = build_batch(
        [RunContent("a", [b"0", b"1", b"2"], headers)],
        created_at_us=START_US,
        producer_id=PRODUCER,
        producer_sequence=0,
    )
    driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    position = driven.store.partitions[0].consumer_log.read_entry(0)[1]
    assert report(driven, position, 0, 1).found == "sound"
    assert report(driven, position, 0, 2).found == "bad"
    (news,) = driven.broker.take_damaged()
    assert "not valid msgpack" in str(news)
    assert bodies_of(driven.pull(driven.subscribe("a"), left_out=1)) == [b"0", b"2"]


@pytest.mark.parametrize(("partition", "shift"), [(0, 1), (0, 1 << 40), (7, 0)])
def test_places_where_no_batch_begins_are_unknown(tmp_path: Path, partition: int, shift: int) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    assert report(driven, position + shift, partition=partition).found == "unknown"
    driven.close()


def test_a_disk_that_refuses_to_read_is_no_rot(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    position = sent_batch(driven)
    disk.fail_always("open", errno.EMFILE, ".messages")
    (answer,) = driven.do(Report(1, driven.request(), 0, position, 0, 0, ""))
    assert isinstance(answer, Refused)
    assert answer.error.retryable
    disk.heal()
    assert report(driven, position).found == "sound"
    disk.fail_always("preadv", errno.EIO, ".messages")
    assert report(driven, position).found == "bad"
    disk.heal()
    assert bodies_of(driven.pull(driven.subscribe(""), left_out=6)) == [b"before", b"after"]


def test_reports_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, disk=FakeDisk())
    position = sent_batch(driven)
    monkeypatch.setattr(damage, "MAX_ALL_REPORTS", damage.MAX_REPORTS + 1)

    def ask(connection: int) -> Effect:
        driven.broker.handle(Report(connection, driven.request(), 0, position, 0, 0, ""), driven.now)
        (effect,) = driven.broker.take_effects()
        return effect

    wanted = [ask(1) for _ in range(damage.MAX_REPORTS)]
    refused = ask(1)
    assert isinstance(refused, Refused)
    assert refused.error.code == "overloaded"
    wanted.append(ask(2))
    assert isinstance(ask(3), Refused)
    for effect in wanted:
        assert isinstance(effect, CheckWanted)
        driven.broker.handle(driven.check(effect), driven.now)
    assert [type(effect) for effect in driven.broker.take_effects()] == [Reported] * len(wanted)
    assert report(driven, position).found == "sound"
    driven.close()


def test_a_report_of_the_current_segment(tmp_path: Path) -> None:
    """A batch that was written a moment ago can be checked too."""
    driven = Driven(tmp_path, disk=FakeDisk())
    position = driven.send("a", b"now").position
    assert report(driven, position).found == "sound"
    driven.close()


# --- pulls that have headers checked ---------------------------------------------------------------------------------


def spoil(driven: Driven, position: int) -> None:
    """Overwrite a whole header with zeros."""
    place = driven.store.partitions[0].message_log.file_offset_of(position)
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(BATCH_HEADER_SIZE))


@pytest.mark.parametrize("group", ["g", None])
@pytest.mark.parametrize("lost", [1, 6])
def test_a_pull_that_checks_passes_a_spoiled_header(tmp_path: Path, group: str | None, lost: int) -> None:
    """The first answer has the batch whole as it lies, the next one all other messages."""
    driven = Driven(tmp_path, disk=FakeDisk())
    before = driven.send("a.x", b"before").position
    position = driven.store.partitions[0].message_log.end
    driven.do(driven.send_command(SEVERAL if lost > 1 else {"a.x": [b"one"]}))
    driven.send("a.x", b"after")
    number = driven.subscribe("", group=group, start=None if group else "first")
    spoil(driven, position)
    (answer,) = driven.do(driven.pull_command(number))
    assert isinstance(answer, PulledMessages)
    assert read_answer(memoryview(b"".join(answer.buffers)))[1]
    assert driven.broker.take_damaged() == []
    if group is None:
        number = driven.subscribe("", group=None, start="first")
    expected = None if group is None else answer.ranges[0][0]
    (again,) = driven.do(driven.pull_command(number, expected=expected, checks=True))
    assert bodies_of(runs_of_answer(again, 0 if group else lost)) == [b"before", b"after"]
    (news,) = driven.broker.take_damaged()
    assert f"(position {position} of partition 0)" in str(news)
    assert (
        driven.store.partitions[0].message_log.unreadable.within(before, driven.store.partitions[0].message_log.end)
        != []
    )
    if group is not None:
        assert isinstance(again, PulledMessages)
        assert [attempt for _, _, attempt in again.ranges] == [1, 1]


def test_a_pull_again_that_cuts_a_batch_tells_of_its_header(tmp_path: Path) -> None:
    """The first answer has the batch whole as it lies; the next one has room for a part of it, and need not check."""
    driven = Driven(tmp_path, disk=FakeDisk())
    position = driven.store.partitions[0].message_log.end
    driven.send("a.x", b"0", b"1", b"2")
    number = driven.subscribe("")
    rot(driven, position, 78)
    (answer,) = driven.do(driven.pull_command(number))
    assert isinstance(answer, PulledMessages)
    assert driven.broker.take_damaged() == []
    for _ in range(2):
        (again,) = driven.do(driven.pull_command(number, 2, expected=0))
        assert bodies_of(runs_of_answer(again)) == []
    (news,) = driven.broker.take_damaged()
    assert f"(position {position} of partition 0)" in str(news)
