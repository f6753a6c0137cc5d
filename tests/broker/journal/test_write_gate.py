"""Records of groups are written before their answers leave; acks that may wait, with the next messages."""

from __future__ import annotations

import errno
from pathlib import Path

from qmq.broker.journal.write_gate import LATER_US
from qmq.broker.ports.commands import Ack, Administer, Disconnected
from qmq.broker.ports.effects import Acked, Administered, Effect, PulledMessages, Refused, Sent
from tests.broker.harness import Driven
from tests.fake_disk import FakeDisk


class Kept:
    """Return a consumer with two messages in flight and a waiting pull."""

    def __init__(self, tmp_path: Path) -> None:
        self.disk = FakeDisk()
        self.driven = driven = Driven(tmp_path, disk=self.disk)
        driven.send("a.x", b"1", b"2")
        self.subscription = driven.subscribe("a.")
        (answer,) = driven.do(driven.pull_command(self.subscription))
        assert isinstance(answer, PulledMessages)
        assert answer.ranges == ((0, 2, 1),)
        self.pull = driven.pull_command(self.subscription, timeout_ms=60_000)

    def ack(self, start: int, end: int, *more: object) -> list[Effect]:
        self.request = self.driven.request()
        return self.driven.do(Ack(1, self.request, self.subscription, (start, end), True), *more)


def test_an_ack_that_may_wait_is_written_and_answered_with_the_next_messages(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    written = kept.disk.calls["pwritev"]
    assert kept.ack(0, 2, kept.pull) == []
    assert kept.disk.calls["pwritev"] == written
    assert kept.driven.store.groups.staged == 1
    said = kept.driven.do(kept.driven.send_command({"a.x": [b"3"]}, flush=False, connection=2))
    assert [type(one) for one in said] == [Acked, Sent, PulledMessages]
    assert said[0] == Acked(1, kept.request, 0, joins=True)
    assert kept.disk.calls["pwritev"] == written + 2  # a batch, and two records
    kept.driven.store.close(clean=False)
    kept.driven.open()
    in_flight = kept.driven.broker.groups["g"].ledger
    assert in_flight is not None
    assert [(one.in_flight.ack_floor, one.in_flight.next_sequence) for one in in_flight.members.values()] == [(2, 3)]
    kept.driven.close()


def test_an_ack_waits_neither_long_nor_beyond_a_stop(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.ack(0, 1) == []
    assert kept.driven.broker.tick(kept.driven.now) == kept.driven.now.monotonic_us + LATER_US
    assert kept.driven.advance(LATER_US // 1_000 - 1) == []
    assert kept.driven.advance(1) == [Acked(1, kept.request, 0, joins=True)]
    assert kept.driven.store.groups.staged == 0
    assert kept.ack(1, 2) == []
    kept.driven.broker.stop()
    assert kept.driven.do() == [Acked(1, kept.request, 0, joins=True)]
    kept.driven.close()


def test_an_ack_that_may_not_wait_is_written_at_once_with_those_of_others(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    first = kept.ack(0, 1) or kept.request
    said = kept.driven.do(Ack(1, 77, kept.subscription, (1, 2)))
    assert said == [Acked(1, 77, 0)]
    assert kept.driven.store.groups.staged == 0
    assert kept.driven.advance(LATER_US // 1_000) == [Acked(1, first, 0, joins=True)]
    kept.driven.close()


def test_records_for_another_connection_are_written_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    driven = kept.driven
    other = driven.subscribe("a.", group="other", connection=2)
    waits = driven.pull_command(other, timeout_ms=60_000, connection=2)
    assert [type(one) for one in driven.do(waits)] == [PulledMessages]
    assert kept.ack(0, 2) == []
    assert driven.store.groups.staged == 1
    assert driven.do(driven.pull_command(other, timeout_ms=60_000, connection=2)) == []
    assert driven.store.groups.staged == 1
    said = driven.do(driven.send_command({"a.x": [b"3"]}, flush=False, connection=3))
    assert [(type(one), getattr(one, "connection", 0)) for one in said] == [(Sent, 3), (PulledMessages, 2)]
    assert driven.store.groups.staged == 0
    driven.close()


def test_a_checkpoint_writes_acks_and_closed_connections_get_no_answer(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.ack(0, 1) == []
    kept.driven.checkpoint()
    assert kept.driven.store.groups.staged == 0
    assert kept.ack(1, 2) == []
    assert kept.driven.do(Disconnected(1)) == []
    assert kept.driven.store.groups.staged == 0
    assert kept.driven.advance(LATER_US // 1_000) == []
    kept.driven.close()


def test_a_checkpoint_does_not_fail_for_a_write_that_was_made_good(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.disk.fail("pwritev", 1, errno.ENOSPC)
    fields = {"group": "g", "settings": {"max_unacked": 7}}
    said = kept.driven.do(Administer(1, kept.driven.request(), "set_group", fields))
    assert [type(one) for one in said] == [Administered], "the sync that its answer waits for has written the record"
    kept.driven.checkpoint()
    kept.driven.close()


def test_a_wrong_ack_is_refused_at_once(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    (refused,) = kept.ack(2, 1)
    assert isinstance(refused, Refused)
    kept.driven.close()
