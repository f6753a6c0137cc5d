"""Refused and failed commands leave nothing behind."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from qmq.broker.ports.commands import LastSequence, Send, SyncBroken
from qmq.broker.ports.effects import Refused, Sent
from qmq.errors import BadBatch, InvalidName, StorageError, StorageFull, SyncFailed, TooManySubjects
from tests.broker.harness import Driven, batch_of, bodies_of
from tests.fake_disk import FakeDisk

OTHER = b"o" * 16


def test_a_checkpoint_remembers_no_batch_that_is_not_stored(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path / "one", disk=disk)
    driven.send("a", b"0")
    driven.broker.handle(driven.send_command({"a": [b"1"]}), driven.now)  # its turn is not over
    disk.fail_always("pwritev", errno.ENOSPC, ".messages")
    driven.checkpoint()
    driven.broker.turn(driven.now)
    disk.heal()
    (refused,) = driven.effects()
    assert isinstance(refused, Refused)
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # what a kill leaves
    driven.store.close(clean=False)
    after = Driven(tmp_path / "two")
    (sent,) = after.do(Send(1, 1, batch_of({"a": [b"1"]}, 1), True))
    assert isinstance(sent, Sent)
    assert bodies_of(after.pull(after.subscribe("a"))) == [b"0", b"1"]
    after.close()


def test_a_bad_name_in_the_middle_registers_none(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (refused,) = driven.do(Send(1, 1, batch_of({"good": [b"1"], "b..ad": [b"2"], "fine": [b"3"]}, 0), True))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidName)
    assert driven.store.subjects.count == 0
    driven.close()


@pytest.mark.parametrize("others", [{}, {"used": [b"x"]}], ids=["one run", "two runs"])
def test_nobody_sends_to_a_subject_whose_name_is_lost(tmp_path: Path, others: dict[str, list[bytes]]) -> None:
    driven = Driven(tmp_path)
    driven.store.add_subject("never.used")
    driven.send("used", b"1")
    driven.checkpoint()
    driven.store.close(clean=False)
    (tmp_path / "subjects").unlink()
    driven.open()
    assert driven.store.subjects.name(0) == "~lost-0"
    (refused,) = driven.do(Send(1, 1, batch_of({"~lost-0": [b"x"], **others}, 7), True))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidName)
    assert driven.store.subjects.count == 2
    driven.close()


def test_one_subject_too_many_refuses_its_batch_only(tmp_path: Path) -> None:
    driven = Driven(tmp_path, max_subjects=2)
    driven.send("a", b"1")
    said = driven.do(
        Send(1, 90, batch_of({"b": [b"x"], "c": [b"x"]}, 0, OTHER), True),
        Send(1, 91, batch_of({"a": [b"2"]}, 0, OTHER), True),
    )
    by_request = {effect.request: effect for effect in said if isinstance(effect, Refused | Sent)}
    refused = by_request[90]
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, TooManySubjects)
    assert isinstance(by_request[91], Sent)
    assert bodies_of(driven.pull(driven.subscribe(""))) == [b"1", b"2"]
    driven.close()


def test_a_subject_named_twice_in_one_batch_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    whole = bytes(batch_of({"aa": [b"1"], "bb": [b"2"]}, 0))
    twice = whole.replace(b"\xa2bb", b"\xa2aa")
    assert twice != whole
    (answer,) = driven.do(Send(1, 1, memoryview(bytearray(twice)), True))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, BadBatch)
    driven.close()


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", ["pwritev", "open", "ftruncate", "map"])
def test_a_send_that_fails_anywhere_can_be_repeated(tmp_path: Path, operation: str, code: int, nth: int) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk, segment_bytes=16 << 10, max_frame_bytes=8 << 10, partitions=2)
    disk.fail(operation, nth, code)
    bodies = [b"%d." % number + bytes(1_500) for number in range(24)]
    for number in range(0, 24, 3):
        pending = [
            driven.send_command({"a": [bodies[number]], "b": [bodies[number]]}, flush=False),
            driven.send_command({"b": [bodies[number + 1]]}, flush=False),
            driven.send_command({"a": [bodies[number + 2]]}, flush=False),
        ]
        for _ in range(8):
            said = driven.do(*[command._replace(batch=memoryview(bytearray(command.batch))) for command in pending])
            done = {effect.request for effect in said if isinstance(effect, Sent)}
            pending = [command for command in pending if command.request not in done]
            if not pending:
                break
    disk.heal()
    got_a = bodies_of(driven.pull(driven.subscribe("a", group="a")))
    got_b = bodies_of(driven.pull(driven.subscribe("b", group="b")))
    assert sorted(got_a) == sorted(body for number, body in enumerate(bodies) if number % 3 != 1)
    assert sorted(got_b) == sorted(body for number, body in enumerate(bodies) if number % 3 != 2)
    both = bodies_of(driven.pull(driven.subscribe("", group="both")))
    assert sorted(both) == sorted(got_a + got_b)
    driven.close()


# --- order over refusals ---------------------------------------------------------------------------------------------


def test_a_batch_on_its_way_does_not_overtake_one_that_was_refused(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    first, second, third = (driven.send_command({"a": [b"%d" % number]}) for number in range(3))
    disk.fail("pwritev", 1, errno.ENOSPC)
    (refused,) = driven.do(_again(first))
    assert isinstance(refused, Refused)
    for command in (second, third):  # they were written before the answer to the first was read
        (answer,) = driven.do(_again(command))
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, StorageFull)
    for command in (first, second, third):
        (answer,) = driven.do(_again(command))
        assert isinstance(answer, Sent)
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"0", b"1", b"2"]
    driven.close()


def test_a_batch_that_is_given_up_keeps_later_ones_back_once(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    given_up, second = driven.send_command({"a": [b"0"]}), driven.send_command({"a": [b"1"]})
    disk.fail("pwritev", 1, errno.ENOSPC)
    driven.do(_again(given_up))
    assert [type(driven.do(_again(second))[0]) for _ in range(2)] == [Refused, Sent]
    driven.send("a", b"2")
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"1", b"2"]
    driven.close()


def test_a_batch_that_is_wrong_keeps_none_back(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (refused,) = driven.do(Send(1, 1, batch_of({"b..ad": [b"2"]}, 0, driven.producer), True))
    assert isinstance(refused, Refused)
    driven.produced = 1
    driven.send("a", b"1")
    driven.close()


def _again(command: Send) -> Send:
    """Return a copy of a batch, since the broker writes into the one that it gets."""
    return command._replace(batch=memoryview(bytearray(command.batch)))


# --- writes that leave something behind -------------------------------------------------------------------------------


def _left_behind(directory: Path, *contents: dict[str, list[bytes]], partitions: int = 1) -> tuple[Driven, list[Send]]:
    """Return a broker whose last write failed behind the first of several batches, which is in the log."""
    disk = FakeDisk("boot-1")
    driven = Driven(directory, disk=disk, partitions=partitions)
    driven.send("a", b"before", flush=False)
    commands = [driven.send_command(content) for content in contents]
    copies = [_again(command) for command in commands]
    disk.tears = True
    disk.fail("pwritev", 1, errno.EIO)
    disk.fail_always("ftruncate", errno.EIO)
    said = driven.do(*commands)
    disk.heal()
    refused = {effect.request: effect.error for effect in said if isinstance(effect, Refused)}
    assert {command.request for command in commands} == set(refused)
    assert all(isinstance(error, SyncFailed) for error in refused.values())
    return driven, copies


def test_what_a_failed_write_left_is_neither_given_again_nor_stored_twice(tmp_path: Path) -> None:
    driven, copies = _left_behind(tmp_path / "one", {"a": [bytes(500)]}, {"b": [bytes(700), b"b1"]}, partitions=1)
    for command in (*copies, driven.send_command({"a": [b"after"]}), LastSequence(1, 900, driven.producer)):
        (answer,) = driven.do(_again(command) if isinstance(command, Send) else command)
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, SyncFailed)
    assert bodies_of(driven.pull(driven.subscribe(""))) == [b"before"]
    assert [driven.store.subjects.message_count(number, 0, 10) for number in range(2)] == [10 - 1, 10 - 2]
    driven.checkpoint()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    driven.store.close(clean=True)
    after = Driven(tmp_path / "two")
    after.produced = driven.produced
    assert [type(after.do(command)[0]) for command in copies] == [Sent, Sent]
    found = bodies_of(after.pull(after.subscribe("", group="new")))
    assert sorted(found) == sorted([b"before", bytes(500), bytes(700), b"b1"])
    after.close()


def test_other_partitions_go_on_beside_what_a_failed_write_left(tmp_path: Path) -> None:
    driven, copies = _left_behind(tmp_path, {"a": [bytes(500)]}, {"a": [bytes(700)]}, partitions=2)
    sent = driven.send("a", b"after")
    assert (sent.partition, sent.first_sequences) == (1, 3)
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"before", b"after"]
    driven.checkpoint()
    driven.store.close(clean=True)
    driven.open()
    for command in copies:
        assert isinstance(driven.do(command)[0], Sent)
    found = bodies_of(driven.pull(driven.subscribe("a", group="new")))
    assert sorted(found) == sorted([b"before", b"after", bytes(500), bytes(700)])
    driven.close()


# --- syncs that fail -------------------------------------------------------------------------------------------------


def test_a_sync_that_fails_answers_what_came_in_the_same_turn(tmp_path: Path) -> None:
    """The same holds where the store does not know of the failure, as it was none of the disk's."""
    driven = Driven(tmp_path, auto_sync=False)
    waits, staged = driven.send_command({"a": [b"0"]}), driven.send_command({"a": [b"1"]})
    assert driven.do(waits) == []
    driven.broker.handle(staged, driven.now)
    said = driven.do(SyncBroken(0, StorageError("a call to the disk failed: MemoryError()")))
    assert {effect.request for effect in said if isinstance(effect, Refused)} == {waits.request, staged.request}
    assert all(isinstance(effect.error, SyncFailed) for effect in said if isinstance(effect, Refused))
    driven.store.close(clean=False)


def test_nothing_of_a_broken_partition_is_acknowledged_when_it_is_asked_for_again(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    flush, append = driven.send_command({"a": [b"0"]}), driven.send_command({"a": [b"1"]}, flush=False)
    copies = _again(flush), _again(append)
    assert [effect.request for effect in driven.do(flush, append) if isinstance(effect, Sent)] == [append.request]
    driven.do(SyncBroken(0, SyncFailed("fdatasync of log-0 failed: EIO; restart the broker")))
    for command in (*copies, LastSequence(1, driven.request(), driven.producer)):
        (answer,) = driven.do(command)
        assert isinstance(answer, Refused), command
        assert isinstance(answer.error, SyncFailed)
    driven.store.close(clean=False)


def test_other_partitions_go_on_with_the_subjects_of_a_broken_one(tmp_path: Path) -> None:
    """Acknowledged batches are delivered in order, and so are the batches before them."""
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, auto_sync=False, disk=disk, partitions=2)
    driven.do(driven.send_command({"a": [b"a0"]}))
    driven.sync()
    driven.do(driven.send_command({"a": [b"a1"]}))
    driven.wanted.clear()
    driven.do(driven.send_command({"a": [b"a2"]}, flush=False))  # acknowledged, and behind what is not synced
    disk.fail("fdatasync")
    with pytest.raises(SyncFailed) as caught:
        driven.store.partitions[0].sync()
    driven.do(SyncBroken(0, caught.value))
    driven.auto_sync = True
    assert driven.send("a", b"a3").partition == 1
    assert driven.send("a", b"a4", flush=False).partition == 1
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"a0", b"a1", b"a2", b"a3", b"a4"]
    driven.checkpoint()
    driven.store.close(clean=True)
    driven.open()
    assert not driven.store.recovery.clean
    assert bodies_of(driven.pull(driven.subscribe("a", group="new"))) == [b"a0", b"a1", b"a2", b"a3", b"a4"]
    assert driven.pull(driven.subscribe("a")) == []
    driven.close()
