"""One file of a data directory, changed at will, into what reads its records, in memory and without a broker.

What is read is what was written, or told to be bad: a record is never guessed. Several thousand inputs take as long as
a hundred of those that open a whole store.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from crc32c import crc32c

from fuzz import groups
from fuzz.target import GrowthCheck, Picks, edited, scratch_directory
from qmq.errors import QmqError
from qmq.format.layout import (
    DELAY_DTYPE,
    ENTRIES_MAGIC,
    INDEX_MAGIC,
    ORDER_MAGIC,
    RETRY_DTYPE,
    SCHEDULE_HEADER_SIZE,
)
from qmq.storage.consumer_log.header import parse_derived
from qmq.storage.disk.disk import write_fully
from qmq.storage.error_log import item_file as item_log
from qmq.storage.error_log import timer_queue as schedule
from qmq.storage.error_log.sorted_runs import RunClaim, SortedRun
from qmq.storage.meta.checkpoint import read_checkpoint
from qmq.storage.meta.identity import pack_identity, read_copies
from qmq.storage.meta.subjects import check_header, parse_records
from qmq.storage.pull_log.records import read_pull_log
from tests.sim.disk import SimulatedDisk

_ROOT: Final = Path("/data")
_MOST_GROWTH_BYTES: Final = 16 << 20
_MEMORY_ITEMS: Final = 4
_ENVELOPE_BYTES: Final = 20
_DERIVED_MAGICS: Final = {".entries": ENTRIES_MAGIC, ".index": INDEX_MAGIC, ".order": ORDER_MAGIC}


@dataclass(frozen=True)
class Change:
    """What an input makes of a file; *forged*: with a checksum that fits."""

    path: Path
    before: bytes
    after: bytes
    forged: bool


class Records:
    """Into the readers of the pull log, of runs, checkpoints, identities, the registry and derived files."""

    def __init__(self) -> None:
        self._files = _files()
        self._names = sorted(name for name in self._files if _kind(name) is not None)
        self._disk = SimulatedDisk(1)
        made = set[Path]()
        for name in self._files:
            for parent in reversed((_ROOT / name).parents):
                if parent not in made:
                    self._disk.mkdir(parent)
                    made.add(parent)
            self._write(name, self._files[name])
        identity = read_copies(self._disk, _ROOT)[0].identity
        assert identity is not None
        self._identity = identity
        self._readers: dict[str, Callable[[Change], None]] = {
            "pulls": self._pulls,
            "run": self._run,
            "checkpoint": self._checkpoint,
            "identity": self._identities,
            "subjects": self._subjects,
            "derived": self._derived,
        }
        self._pulled = self._read_pulls()
        assert self._pulled

    def once(self, data: bytes) -> int:
        picks = Picks(data)
        name = self._names[picks.below(len(self._names))]
        kind = _kind(name)
        assert kind is not None
        forges = bool(picks.number(1) & 1) and kind in ("checkpoint", "identity")
        before = self._files[name]
        after = edited(picks, before)
        if forges and len(after) >= _ENVELOPE_BYTES:
            struct.pack_into("<I", after, 12, len(after) - _ENVELOPE_BYTES)
            struct.pack_into("<I", after, 16, crc32c(bytes(after[20:]), crc32c(bytes(after[:16]))))
        self._write(name, bytes(after))
        try:
            with GrowthCheck(_MOST_GROWTH_BYTES):
                self._readers[kind](Change(_ROOT / name, before, bytes(after), forges))
        finally:
            self._write(name, before)
        return 1

    def _write(self, name: str, content: bytes) -> None:
        fd = self._disk.open(_ROOT / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        write_fully(self._disk, fd, [content], 0)
        self._disk.fdatasync(fd)
        self._disk.close(fd)

    # --- what reads them ---------------------------------------------------------------------------------------------

    def _read_pulls(self) -> dict[int, tuple[int, bytes]]:
        found = read_pull_log(self._disk, _ROOT / "pulls", self._identity.store_id, self._identity.secret, 0)
        self._found = found
        return {one.position: (one.kind, bytes(one.payload)) for one in found.records if one.counts}

    def _pulls(self, change: Change) -> None:
        read = self._read_pulls()
        assert read.items() <= self._pulled.items()
        holes, end = self._found.holes, self._found.end
        for position in self._pulled.keys() - read.keys():
            assert position >= end or any(hole.start <= position < hole.end for hole in holes), position

    def _run(self, change: Change) -> None:
        dtype = DELAY_DTYPE if change.path.parent.name == "due" else RETRY_DTYPE
        count = (len(change.before) - SCHEDULE_HEADER_SIZE) // dtype.itemsize
        told: list[Any] = []
        run = SortedRun(
            self._disk, change.path.parent, dtype, RunClaim(int(change.path.stem, 16), count, 0, count), told
        )
        written = np.frombuffer(change.before[SCHEDULE_HEADER_SIZE:], dtype)
        assert run._read_slots(0, count)[0].tobytes() == written.tobytes(), "the other copy is good"
        if change.path.suffix == ".a" and change.after[SCHEDULE_HEADER_SIZE : len(change.before)] != written.tobytes():
            assert told
        other = change.path.with_suffix(".b" if change.path.suffix == ".a" else ".a")
        self._write(str(other.relative_to(_ROOT)), change.after)
        try:
            self._both(change, written, told, run)
        finally:
            self._write(str(other.relative_to(_ROOT)), change.before)

    def _both(self, change: Change, written: Any, told: list[Any], run: SortedRun) -> None:
        """Both copies are changed alike: what was written comes, or nothing, and that is told."""
        told.clear()
        read, lost = run._read_slots(0, len(written))
        for item, original in zip(read, written, strict=True):
            assert int(item["number"]) == 0 or item.tobytes() == original.tobytes()
        assert told or not lost
        run.read(0)  # whatever numbers of reasons the items have

    def _checkpoint(self, change: Change) -> None:
        found = read_checkpoint(self._disk, change.path.parent, int(change.path.name.partition("-")[2]))
        assert found.claims is None or change.forged or change.after == change.before

    def _identities(self, change: Change) -> None:
        for copy in read_copies(self._disk, change.path.parent):
            if copy.identity is not None:
                pack_identity(copy.identity)
                assert change.forged or b"".join(pack_identity(copy.identity)) == change.before

    def _subjects(self, change: Change) -> None:
        written, read = parse_records(change.before).names, parse_records(change.after)
        check_header(change.before, self._identity.store_id, change.path)
        try:
            check_header(change.after, self._identity.store_id, change.path)
        except QmqError:
            pass
        assert all(name in (None, written[number]) for number, name in enumerate(read.names[: len(written)]))
        assert read.names == written or read.damaged or read.end < len(change.before)

    def _derived(self, change: Change) -> None:
        magic = _DERIVED_MAGICS[change.path.suffix]
        header = parse_derived(change.before, magic, change.path)
        try:
            assert parse_derived(change.after, magic, change.path) == header
        except QmqError:
            pass

    def seeds(self) -> list[bytes]:
        return [
            bytes([number, 0, forged, how, 2, place, 0, 3])
            for number, name in enumerate(self._names)
            for forged in ((0, 1) if _kind(name) in ("checkpoint", "identity") else (0,))
            for how in (0, 1, 2, 4)
            for place in (0, 18, 40, 90, 160)
        ]

    def close(self) -> None:
        """Nothing is left: all of it was in memory."""


def _kind(name: str) -> str | None:
    folder, _, file = name.rpartition("/")
    if folder in ("pulls", "due") or folder.startswith("groups/"):
        return "pulls" if folder == "pulls" else "run"
    if Path(file).suffix in _DERIVED_MAGICS:
        return "derived"
    if file.startswith(("checkpoint-", "store-")):
        return "checkpoint" if file.startswith("checkpoint-") else "identity"
    return "subjects" if name == "subjects" else None


def _files() -> dict[str, bytes]:
    """Those of a store with groups, in which each kind is."""
    scratch = scratch_directory()
    try:
        with (
            mock.patch.object(schedule, "MEMORY_ITEMS", _MEMORY_ITEMS),
            mock.patch.object(item_log, "MEMORY_ITEMS", _MEMORY_ITEMS),
        ):
            return groups.template(scratch / "template", clean=False)
    finally:
        shutil.rmtree(scratch)
