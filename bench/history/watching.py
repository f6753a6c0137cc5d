"""Measure the processor time and memory of this process and all its descendants."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.peers.processes import descendants

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_LOOK_EVERY_S: Final = 0.25


def cpu_s() -> float:
    """Return the seconds of processor time so far, of running processes and of those that these have waited for."""
    return sum(_ticks(pid) for pid in descendants({os.getpid()})) / _TICKS


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(field) for field in fields[11:15])


def _own_bytes(pid: int) -> tuple[str, int]:
    """Return the name of a process, and its RssAnon."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    told = dict(line.partition(":\t")[::2] for line in lines)
    return told.get("Name", ""), int(told.get("RssAnon", "0 kB").split()[0]) << 10


class Memory:
    """The most RssAnon of a process in bytes, by its name, sampled four times a second in a block."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._ends = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        """Sample until the block ends."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            thread.join()

    def _watch(self) -> None:
        while True:
            for pid in descendants({os.getpid()}):
                name, size = _own_bytes(pid)
                self.most[name] = max(self.most.get(name, 0), size)
            if self._ends.wait(_LOOK_EVERY_S):
                return
