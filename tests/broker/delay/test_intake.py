"""Delayed batches on their way into the delay log: refusals leave nothing behind."""

from __future__ import annotations

import errno
from pathlib import Path

from qmq.broker.ports.effects import Refused, Sent
from qmq.errors import InvalidName, StorageFull, TooManySubjects
from tests.broker.delay.test_delay import S, command, delay, follow, pulled
from tests.broker.harness import Driven
from tests.fake_disk import FakeDisk


def test_a_subject_over_the_limit_is_refused_at_the_send(tmp_path: Path) -> None:
    driven = Driven(tmp_path, max_subjects=1)
    delay(driven, "a", S)
    (refused,) = driven.do(command(driven, "b", [S]))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, TooManySubjects)
    driven.advance(1_010)
    assert len(pulled(driven, follow(driven))) == 1
    driven.close()


def test_an_invalid_name_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (refused,) = driven.do(command(driven, "no name", [S]))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidName)
    assert not (tmp_path / "delayed").exists()
    driven.close()


def test_a_delay_log_is_made_by_a_later_send_after_an_error(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    disk.fail_always("pwritev", errno.ENOSPC, path_part="delayed")
    first = command(driven, "a", [S])
    again = first._replace(request=driven.request(), batch=memoryview(bytearray(first.batch)))
    (refused,) = driven.do(first)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, StorageFull)
    assert refused.error.retryable
    disk.heal()
    (sent,) = driven.do(again)
    assert isinstance(sent, Sent)
    driven.advance(1_010)
    assert len(pulled(driven, follow(driven))) == 1
    driven.close()
