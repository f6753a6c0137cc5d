"""Files of the pull log that no start reads any more. They are kept for a while, so that a trace of a message can read
what happened to it.

Such a file has its bytes and its place as before, and is renamed from ``<base>.pulls`` to ``<base>.kept``. So a start,
and all that looks for ``.pulls``, does not even see it. Its records end when the next file was begun.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from qmq.format.layout import PULL_FILE_HEADER_SIZE
from qmq.storage.disk.disk import Disk, failure, read_around
from qmq.storage.pull_log.records import list_pull_files, pull_file_path, pull_file_times

KEPT_SUFFIX: Final = ".kept"


class PullLogKeep(NamedTuple):
    """How long, and up to how many bytes, files are kept that no start reads. 0 in one of them: not at all."""

    keep_us: int = 0
    keep_bytes: int = 0

    def __bool__(self) -> bool:
        return self.keep_us > 0 and self.keep_bytes > 0


KEEP_NONE: Final = PullLogKeep()


class _Known(NamedTuple):
    created_at_us: int
    size: int


def kept_file_path(directory: Path, base: int) -> Path:
    """Return the path of the kept file whose first byte is at position *base*."""
    return directory / f"{base:016x}{KEPT_SUFFIX}"


class KeptPullFiles:
    """The kept files of one directory. All of it belongs to the thread that writes checkpoints."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, keep: PullLogKeep) -> None:
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._keep = keep
        self._known: dict[int, _Known] = {}

    def retire(self, before: int, now_us: int) -> None:
        """[thread] Keep the files that end at or before position *before*, which no start reads again; then remove kept
        files whose records are too old at *now_us*, and the oldest beyond the bound of bytes.

        Raises StorageFailed.
        """
        for base, following in pairwise(list_pull_files(self._disk, self._directory)):
            if following > before:
                break
            path = pull_file_path(self._directory, base)
            try:
                if self._keep:
                    self._disk.rename(path, kept_file_path(self._directory, base))
                else:
                    self._disk.unlink(path)
            except OSError as error:
                raise failure(error, "remove", path) from error
        self._remove_old(now_us)

    def _remove_old(self, now_us: int) -> None:
        kept = list_pull_files(self._disk, self._directory, KEPT_SUFFIX)
        if not kept:
            return
        live = next((base for base in list_pull_files(self._disk, self._directory) if base > kept[-1]), None)
        behind = now_us if live is None else self._look(pull_file_path(self._directory, live), live).created_at_us
        files = [self._look(kept_file_path(self._directory, base), base) for base in kept]
        ends_us = [*(one.created_at_us for one in files[1:]), behind]
        left = sum(one.size for one in files)
        for base, one, end_us in zip(kept, files, ends_us, strict=True):
            if left <= self._keep.keep_bytes and now_us - end_us < self._keep.keep_us:
                return
            path = kept_file_path(self._directory, base)
            try:
                self._disk.unlink(path)
            except OSError as error:
                raise failure(error, "remove", path) from error
            self._known.pop(base, None)
            left -= one.size

    def _look(self, path: Path, base: int) -> _Known:
        """Return the time in the header of a file (0 where the header is bad), and the file's size."""
        known = self._known.get(base)
        if known is None:
            try:
                fd = self._disk.open(path, os.O_RDONLY)
                try:
                    size = self._disk.size(fd)
                    header, _ = read_around(self._disk, fd, min(size, PULL_FILE_HEADER_SIZE), 0)
                finally:
                    self._disk.close(fd)
            except OSError as error:
                raise failure(error, "read", path) from error
            known = self._known[base] = _Known(pull_file_times(header, path, self._store_id, base), size)
        return known
