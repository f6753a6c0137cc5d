"""The progress of a restore, saved beside the archive: ``restores/<selection>-<store>.progress``, one line of JSON.

It names only what the broker has on disk. What was sent later is looked up in the broker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from crc32c import crc32c

from qmq.archive.files import WritableFiles
from qmq.errors import BadBytes
from qmq.format.versions import check_version
from qmq.intervals import Intervals

DIRECTORY: Final = "restores"
SUFFIX: Final = ".progress"
VERSION: Final = 1
_RANGES: Final = ("done", "in_files", "by_files")


@dataclass
class Counts:
    """The counts of a restore over all its runs: messages that are stored, and messages that were left out."""

    restored: int = 0
    restored_bytes: int = 0
    #: Messages of one group alone, and messages that were restored before.
    private: int = 0
    replayed: int = 0
    #: Bad messages in batches that are partly good, and bad ranges in these: they are not read again.
    damaged: int = 0
    damages: int = 0


@dataclass
class RestoreProgress:
    """The progress of one restore to the brokers of *stores* (hex). ``run`` is 16 bytes, in hex."""

    run: str
    stores: list[str]
    started_at_us: int
    #: The store that was sent to last, and the position in each partition from which on it may have messages that are
    #: not recorded here.
    store: str
    since: list[int] | None = None
    #: The number of the next message.
    following: int = 0
    finished_at_us: int = 0
    counts: Counts = field(default_factory=Counts)
    #: Positions that are done, by log; rows, by Parquet file.
    done: dict[str, Intervals] = field(default_factory=dict)
    #: Positions that the archive has had as Parquet, by log; and those of them that are read from Parquet.
    in_files: dict[str, Intervals] = field(default_factory=dict)
    by_files: dict[str, Intervals] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        ranges = {name: _numbers(getattr(self, name)) for name in _RANGES}
        content = {**vars(self), "counts": vars(self.counts), **ranges, "version": VERSION}
        return _json({**content, "check": _check(content)}) + b"\n"


def parse_progress(data: bytes, name: str) -> RestoreProgress:
    """Parse a progress file. Raises BadBytes if it is damaged, ForeignFile for a newer version."""
    remove = "remove it to begin that restore anew, which sends all its messages again"
    try:
        content: dict[str, Any] = json.loads(data)
        check = content.pop("check")
        if check != _check(content):
            raise BadBytes(f"{name} does not fit its checksum; {remove}")
        version = content.pop("version")
        check_version(name, version, VERSION)
        ranges: dict[str, Any] = {name: _intervals(content.pop(name)) for name in _RANGES}
        return RestoreProgress(**{**content, "counts": Counts(**content["counts"])}, **ranges)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBytes(f"{name} does not have the progress of a restore ({error!r:.80}); {remove}") from error


def _numbers(ranges: dict[str, Intervals]) -> dict[str, list[int]]:
    return {log: [one for pair in intervals for one in pair] for log, intervals in ranges.items()}


def _intervals(given: dict[str, list[int]]) -> dict[str, Intervals]:
    found = dict[str, Intervals]()
    for log, numbers in given.items():
        intervals = found[log] = Intervals()
        for start, end in zip(numbers[::2], numbers[1::2], strict=True):
            intervals.add(start, end)
    return found


def path_of(digest: str, store: str) -> str:
    """Return the path of the progress of a restore, without suffix: by its selection and the first of its stores."""
    return f"{DIRECTORY}/{digest}-{store}"


def find(files: WritableFiles, digest: str) -> dict[str, RestoreProgress]:
    """Return all restores of a selection, by path. Raises BadBytes, ForeignFile, StorageFailed."""
    found = {}
    for name in files.names(DIRECTORY):
        if name.startswith(f"{digest}-") and name.endswith(SUFFIX):
            path = f"{DIRECTORY}/{name}"
            found[path.removesuffix(SUFFIX)] = parse_progress(files.read_whole(path), f"{files.name}/{path}")
    return found


def write(files: WritableFiles, path: str, progress: RestoreProgress) -> None:
    """Write the progress, replacing the file. Raises StorageFull, StorageFailed."""
    draft = f"{path}.new"
    files.write(draft, progress.pack())
    files.rename(draft, path + SUFFIX)


def _check(content: dict[str, Any]) -> str:
    return f"{crc32c(_json(content)):08x}"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
