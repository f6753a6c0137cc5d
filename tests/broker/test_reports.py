"""Reports of clients: the place is read again; what is sound is answered, what is bad is served no more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.broker import reports
from qmq.broker.ports.commands import Report, Send
from qmq.broker.ports.effects import CheckWanted, Effect, Refused, Reported
from qmq.format.batch import parse_header
from qmq.format.build import MessageHeader, RunContent, build_batch
from qmq.format.pieces import Run, read_answer
from tests.broker.harness import PRODUCER, START_US, Driven, bodies_of
from tests.storage.disks import HastyDisk
from tests.storage.faults import FaultyDisk
from tests.storage.stores import segment_files

SEVERAL = {"a.x": [b"0", b"1", b"2"], "a.y": [b"3", b"4"], "b": [b"5"]}


def report(driven: Driven, position: int, first: int = 0, messages: int = 0, partition: int = 0) -> Reported:
    (answer,) = driven.do(Report(1, driven.request(), partition, position, first, messages, "it looks bad"))
    assert isinstance(answer, Reported), answer
    return answer


def runs_in(answer: Effect) -> list[Run]:
    assert isinstance(answer, Reported)
    payload = b"".join(answer.buffers)
    assert len(payload) == answer.size
    runs, damaged = read_answer(memoryview(payload))
    assert not damaged
    return runs


def sent_batch(driven: Driven) -> int:
    """A batch of several runs among others; its position."""
    driven.send("a.x", b"before")
    position = driven.store.end(0)
    driven.do(driven.send_command(SEVERAL))
    driven.send("a.x", b"after")
    return position


def rot(driven: Driven, position: int, offset: int) -> None:
    place = driven.store.place_of(0, position + offset)
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 4]))


def test_what_is_sound_is_sent_again(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    whole = report(driven, position)
    assert (whole.found, len(whole.buffers)) == ("sound", 1)
    assert bodies_of(runs_in(whole)) == [b"%d" % number for number in range(6)]
    part = report(driven, position, 1, 3)
    assert part.found == "sound"
    assert bodies_of(runs_in(part)) == [b"0", b"1", b"2", b"3", b"4"]  # whole runs, whose checksums decide
    assert (driven.broker.counters.reports, driven.broker.counters.sound_reports) == (2, 2)
    assert driven.broker.take_damaged() == []
    driven.close()


def test_what_is_bad_is_told_of_once_and_served_no_more(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    size = driven.store.read_entry(0, 1)[10]
    rot(driven, position, size - 17)  # in the run of a.y, or the last: its columns or bodies
    rotten = driven.store.view(0, position, size)
    found, (lost,) = read_answer(rotten)
    answer = report(driven, position)
    assert answer.found == "bad"
    assert bodies_of(runs_in(answer)) == bodies_of(found)
    for _ in range(2):
        assert report(driven, position, lost.first, lost.messages).found == "bad"
    (news,) = driven.broker.take_damaged()
    file, *_ = segment_files(tmp_path)
    assert str(news).startswith(f"{file} at offset {driven.store.place_of(0, position).offset} ")
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
    driven = Driven(tmp_path, disk=HastyDisk())
    bodies = [b"message %02d" % number for number in range(50)]
    position = driven.send("a", *bodies).position
    size = driven.store.read_entry(0, 0)[10]
    rot(driven, position, size - 10 * 20 - 5)
    (bad,) = read_answer(driven.store.view(0, position, size))[1]
    assert report(driven, position, bad.first, 1).found == "bad"
    good = bodies[: bad.first] + bodies[bad.first + 1 :]
    assert bodies_of(driven.pull(driven.subscribe("a", group="exact"), left_out=1)) == good
    assert bodies_of(driven.pull(driven.subscribe("", group="all"), left_out=1)) == good
    cut, number = list[bytes](), driven.subscribe("a", group="cut")
    while got := driven.pull(number, left_out=int(len(cut) == 7 * (bad.first // 7)), max_count=7):
        cut += bodies_of(got)
    assert cut == good


def test_a_rotten_header_costs_its_batch(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    rot(driven, position, 40)
    answer = report(driven, position)
    assert (answer.found, answer.buffers) == ("bad", [])
    assert bodies_of(driven.pull(driven.subscribe(""), left_out=6)) == [b"before", b"after"]
    assert len(driven.broker.take_damaged()) == 1


def test_a_pull_that_comes_upon_a_bad_header_tells_of_it_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    rot(driven, position, 40)
    for group in ("one", "two"):
        assert bodies_of(driven.pull(driven.subscribe("a.x", group=group), left_out=3)) == [b"before", b"after"]
    (news,) = driven.broker.take_damaged()
    assert f"(position {position} of partition 0)" in str(news)
    assert driven.broker.counters.damaged == {"pull": 1}


def test_headers_that_nobody_can_decode_are_bad(tmp_path: Path) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    headers = [MessageHeader(b"\x81\xa1k\x91\xa1k", 0, 0), MessageHeader(b"\xc1junk", 0, 0), MessageHeader(b"", 0, 0)]
    parts = build_batch(
        [RunContent("a", [b"0", b"1", b"2"], headers)],
        created_at_us=START_US,
        producer_id=PRODUCER,
        producer_sequence=0,
    )
    driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    position = driven.store.read_entry(0, 0)[1]
    assert report(driven, position, 0, 1).found == "sound"
    answer = report(driven, position, 0, 2)
    assert answer.found == "bad"
    assert bodies_of(runs_in(answer)) == [b"0", b"2"]
    (news,) = driven.broker.take_damaged()
    assert "not valid msgpack" in str(news)
    assert bodies_of(driven.pull(driven.subscribe("a"), left_out=1)) == [b"0", b"2"]


@pytest.mark.parametrize(("partition", "shift"), [(0, 1), (0, 1 << 40), (7, 0)])
def test_places_where_no_batch_begins_are_unknown(tmp_path: Path, partition: int, shift: int) -> None:
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    answer = report(driven, position + shift, partition=partition)
    assert (answer.found, answer.buffers) == ("unknown", [])
    driven.close()


def test_a_disk_that_refuses_to_read_is_no_rot(tmp_path: Path) -> None:
    disk = FaultyDisk()
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
    driven = Driven(tmp_path, disk=HastyDisk())
    position = sent_batch(driven)
    monkeypatch.setattr(reports, "MAX_ALL_REPORTS", reports.MAX_REPORTS + 1)

    def ask(connection: int) -> Effect:
        driven.broker.handle(Report(connection, driven.request(), 0, position, 0, 0, ""), driven.now)
        (effect,) = driven.broker.take_effects()
        return effect

    wanted = [ask(1) for _ in range(reports.MAX_REPORTS)]
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


def test_the_header_of_a_report_of_the_current_segment(tmp_path: Path) -> None:
    """What was written a moment ago can be checked as well."""
    driven = Driven(tmp_path, disk=HastyDisk())
    position = driven.send("a", b"now").position
    (run,) = runs_in(report(driven, position))
    assert parse_header(driven.store.view(0, position, 96)).position == run.position
    driven.close()
