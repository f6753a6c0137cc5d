"""What a consumer has acknowledged, in a file of its own: for the next process under its id.

One file a (store id, group, consumer), in ``$QMQ_STATE_DIR``, else ``$XDG_STATE_HOME/qmq``, else
``~/.local/state/qmq``:

    magic 8 bytes | crc32c u32 of what follows | msgpack [store id, group, consumer, since_us, generation, expected,
    [start, end, start, end, ...]]

It is replaced as a whole (written beside, then renamed), so a reader finds one state or the other; what does not fit
its checksum is as good as none, for it only adds acknowledgements that got lost. A file beside it, ``.lock``, is locked
while a process has it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from pathlib import Path
from typing import Final, Self

import msgpack
from crc32c import crc32c

from qmq.format.packed import unpack
from qmq.net.holding import MOST_INTERVALS, Known

MAGIC: Final = b"QMQSTA1\n"
_CRC: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 20


def state_directory() -> Path:
    """Where the user's state files are."""
    own = os.environ.get("QMQ_STATE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "qmq"


class StateFile:
    """Of one consumer. Every method may wait for the disk."""

    def __init__(self, path: Path, key: list[bytes | str], lock: int) -> None:
        self.path = path
        self._key = key
        self._lock = lock

    @classmethod
    def open(cls, directory: Path, store_id: bytes, group: str, consumer: str) -> Self:
        """Lock it, and make what is missing. Raises BlockingIOError where another process has it, else OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(f"{group}\0{consumer}".encode(), digest_size=8).hexdigest()
        path = directory / f"{store_id.hex()}-{group[:60]}-{consumer[:60]}-{digest}.state"
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, [store_id, group, consumer], lock)

    def read(self) -> Known | None:
        """What it says; None when there is none, or it is not whole. Raises OSError."""
        try:
            with open(self.path, "rb") as file:
                content = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return None
        body = content[len(MAGIC) + _CRC.size :]
        if content != MAGIC + _CRC.pack(crc32c(body)) + body:
            return None
        try:
            *key, since_us, generation, expected, handled = unpack(memoryview(body), max_array_len=2 * MOST_INTERVALS)
            numbers = [since_us, generation, expected, *handled]
        except (ValueError, TypeError, msgpack.UnpackException):  # no client has written that
            return None
        if key != self._key or any(type(number) is not int or number < 0 for number in numbers):
            return None
        if len(handled) % 2 or handled != sorted(handled):
            return None
        return Known(since_us, generation, 0, expected, tuple(handled))

    def write(self, known: Known) -> None:
        """Replace it. Raises OSError."""
        body = msgpack.packb([*self._key, known.since_us, known.generation, known.expected, list(known.handled)])
        beside = self.path.with_suffix(".new")
        with open(beside, "wb") as file:
            file.write(MAGIC + _CRC.pack(crc32c(body)) + body)
        os.replace(beside, self.path)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)
