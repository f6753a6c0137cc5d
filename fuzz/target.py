"""What every target is, and how an input is turned into choices."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Final, Protocol

#: One input may make the process grow by so much, no more.
MOST_GROWTH_BYTES: Final = 96 << 20
_EDIT_BYTES: Final = (0, 1, 2, 0x7F, 0x80, 0xFF)


class Target(Protocol):
    """Something that takes bytes."""

    def once(self, data: bytes) -> int:
        """Take one input; returns how many frames (batches, answers, files) it was. Raises at a finding."""

    def seeds(self) -> list[bytes]:
        """Inputs to begin with: each reaches another part of the code."""

    def close(self) -> None:
        """Check what must hold at the end, and clean up."""


class Picks:
    """Choices, read from an input one after another; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not used yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """The next *size* bytes, or what is left of them."""
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        return part

    def number(self, size: int) -> int:
        """An unsigned little-endian integer of *size* bytes."""
        return int.from_bytes(self.take(size), "little")

    def below(self, limit: int) -> int:
        """0 to limit - 1, from two bytes."""
        return self.number(2) % limit

    def edit(self, target: memoryview) -> None:
        """Change a few places of *target*: a byte, or a field of 2, 4 or 8."""
        for _ in range(self.number(1) % 5):
            place, how = self.below(len(target)), self.number(1)
            if how < len(_EDIT_BYTES):
                target[place] = _EDIT_BYTES[how]
            elif how & 3:
                field = self.take(1 << (how & 3))
                target[place : place + len(field)] = field[: len(target) - place]
            else:
                target[place] ^= 1 << (how >> 5)


def edited(picks: Picks, content: bytes) -> bytearray:
    """A few bytes changed, some cut off, some behind."""
    changed, how = bytearray(content), picks.number(1)
    if how & 1:
        picks.edit(memoryview(changed))
    if how & 2:
        del changed[picks.below(len(changed) + 1) :]
    if how & 4:
        changed += picks.take(picks.number(1))
    return changed


def scratch_directory() -> Path:
    """A new directory for files, in memory where the system has that."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="qmq-fuzz-", dir=memory if memory.is_dir() else None))


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024


class GrowthCheck:
    """Raises when the process grew by more than *most_bytes* while it was entered."""

    def __init__(self, most_bytes: int = MOST_GROWTH_BYTES) -> None:
        self._most = most_bytes

    def __enter__(self) -> None:
        self._before = peak_bytes()

    def __exit__(self, *_: object) -> None:
        grown = peak_bytes() - self._before
        assert grown <= self._most, f"one input took {grown >> 20} MiB of memory"
