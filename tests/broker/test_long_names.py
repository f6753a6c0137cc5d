"""The longest names and one byte more, wherever a broker makes a name out of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.ports.commands import Subscribe
from qmq.broker.ports.effects import PulledMessages, Refused
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InvalidName
from qmq.format.copies.for_group import private_batch
from qmq.format.copies.restored import numbered, restored_batches
from qmq.format.private import is_private
from qmq.names import MAX_NAME_BYTES, MAX_SUBJECT_BYTES
from qmq.net.protocol.types import Disposition
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import HOUR_MS, driven_in, segments, send, settle
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, killed
from tests.broker.transfer.test_handover import done, over
from tests.broker.transfer.test_restore import RUN, begin, store
from tests.format.contents import CREATED_US
from tests.format.test_private import run_of

LONG = "s" * MAX_NAME_BYTES
GROUP, CONSUMER = "g" * MAX_NAME_BYTES, "c" * MAX_NAME_BYTES
MODES = pytest.mark.parametrize(("mode", "own"), [("reliable", GROUP), ("broadcast", f"{GROUP}@{CONSUMER}")])
STOPS = pytest.mark.parametrize("stop", [Driven.restart, killed])


def private_names(driven: Driven) -> list[str]:
    names = [driven.store.subjects.name(number) for number in range(driven.store.subjects.count)]
    return [name for name in names if is_private(name)]


@STOPS
@MODES
def test_a_message_of_another_broker_lies_under_the_longest_name(
    tmp_path: Path, mode: str, own: str, stop: Any
) -> None:
    driven = Driven(tmp_path)
    driven.send(LONG, b"first")
    consumer = Consumer(driven, CONSUMER, group=GROUP, mode=mode)
    run = run_of(b"from elsewhere")
    run.subject = LONG
    batch = memoryview(bytearray(private_batch(run, 0, own, b"q" * 16, 0)))
    done(driven, over(driven, group=own, batch=batch, disposition=Disposition.NACK))
    assert private_names(driven) == [f"~{own}~{LONG}"]
    stop(driven)
    consumer.join()
    assert b"from elsewhere" in consumer.pull()
    driven.close()


@STOPS
@MODES
def test_many_of_the_longest_names_are_restored_in_one_batch(tmp_path: Path, mode: str, own: str, stop: Any) -> None:
    driven = Driven(tmp_path)
    driven.send("a.x", b"first")
    consumer = Consumer(driven, CONSUMER, group=GROUP, mode=mode)
    begin(driven, group=own)
    subjects = [f"{number:02}" + LONG[2:] for number in range(20)]
    parts = [(f"~{own}~{subject}", run_of(subject[:2].encode())) for subject in subjects]
    (batch,) = restored_batches(parts, CREATED_US, 1 << 20)
    numbered(batch.buffer, RUN, 0)
    store(driven, memoryview(batch.buffer))
    stop(driven)
    consumer.join()
    assert set(consumer.pull(100)) >= {subject[:2].encode() for subject in subjects}
    driven.close()


@pytest.mark.parametrize("own", [None, GROUP, f"{GROUP}@{CONSUMER}"])
def test_an_answer_with_many_of_the_longest_names_has_no_more_bytes_than_asked_for(
    tmp_path: Path, own: str | None
) -> None:
    driven, most = Driven(tmp_path), 32 << 10
    driven.send("a.x", b"first")
    consumer = Consumer(driven, CONSUMER, group=GROUP, mode="reliable" if own in (None, GROUP) else "broadcast")
    subjects = [f"{number:03}" + LONG[3:] for number in range(150)]
    if own is None:
        driven.do(driven.send_command({subject: [b"tiny"] for subject in subjects}))
        assert len(consumer.pull()) == 151
        consumer.back(0, 151, delay_us=0)
    else:
        begin(driven, group=own)
        parts = [(f"~{own}~{subject}", run_of(b"tiny")) for subject in subjects]
        (batch,) = restored_batches(parts, CREATED_US, 1 << 20)
        numbered(batch.buffer, RUN, 0)
        store(driven, memoryview(batch.buffer))
    consumer.got.clear()
    sizes = list[int]()
    while True:
        command = driven.pull_command(consumer.subscription, max_bytes=most)._replace(expected=consumer.expected)
        (answer,) = [one for one in driven.do(command) if isinstance(one, PulledMessages)]
        if not answer.messages:
            break
        sizes.append(answer.size)
        consumer.take([answer])
    assert len(consumer.got) >= 150
    assert max(sizes) <= most
    assert max(sizes) > most // 2
    driven.close()


@STOPS
@MODES
def test_what_is_carried_forward_lies_under_the_longest_name(tmp_path: Path, mode: str, own: str, stop: Any) -> None:
    limits = BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS)
    driven = driven_in(tmp_path, limits)
    consumer = Consumer(driven, CONSUMER, group=GROUP, mode=mode)
    driven.send(LONG, b"held")
    held = consumer.pull()
    assert held == [b"held"]
    send(driven, 60)
    before = segments(driven)
    driven.advance(2 * HOUR_MS)
    settle(driven)
    assert segments(driven) != before
    assert private_names(driven) == [f"~{own}~{LONG}"]
    stop(driven)
    consumer.join()
    assert consumer.pull(1) == held
    driven.close()


def test_a_damaged_record_of_the_longest_name_is_found_again(tmp_path: Path) -> None:
    own = f"{GROUP}@{CONSUMER}"
    driven = Driven(tmp_path)
    Consumer(driven, CONSUMER, group=GROUP, mode="broadcast")
    run = run_of(b"from elsewhere")
    run.subject = LONG
    done(driven, over(driven, group=own, batch=memoryview(bytearray(private_batch(run, 0, own, b"q" * 16, 0)))))
    driven.send("a.x", b"behind it")
    driven.close()
    path = tmp_path / "subjects"
    data = path.read_bytes()
    at = data.index(b"~g")
    assert len(own) + len(LONG) + 2 == MAX_SUBJECT_BYTES
    path.write_bytes(data[:at] + b"x" + data[at + 1 :])
    assert verify(tmp_path, Disk()).faults
    driven.open()
    assert private_names(driven) == [f"~{own}~{LONG}"]
    driven.close()


@pytest.mark.parametrize("mode", ["reliable", "broadcast"])
@pytest.mark.parametrize(
    ("group", "consumer", "subject"), [("g", "c", "s" * 201), ("g", "c" * 201, "s"), ("g" * 201, "c", "s")]
)
def test_one_byte_more_is_refused_and_nothing_is_made(
    tmp_path: Path, mode: str, group: str, consumer: str, subject: str
) -> None:
    driven = Driven(tmp_path)
    (answer,) = driven.do(Subscribe(1, driven.request(), group, (subject,), consumer, None, mode=mode))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, InvalidName)
    assert ask(driven, "groups")["rows"] == []
    driven.close()
