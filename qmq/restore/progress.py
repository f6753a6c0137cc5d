"""How far a restore has come, kept beside the archive: ``restores/<selection>-<store>.progress``, one line of JSON.

It is written when all that it tells of is on disk at the broker. What was sent since is looked up there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from crc32c import crc32c

from qmq.archive.files import WritableFiles
from qmq.errors import BadBytes, ForeignFile
from qmq.intervals import Intervals

DIRECTORY: Final = "restores"
SUFFIX: Final = ".progress"
VERSION: Final = 1
_RANGES: Final = ("done", "in_files", "by_files")


@dataclass
class Counts:
    """Messages of a restore, over all its runs; those that are stored, and those that were left out."""

    restored: int = 0
    restored_bytes: int = 0
    #: Of one group alone, or restored before.
    private: int = 0
    replayed: int = 0
    #: That were bad beside others of their batch, and such batches: they are not looked at again.
    damaged: int = 0
    damages: int = 0


@dataclass
class RestoreProgress:
    """Of one restore to the brokers of *stores* (hex). ``run`` is 16 bytes, in hex."""

    run: str
    stores: list[str]
    started_at_us: int
    #: Who was sent to last, and since which positions, one a partition, may have what is not told of here.
    store: str
    since: list[int] | None = None
    #: The number of the next message.
    following: int = 0
    finished_at_us: int = 0
    counts: Counts = field(default_factory=Counts)
    #: Positions that are dealt with, by log; rows, by file of Parquet.
    done: dict[str, Intervals] = field(default_factory=dict)
    #: Positions that the archive has had as Parquet, by log; and those of them that are read from that.
    in_files: dict[str, Intervals] = field(default_factory=dict)
    by_files: dict[str, Intervals] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The bytes of the file."""
        ranges = {name: _numbers(getattr(self, name)) for name in _RANGES}
        content = {**vars(self), "counts": vars(self.counts), **ranges, "version": VERSION}
        return _json({**content, "check": _check(content)}) + b"\n"


def parse_progress(data: bytes, name: str) -> RestoreProgress:
    """Read a file of progress. Raises BadBytes when it is not what was written, ForeignFile for a newer version."""
    remove = "remove it to begin that restore anew: what it has brought would come again"
    try:
        content: dict[str, Any] = json.loads(data)
        check = content.pop("check")
        if check != _check(content):
            raise BadBytes(f"{name} does not fit its checksum; {remove}")
        version = content.pop("version")
        if version > VERSION:
            raise ForeignFile(f"{name} has format version {version}; this QMQ reads {VERSION}: use a newer one")
        ranges: dict[str, Any] = {name: _intervals(content.pop(name)) for name in _RANGES}
        return RestoreProgress(**{**content, "counts": Counts(**content["counts"])}, **ranges)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBytes(f"{name} does not tell of a restore ({error!r:.80}); {remove}") from error


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
    """Where the progress of a restore lies, without suffix: by its selection and the first of its stores."""
    return f"{DIRECTORY}/{digest}-{store}"


def find(files: WritableFiles, digest: str) -> dict[str, RestoreProgress]:
    """All restores of that selection, by path. Raises BadBytes, ForeignFile, StorageFailed."""
    found = {}
    for name in files.names(DIRECTORY):
        if name.startswith(f"{digest}-") and name.endswith(SUFFIX):
            path = f"{DIRECTORY}/{name}"
            found[path.removesuffix(SUFFIX)] = parse_progress(files.read_whole(path), f"{files.name}/{path}")
    return found


def write(files: WritableFiles, path: str, progress: RestoreProgress) -> None:
    """Put it in the place of what was there. Raises StorageFull, StorageFailed."""
    draft = f"{path}.new"
    files.write(draft, progress.pack())
    files.rename(draft, path + SUFFIX)


def _check(content: dict[str, Any]) -> str:
    return f"{crc32c(_json(content)):08x}"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
