"""The identity of a data directory: store id, secret, partitions, reserves. Copies: ``store-a`` and ``store-b``.

Each copy is an envelope (see envelope.py) with magic ``QMQSTORE`` around a map: generation, store_id (6 bytes), secret
(16 bytes), created_at_us, boot_id, clean, sequence_base, dropped_end, max_batch_bytes, and partitions: a list of
[floor, reserve, directory]; since version 2 next_store_id (empty, or what a renewal of the id is changing it to) and
former_store_ids.

One copy is written and synced before the other, and nothing that an identity allows is done before both are on disk.
So either copy alone is enough, and of two good ones the one with the higher generation counts. A copy that may be bad,
since a write of it was torn or it is rotten, is written first: the good one stays as it is until there are two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from qmq.errors import BadBytes, StorageFull
from qmq.format.layout import IDENTITY_MAGIC, IDENTITY_VERSION, MAX_POSITION_BASE, SECRET_SIZE, STORE_ID_SIZE
from qmq.storage.disk.disk import Disk, write_atomically, write_in_place
from qmq.storage.disk.envelope import FileState, pack_envelope, read_envelope

COPY_NAMES: Final = ("store-a", "store-b")
#: What is said of a directory whose renewal of the store id was interrupted.
RENEWAL_UNFINISHED: Final = (
    "a change of this directory's store id was interrupted; run qmq repair --new-id on it again, which finishes that"
)


class PartitionIdentity(NamedTuple):
    """One partition in the identity: positions in bytes, and its directory."""

    #: Nothing new is placed below this position.
    floor: int
    #: No position from here on has been given out.
    reserve: int
    #: The directory of its files: absolute, or relative to the data directory.
    directory: str


@dataclass(frozen=True, slots=True)
class Identity:
    """One version of the content of the two copies."""

    generation: int
    store_id: bytes
    secret: bytes
    created_at_us: int
    #: The boot of the machine during which the directory was last opened; empty once a sync has failed since.
    boot_id: str
    #: Whether it was closed cleanly, with everything on disk.
    clean: bool
    #: How far sequences were raised over all power losses; sequences of a new subject begin here.
    sequence_base: int
    partitions: tuple[PartitionIdentity, ...]
    #: All messages that retention has dropped had lower sequences in their subjects.
    dropped_end: int = 0
    #: The size of the largest batch that clients could ever send here; settings may allow less by now.
    max_batch_bytes: int = 0
    #: The store id that all files are being changed to; empty unless a renewal was interrupted.
    next_store_id: bytes = b""
    #: The ids that this directory had before, the first one first.
    former_store_ids: tuple[bytes, ...] = ()


class IdentityCopy(NamedTuple):
    """One copy as it was read: ``identity`` is set when the state is GOOD."""

    state: FileState
    identity: Identity | None
    reason: str


def new_identity(
    disk: Disk, *, store_id: bytes, directories: list[str], reserve_bytes: int, now_us: int, boot_id: str
) -> Identity:
    """Return the identity of a new data directory: partitions start at random positions, as ``add_partitions`` does."""
    identity = Identity(
        generation=0,
        store_id=store_id,
        secret=disk.random(SECRET_SIZE),
        created_at_us=now_us,
        boot_id=boot_id,
        clean=False,
        sequence_base=0,
        partitions=(),
    )
    return add_partitions(disk, identity, directories, reserve_bytes)


def add_partitions(disk: Disk, identity: Identity, directories: list[str], reserve_bytes: int) -> Identity:
    """Return *identity* with one more partition for each of *directories*, each at a random position."""
    added = []
    for directory in directories:
        floor = int.from_bytes(disk.random(8), "little") % MAX_POSITION_BASE & ~0xFFF
        added.append(PartitionIdentity(floor, floor + reserve_bytes, directory))
    return replace(identity, partitions=identity.partitions + tuple(added))


def read_copies(disk: Disk, directory: Path) -> tuple[IdentityCopy, IdentityCopy]:
    """Read both copies. Raises StorageFailed when the system refuses to read one."""
    a, b = (_read_copy(disk, directory / name) for name in COPY_NAMES)
    return a, b


def _read_copy(disk: Disk, path: Path) -> IdentityCopy:
    opened = read_envelope(disk, path, IDENTITY_MAGIC, IDENTITY_VERSION)
    if opened.content is None:
        return IdentityCopy(opened.state, None, opened.reason)
    try:
        return IdentityCopy(FileState.GOOD, _from_content(opened.content), "")
    except (KeyError, TypeError, ValueError) as error:
        return IdentityCopy(FileState.ROTTEN, None, f"{path} lacks a field: {error!r}")


def _from_content(content: dict[str, Any]) -> Identity:
    identity = Identity(
        generation=int(content["generation"]),
        store_id=bytes(content["store_id"]),
        secret=bytes(content["secret"]),
        created_at_us=int(content["created_at_us"]),
        boot_id=str(content["boot_id"]),
        clean=bool(content["clean"]),
        sequence_base=int(content["sequence_base"]),
        partitions=tuple(PartitionIdentity(int(f), int(r), str(d)) for f, r, d in content["partitions"]),
        dropped_end=int(content["dropped_end"]),
        max_batch_bytes=int(content["max_batch_bytes"]),
        next_store_id=bytes(content.get("next_store_id", b"")),
        former_store_ids=tuple(bytes(former) for former in content.get("former_store_ids", ())),
    )
    if len(identity.store_id) != STORE_ID_SIZE or len(identity.secret) != SECRET_SIZE or not identity.partitions:
        raise ValueError("store_id, secret or partitions")
    return identity


def pack_identity(identity: Identity) -> list[bytes]:
    """Return the buffers of one copy."""
    content = {
        "generation": identity.generation,
        "store_id": identity.store_id,
        "secret": identity.secret,
        "created_at_us": identity.created_at_us,
        "boot_id": identity.boot_id,
        "clean": identity.clean,
        "sequence_base": identity.sequence_base,
        "partitions": [list(partition) for partition in identity.partitions],
        "dropped_end": identity.dropped_end,
        "max_batch_bytes": identity.max_batch_bytes,
        "next_store_id": identity.next_store_id,
        "former_store_ids": list(identity.former_store_ids),
    }
    return pack_envelope(IDENTITY_MAGIC, IDENTITY_VERSION, content)


def latest(a: IdentityCopy, b: IdentityCopy) -> Identity:
    """Return the identity with the higher generation. Raises BadBytes when neither copy is good, when the two are of
    different stores, or when a renewal of the store id was interrupted.
    """
    identity = newest(a, b)
    if identity.next_store_id:
        raise BadBytes(RENEWAL_UNFINISHED)
    return identity


def newest(a: IdentityCopy, b: IdentityCopy) -> Identity:
    """Return the identity as ``latest``, also after an interrupted renewal."""
    found = [copy.identity for copy in (a, b) if copy.identity is not None]
    if not found:
        raise BadBytes(f"both copies of the store's identity are lost: {a.reason}; {b.reason}")
    # A renewal that was interrupted at its end has changed the id of one copy.
    ids = {identity.store_id for identity in found} - {identity.next_store_id for identity in found}
    if len(ids) > 1 or len({identity.secret for identity in found}) > 1:
        raise BadBytes("store-a and store-b are of different stores; remove the one that does not belong here")
    return max(found, key=lambda identity: identity.generation)


class IdentityFile:
    """The two copies of an open store. ``current`` is on disk; any thread may change it."""

    def __init__(self, disk: Disk, directory: Path, identity: Identity, bad: str = COPY_NAMES[0]) -> None:
        """*bad* names the copy that is not good, if one is not."""
        self._disk = disk
        self._directory = directory
        self._lock = threading.Lock()
        self.current = identity
        #: The last generation that was tried: a copy may have it though the change failed.
        self._generation = identity.generation
        self._first = bad  # is written before the other

    def change(self, make: Callable[[Identity], Identity]) -> Identity:
        """[thread] Write the identity that *make* returns for the current one, and return it; it is on disk then.

        Raises StorageFull or StorageFailed; the current identity is then still the old one.
        """
        with self._lock:
            made = make(self.current)
            self._generation += 1
            made = replace(made, generation=self._generation)
            content = pack_identity(made)
            for name in sorted(COPY_NAMES, key=lambda name: name != self._first):
                self._first = name  # until it is written, it may be torn
                self._write(self._directory / name, content)
            self._first = COPY_NAMES[0]
            self.current = made
            return made

    def _write(self, path: Path, content: list[bytes]) -> None:
        """Write one copy, in place if the disk is full: if that write is torn, the other copy counts."""
        try:
            write_atomically(self._disk, path, content)
        except StorageFull:
            if not self._disk.exists(path):
                raise
            write_in_place(self._disk, path, content)

    def mark_clean(self) -> None:
        """[thread] Note that everything is on disk and writing has ended. Raises StorageFull or StorageFailed."""
        self.change(lambda identity: replace(identity, clean=True))

    def forget_boot(self) -> None:
        """[thread] Make the next start assume that unsynced bytes may be gone. Raises as ``change`` does."""
        if self.current.boot_id:
            self.change(lambda identity: replace(identity, boot_id=""))

    def note_dropped(self, end: int) -> None:
        """[thread] Note that messages with sequences below *end* are dropped. Raises as ``change`` does."""
        if self.current.dropped_end < end:
            self.change(lambda identity: replace(identity, dropped_end=end))

    def renew(self, ends: list[int], reserve_bytes: int) -> Identity:
        """[thread] Give every partition that has used half of its reserve a new one; writes only when one has.

        *ends* are positions, one a partition.
        """

        def moved(identity: Identity) -> Identity:
            partitions = tuple(
                partition._replace(reserve=max(partition.reserve, end + reserve_bytes))
                for partition, end in zip(identity.partitions, ends, strict=True)
            )
            return replace(identity, partitions=partitions)

        partitions = self.current.partitions
        if all(partition.reserve - end > reserve_bytes // 2 for partition, end in zip(partitions, ends, strict=True)):
            return self.current
        return self.change(moved)
