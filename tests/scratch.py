"""Where tests put their files: in memory, but for those that are about a disk or about processes that wait for it.

A file system in memory is a real one. What it lacks is the time that a sync takes, which is most of the time of a test
that makes a store: no test can see whether bytes have reached a disk, but for those whose disk is simulated.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_MEMORY: Final = Path("/dev/shm")
#: Four workers took 1 GiB at most.
_ROOM_BYTES: Final = 4 << 30
#: Says to processes of a run where temporary files would be.
_DISK: Final = "QMQ_TEST_DISK"


def use_memory() -> None:
    """Put temporary files of this process, and of those that it starts, in memory, unless TMPDIR says where."""
    if "TMPDIR" not in os.environ and _has_room():
        os.environ[_DISK] = tempfile.gettempdir()
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None


def _has_room() -> bool:
    """Return if the system has memory that takes files: containers may have little of it, or run nothing from it."""
    if not os.access(_MEMORY, os.W_OK):
        return False
    system = os.statvfs(_MEMORY)
    return system.f_bavail * system.f_frsize >= _ROOM_BYTES and not system.f_flag & os.ST_NOEXEC


@contextmanager
def factory_on_disk(session: pytest.Session) -> Iterator[pytest.TempPathFactory]:
    """A factory of directories on the disk. Unless tests have failed, all of them go at the end."""
    path = Path(tempfile.mkdtemp(prefix="qmq-tests-", dir=os.environ.get(_DISK)))
    trace = session.config.trace.get("tmpdir")
    yield pytest.TempPathFactory(path / "paths", 1, "failed", trace, _ispytest=True)
    if not session.testsfailed:
        shutil.rmtree(path, ignore_errors=True)
