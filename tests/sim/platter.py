"""Files and directories of a simulated machine: what its memory shows, and what its disk would have without power.

A file is kept in sectors. Each has the version that is on disk and all that were written since: the kernel may have
brought any of them there, sector by sector and in any order. A directory has the names that are on disk, and changes
since, of which any may be there. What happened to each is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final, NamedTuple

#: Less than what real disks write at once, so that even the records of small files are torn.
SECTOR: Final = 64
_FIRST_BYTES: Final = 8_192
_STYLES: Final = ("nothing", "everything", "ordered", "any", "any", "late")

#: Every way in which a loss of power strikes.
POWER_FAULTS: Final = (
    "write forgotten",
    "write torn",
    "writes reordered",
    "zeros for data",
    "file size lost",
    "truncation lost",
    "name lost",
    "rename lost",
    "unlink lost",
    "directory lost",
    "names reordered",
)


class _Version(NamedTuple):
    """What a sector held after a write."""

    number: int
    data: bytes


class File:
    """One inode. ``buffer`` is the page cache: maps are views of it."""

    __slots__ = ("_older", "_sizes", "buffer", "dirty", "locked", "modified_us", "platter", "platter_size", "size")

    def __init__(self) -> None:
        self.buffer = bytearray(_FIRST_BYTES)
        self._older: list[bytearray] = []  # buffers that became too small; maps of them may be in use
        self.size = 0
        self.platter: dict[int, bytes] = {}
        self.platter_size = 0
        self.dirty: dict[int, list[_Version]] = {}
        self._sizes: list[int] = []  # since the last sync
        self.locked = -1
        #: As if it was written while the clock was far ahead, until that is noted.
        self.modified_us = 1 << 62

    def clone(self) -> File:
        """The same on another machine."""
        other = File()
        other.buffer = bytearray(self.buffer)
        other.size, other.platter_size = self.size, self.platter_size
        other.platter = dict(self.platter)
        other.dirty = {sector: list(versions) for sector, versions in self.dirty.items()}
        other._sizes = list(self._sizes)
        other.modified_us = self.modified_us
        return other

    # --- the page cache ----------------------------------------------------------------------------------------------

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self.buffer[offset : min(offset + size, self.size)])

    def write(self, number: int, data: bytes, offset: int) -> None:
        """Write *data*; *number* tells writes apart."""
        end = offset + len(data)
        self._grow(end)
        self.buffer[offset:end] = data
        for older in self._older:
            older[offset : min(end, len(older))] = data[: max(0, len(older) - offset)]
        self._soil(number, offset, end)
        if end > self.size:
            self.size = end
            self._sizes.append(end)

    def truncate(self, number: int, size: int) -> None:
        if size < self.size:
            self._zero(size, self.size)
            self._soil(number, size, min(self.size, self._written_end()))
        self._grow(size)
        if size != self.size:
            self.size = size
            self._sizes.append(size)

    def _grow(self, end: int) -> None:
        if end > len(self.buffer):
            self._older.append(self.buffer)
            self.buffer = bytearray(-(-max(end, 2 * len(self.buffer)) // SECTOR) * SECTOR)
            self.buffer[: len(self._older[-1])] = self._older[-1]

    def _zero(self, start: int, end: int) -> None:
        for buffer in (self.buffer, *self._older):
            stop = min(end, len(buffer))
            if start < stop:
                buffer[start:stop] = bytes(stop - start)

    def _written_end(self) -> int:
        """Behind the last sector that may hold anything."""
        return SECTOR * (1 + max((*self.platter, *self.dirty), default=-1))

    def _soil(self, number: int, start: int, end: int) -> None:
        for sector in range(start // SECTOR, -(-end // SECTOR)):
            data = bytes(self.buffer[sector * SECTOR : (sector + 1) * SECTOR])
            self.dirty.setdefault(sector, []).append(_Version(number, data))

    def data_end(self) -> int:
        """Only zeros follow, up to the end of a sector."""
        used = len(bytes(self.buffer[: self.size]).rstrip(b"\0"))
        return min(self.size, -(-used // SECTOR) * SECTOR)

    # --- the disk ----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Everything is on disk."""
        for sector, versions in self.dirty.items():
            self.platter[sector] = versions[-1].data
        self.dirty.clear()
        self.platter_size = self.size
        self._sizes.clear()

    def fail_sync(self, chance: random.Random) -> int:
        """Some of it is on disk. The rest stays readable, and counts as written: how many sectors."""
        lost = 0
        for sector, versions in self.dirty.items():
            reached = chance.randrange(-1, len(versions)) if chance.random() < 0.5 else -1
            if reached >= 0:
                self.platter[sector] = versions[reached].data
            lost += self.platter.get(sector, bytes(SECTOR)) != versions[-1].data
        self.dirty.clear()
        if chance.random() < 0.5:
            self.platter_size = self.size
            self._sizes.clear()
        return lost

    def evict(self) -> int:
        """Let go of all clean pages: what a failed sync kept from the disk is not readable any more."""
        changed = 0
        for sector in range(-(-self.size // SECTOR)):
            place = slice(sector * SECTOR, (sector + 1) * SECTOR)
            data = self.platter.get(sector, bytes(SECTOR))
            if sector not in self.dirty and self.buffer[place] != data:
                self.buffer[place] = data
                changed += 1
        self._zero(self.size, len(self.buffer))
        return changed

    def lose_power(self, chance: random.Random, struck: Counter[str]) -> None:
        """Keep what is on disk, and of what is not yet whatever the kernel may have brought there."""
        style = chance.choice(_STYLES)
        numbers = sorted({version.number for versions in self.dirty.values() for version in versions})
        border = chance.choice(numbers) if numbers else 0
        survived, lost = set[int](), set[int]()
        for sector, versions in self.dirty.items():
            kept = _choose(style, versions, border, chance)
            if kept >= 0:
                self.platter[sector] = versions[kept].data
            survived.update(version.number for version in versions[: kept + 1])
            lost.update(version.number for version in versions[kept + 1 :])
        self._lose_size(style, chance, struck, bool(lost))
        struck["write forgotten"] += len(lost - survived)
        struck["write torn"] += len(lost & survived)
        struck["writes reordered"] += bool(lost and survived and min(lost) < max(survived))
        self.dirty.clear()
        self._load()

    def _lose_size(self, style: str, chance: random.Random, struck: Counter[str], lost: bool) -> None:
        sizes = [self.platter_size, *self._sizes]
        size = sizes[0] if style == "nothing" else sizes[-1] if style == "everything" else chance.choice(sizes)
        self._sizes.clear()
        struck["file size lost"] += size < self.size
        struck["truncation lost"] += size > self.size
        struck["zeros for data"] += lost and size > self.platter_size
        self.size = self.platter_size = size

    def _load(self) -> None:
        size = self.size
        self._older.clear()
        self.buffer = bytearray(max(-(-size // SECTOR) * SECTOR, _FIRST_BYTES))
        for sector in [sector for sector in self.platter if sector * SECTOR >= size]:
            del self.platter[sector]
        for sector, data in self.platter.items():
            self.buffer[sector * SECTOR : (sector + 1) * SECTOR] = data
        self._zero(size, len(self.buffer))
        if size // SECTOR in self.platter:
            self.platter[size // SECTOR] = bytes(self.buffer[size // SECTOR * SECTOR :][:SECTOR])


def _choose(style: str, versions: list[_Version], border: int, chance: random.Random) -> int:
    """The index of the version that is on disk; -1 for the one that was there before."""
    last = len(versions) - 1
    match style:
        case "nothing":
            return -1
        case "everything":
            return last
        case "ordered":
            return sum(version.number <= border for version in versions) - 1
        case "late":
            return last if versions[-1].number >= border else -1
    return chance.randrange(-1, len(versions))


class Change(NamedTuple):
    """Something done to a directory: ``file`` gets ``name``, or None does; a rename also takes ``source`` away."""

    kind: str
    name: str
    file: File | None
    source: str = ""


class Directory:
    """Names to files; a directory stands as None in its parent."""

    __slots__ = ("names", "pending", "platter")

    def __init__(self) -> None:
        self.names: dict[str, File | None] = {}
        self.platter: dict[str, File | None] = {}
        self.pending: list[Change] = []

    def change(self, change: Change) -> None:
        _apply(self.names, change)
        self.pending.append(change)

    def sync(self) -> None:
        """All names are on disk."""
        self.platter = dict(self.names)
        self.pending.clear()

    def lose_power(self, chance: random.Random, struck: Counter[str]) -> None:
        """Keep the names that are on disk, and any of the changes since."""
        style, pending = chance.choice(_STYLES), self.pending
        border = chance.randrange(len(pending) + 1)
        lost, reordered = False, False
        for place, change in enumerate(pending):
            kept = {"nothing": False, "everything": True, "ordered": place < border, "late": place >= border}.get(style)
            if kept is None:
                kept = chance.random() < 0.5
            if kept:
                _apply(self.platter, change)
                reordered |= lost
            else:
                struck[f"{change.kind} lost"] += 1
                lost = True
        struck["names reordered"] += reordered
        pending.clear()
        self.names = dict(self.platter)


def _apply(names: dict[str, File | None], change: Change) -> None:
    if change.kind == "unlink":
        names.pop(change.name, None)
        return
    names.pop(change.source, None)
    names[change.name] = change.file
