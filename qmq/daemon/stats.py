"""Answers the action stats: adds what only the process knows to the statistics of the broker.

It serves ``qmq stats``, ``qmq top``, the console and ``client.admin.stats``, so it may be asked every second.
"""

from __future__ import annotations

import os
import platform
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from qmq.broker.ports.commands import InfoFound, Now
from qmq.broker.ports.effects import StatsWanted
from qmq.broker.ports.metrics import Times
from qmq.daemon.file_survey import FileSurvey, SurveyedFiles
from qmq.daemon.info import DiskSpace, DiskSurvey, info_found
from qmq.storage.store import Store
from qmq.version import VERSION

#: How long the count of open files is good, in microseconds.
_FILES_US: Final = 10_000_000
_PAGE_BYTES: Final = resource.getpagesize()


class StatsAnswers:
    """Answers StatsWanted of one broker."""

    def __init__(
        self, store: Store, started: Now, clock: Callable[[], Now], survey: DiskSurvey,
        file_survey: FileSurvey, times: Times, traffic: Callable[[], dict[str, Any]],
        checkpoint_age_us: Callable[[], int], submit: Callable[[InfoFound], None],
    ) -> None:  # fmt: skip
        """*traffic* returns the fields of the server. *submit* takes the answers."""
        self._store = store
        self._started = started
        self._clock = clock
        self._survey = survey
        self._file_survey = file_survey
        self._times = times
        self._traffic = traffic
        self._checkpoint_age_us = checkpoint_age_us
        self._submit = submit
        self._files = 0
        self._files_us = -_FILES_US

    def answer(self, wanted: StatsWanted) -> None:
        """Answer a request, once the disks have."""
        self._survey.ask(partial(self._found, wanted))

    def _found(self, wanted: StatsWanted, disks: tuple[DiskSpace, ...]) -> None:
        self._file_survey.ask(partial(self._found_all, wanted, disks))

    def _found_all(self, wanted: StatsWanted, disks: tuple[DiskSpace, ...], files: SurveyedFiles | None) -> None:
        self._submit(info_found(wanted, lambda: self._fields(wanted, disks, files)))

    def _fields(self, wanted: StatsWanted, disks: tuple[DiskSpace, ...], files: SurveyedFiles | None) -> dict[str, Any]:
        now = self._clock()
        fields: dict[str, Any] = {
            **wanted.fields,
            **self._traffic(),
            "version": VERSION,
            "python": platform.python_version(),
            "store_id": self._store.store_id,
            "started_us": self._started.wall_us,
            "uptime_us": now.monotonic_us - self._started.monotonic_us,
            "checkpoint_age_us": self._checkpoint_age_us(),
            "disks": [disk._asdict() for disk in disks],
            "file_bytes": {} if files is None else files.kinds,
            "archive": None if files is None or files.archive is None else files.archive._asdict(),
            "durations": {
                "turn": self._times.turn.packed(),
                "send": self._times.send.packed(),
                "fsync": self._times.fsync.packed(),
            },
            "process": self._process(now),
        }
        return fields

    def _process(self, now: Now) -> dict[str, int]:
        if now.monotonic_us - self._files_us >= _FILES_US:
            self._files, self._files_us = _open_files(), now.monotonic_us
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu_us": int((used.ru_utime + used.ru_stime) * 1e6),
            "memory_bytes": _memory_bytes(),
            "files": self._files,
            "threads": threading.active_count(),
        }


def _open_files() -> int:
    """Return how many files and sockets the process has open; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _memory_bytes() -> int:
    """Return the memory that the process has for itself, without mapped files; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES
