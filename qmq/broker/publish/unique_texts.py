"""The unique texts of the last time: where the message lies that each was sent with first.

A text is known by its hash and that of its subject, so it repeats in one subject only. What is remembered comes from
the batches: a checkpoint has it up to the batches that it claims, and a start reads the rest in the logs. So it never
disagrees with what is stored.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.work import Work
from qmq.format.batch import CheckedBatch, Header, runs_of, stored_names
from qmq.format.layout import (
    DELAY_PARTITION,
    NO_SEQUENCE,
    UNIQUE_HASH_SIZE,
    UNIQUE_KEY_SIZE,
    UNIQUE_ROW,
    UNIQUE_ROW_DTYPE,
    UNIQUE_ROW_SIZE,
)
from qmq.format.unique import counts_of, unique_hashes

#: The bytes of memory that a text takes, about.
TEXT_BYTES: Final = 320
#: The most batches, and texts, of a part.
_PART_BATCHES: Final = 1_024
_PART_TEXTS: Final = 4_096
#: The work, in microseconds, of joining what a part has.
_PACK_WORK: Final = 200
_SUBJECTS: Final = 16_384
#: The monotonic clock at a checkpoint, in microseconds; then parts: how many batches and texts it has, since when each
#: batch is remembered, how many texts each has, the keys and the rows.
_CLOCK: Final = struct.Struct("<Q")
_PART: Final = struct.Struct("<II")
_KEY_DTYPE: Final = np.dtype([("subject", f"V{UNIQUE_HASH_SIZE}"), ("text", f"V{UNIQUE_HASH_SIZE}")])
_KEY: Final = f"V{UNIQUE_KEY_SIZE}"
_ROW: Final = f"V{UNIQUE_ROW_SIZE}"


@lru_cache(_SUBJECTS)
def hash_of_subject(subject: str) -> bytes:
    """Return the part of the keys of a subject's texts that stands in front."""
    return blake2b(subject.encode(), digest_size=UNIQUE_HASH_SIZE).digest()


def keys_of(batch: CheckedBatch, ordinals: npt.NDArray[np.int64], hashes: npt.NDArray[np.void]) -> list[bytes]:
    """Return by which keys the texts of these messages of a batch are known."""
    subjects = list(map(hash_of_subject, batch.names))
    if batch.runs is None and len(hashes) == 1:
        return [subjects[0] + hashes.tobytes()]
    keys = np.empty(len(hashes), _KEY_DTYPE)
    keys["text"] = hashes
    if batch.runs is None:
        keys["subject"] = np.void(subjects[0])
    else:
        by_run = np.array(subjects, f"V{UNIQUE_HASH_SIZE}")[batch.runs["subject"]]
        keys["subject"] = by_run[np.searchsorted(np.cumsum(counts_of(batch)), ordinals, side="right")]
    found: list[bytes] = keys.view(_KEY).tolist()
    return found


def rows_of(
    batch: CheckedBatch, ordinals: npt.NDArray[np.int64], position: int, stored_at_us: int, partition: int,
    first_sequences: int | npt.NDArray[np.uint64] | None,
) -> list[bytes]:  # fmt: skip
    """Return where these messages of a stored batch are: a UNIQUE_ROW each. *first_sequences* None: they have none."""
    if batch.runs is None and len(ordinals) == 1:
        ordinal = int(ordinals[0])
        sequence = NO_SEQUENCE if first_sequences is None else _first(first_sequences) + ordinal
        return [UNIQUE_ROW.pack(position + ordinal, stored_at_us, sequence, partition)]
    rows = np.empty(len(ordinals), UNIQUE_ROW_DTYPE)
    rows["position"], rows["stored_at_us"], rows["partition"] = ordinals + position, stored_at_us, partition
    if first_sequences is None:
        rows["sequence"] = NO_SEQUENCE
    elif batch.runs is None:
        rows["sequence"] = ordinals.astype(np.uint64) + np.uint64(_first(first_sequences))
    else:
        counts = counts_of(batch)
        ends = np.cumsum(counts)
        runs = np.searchsorted(ends, ordinals, side="right")
        rows["sequence"] = np.asarray(first_sequences)[runs] + (ordinals - (ends - counts)[runs]).astype(np.uint64)
    made: list[bytes] = rows.view(_ROW).tolist()
    return made


def _first(first_sequences: int | npt.NDArray[np.uint64]) -> int:
    return first_sequences if isinstance(first_sequences, int) else int(first_sequences[0])


class _TextsPart:
    """The texts of some batches in a row: since when each batch is remembered, and its keys and rows."""

    __slots__ = (
        "_keys",
        "_keys_at",
        "_last",
        "_packed",
        "_rows",
        "_rows_at",
        "_taken",
        "counts",
        "first",
        "since",
        "texts",
    )

    def __init__(self) -> None:
        self.since = array("Q")
        self.counts = array("I")
        self.texts = 0
        #: How many of the batches are forgotten.
        self.first = 0
        self._taken = 0  # their texts
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []
        #: The part as a checkpoint has it, once no more comes; where keys and rows begin in it; and the last position
        #: by partition.
        self._packed = b""
        self._keys_at = self._rows_at = 0
        self._last: dict[int, int] = {}

    @classmethod
    def unpack(cls, packed: memoryview, gone_us: int) -> _TextsPart:
        """Return the part at the start of what a checkpoint has; the present clock is *gone_us* ahead of its own."""
        part = cls()
        batches, part.texts = _PART.unpack_from(packed)
        part._set_offsets(batches)
        since = np.frombuffer(packed, "<i8", batches, _PART.size) + gone_us
        part.since.frombytes(np.maximum(since, 0).tobytes())
        part.counts.frombytes(packed[_PART.size + part.since.itemsize * batches : part._keys_at])
        keys, rows = packed[part._keys_at : part._rows_at], packed[part._rows_at : part._end]
        if sum(part.counts) != part.texts or len(rows) != UNIQUE_ROW_SIZE * part.texts:
            raise ValueError("the unique texts do not add up")
        part._packed = _packed(part.since.tobytes(), part.counts.tobytes(), keys, rows)
        part._note_last()
        return part

    @property
    def size(self) -> int:
        """The bytes of the part as a checkpoint has it."""
        return len(self._packed)

    def add(self, now_us: int, keys: Sequence[bytes], rows: Sequence[bytes]) -> None:
        self.since.append(now_us)
        self.counts.append(len(keys))
        self._keys += keys
        self._rows += rows
        self.texts += len(keys)

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    @property
    def is_full(self) -> bool:
        return bool(self._packed) or len(self.counts) >= _PART_BATCHES or self.texts >= _PART_TEXTS

    @property
    def has_several(self) -> bool:
        """Whether more than one batch is not forgotten."""
        return len(self.counts) > self.first + 1

    def pack(self) -> None:
        """Take no more: the lists become bytes."""
        self._packed = _packed(self.since.tobytes(), self.counts.tobytes(), b"".join(self._keys), b"".join(self._rows))
        self._set_offsets(len(self.counts))
        self._keys, self._rows = [], []
        self._note_last()

    def _set_offsets(self, batches: int) -> None:
        self._keys_at = _PART.size + (self.since.itemsize + self.counts.itemsize) * batches
        self._rows_at = self._keys_at + UNIQUE_KEY_SIZE * self.texts

    @property
    def _end(self) -> int:
        return self._rows_at + UNIQUE_ROW_SIZE * self.texts

    def _note_last(self) -> None:
        rows = np.frombuffer(self._packed, UNIQUE_ROW_DTYPE, self.texts, self._rows_at)
        for partition in np.unique(rows["partition"]).tolist():
            self._last[partition] = int(rows["position"][rows["partition"] == partition].max())

    def take_oldest(self) -> Iterator[tuple[bytes, bytes]]:
        """Forget the oldest batch; return its keys and rows."""
        start = self._taken
        self._taken = end = start + self.counts[self.first]
        self.first += 1
        if not self._packed:
            return zip(self._keys[start:end], self._rows[start:end], strict=True)
        keys = self._packed[self._keys_at + UNIQUE_KEY_SIZE * start : self._keys_at + UNIQUE_KEY_SIZE * end]
        rows = self._packed[self._rows_at + UNIQUE_ROW_SIZE * start : self._rows_at + UNIQUE_ROW_SIZE * end]
        return zip(_cut(keys, _KEY), _cut(rows, _ROW), strict=True)

    def all_texts(self) -> Iterator[tuple[bytes, bytes]]:
        """Return keys and rows of a part that was unpacked."""
        keys, rows = self._packed[self._keys_at : self._rows_at], self._packed[self._rows_at :]
        return zip(_cut(keys, _KEY), _cut(rows, _ROW), strict=True)

    def claimed(self, unclaimed: Mapping[int, int]) -> bytes:
        """Return the part as a checkpoint has it, without the batches that lie at or behind the position that
        *unclaimed* gives for their partition. It may have some that are forgotten.
        """
        if self._packed and all(last < unclaimed.get(partition, last + 1) for partition, last in self._last.items()):
            return self._packed
        if self._packed:
            keys, rows = self._packed[self._keys_at : self._rows_at], self._packed[self._rows_at :]
        else:
            keys, rows = b"".join(self._keys), b"".join(self._rows)
        columns = np.frombuffer(rows, UNIQUE_ROW_DTYPE)
        left = np.ones(len(columns), np.bool_)
        for partition, end in unclaimed.items():
            left &= (columns["partition"] != partition) | (columns["position"] < end)
        counts = np.frombuffer(self.counts, "<u4")
        kept = left[np.cumsum(counts) - counts]  # a batch is in one partition, and claimed as a whole
        return _packed(
            np.frombuffer(self.since, "<u8")[kept].tobytes(), counts[kept].tobytes(),
            np.frombuffer(keys, _KEY)[left].tobytes(), np.frombuffer(rows, _ROW)[left].tobytes(),
        )  # fmt: skip


def _packed(since: bytes, counts: bytes, keys: bytes | memoryview, rows: bytes | memoryview) -> bytes:
    head = _PART.pack(len(counts) // 4, len(keys) // UNIQUE_KEY_SIZE)
    return b"".join((head, since, counts, keys, rows))


def _cut(data: bytes, kind: str) -> list[bytes]:
    cut: list[bytes] = np.frombuffer(data, kind).tolist()
    return cut


class UniqueTexts:
    """All unique texts that are remembered, in the order in which they were stored."""

    def __init__(self, ttl_us: int, most: int) -> None:
        self._ttl_us = ttl_us
        self._most = most
        #: The UNIQUE_ROW of the first message by the key of its text, also of batches that are staged.
        self.by_key: dict[bytes, bytes] = {}
        self._parts: deque[_TextsPart] = deque()
        #: How many were forgotten before their time, for want of room, and how many messages were left out.
        self.forgotten = self.duplicates = 0

    def __len__(self) -> int:
        return len(self.by_key)

    @property
    def most(self) -> int:
        """The most texts that are remembered."""
        return self._most

    def stage(self, keys: Sequence[bytes], rows: Sequence[bytes]) -> None:
        """Remember texts of a batch that is about to be stored; ``keep`` or ``drop`` follows."""
        self.by_key.update(zip(keys, rows, strict=True))

    def drop(self, keys: Sequence[bytes], rows: Sequence[bytes]) -> None:
        """Forget the texts of a batch that was not stored."""
        self._forget(zip(keys, rows, strict=True))

    def keep(self, keys: Sequence[bytes], rows: Sequence[bytes], now_us: int) -> None:
        """Remember the staged texts of a batch that is stored now; *now_us* is of the monotonic clock."""
        parts = self._parts
        if not keys:
            return
        if not parts or parts[-1].is_full:
            parts.append(_TextsPart())
        parts[-1].add(now_us, keys, rows)
        while len(self.by_key) > self._most and (len(self._parts) > 1 or self._parts[0].has_several):
            before = len(self.by_key)
            self._forget_oldest()
            self.forgotten += before - len(self.by_key)

    def replay(self, partition: int, batch: memoryview, header: Header, now_us: int) -> None:
        """Remember the texts of a stored batch, which a start has found in a log."""
        records = runs_of(batch, header)
        stored = CheckedBatch(header, stored_names(batch, header), None, records if header.runs > 1 else None)
        ordinals, hashes = unique_hashes(batch, header)
        firsts = None if partition == DELAY_PARTITION else records["first_sequence"]
        keys = keys_of(stored, ordinals, hashes)
        rows = rows_of(stored, ordinals, header.position, header.stored_at_us, partition, firsts)
        self.stage(keys, rows)
        self.keep(keys, rows, now_us)

    def expire(self, now_us: int) -> None:
        """Forget the texts whose time is over."""
        while self._parts:
            part = self._parts[0]
            if part.first < len(part.since) and part.since[part.first] + self._ttl_us > now_us:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        part = self._parts[0]
        if part.first < len(part.since):
            self._forget(part.take_oldest())
        if part.first == len(part.since):
            self._parts.popleft()

    def _forget(self, texts: Iterator[tuple[bytes, bytes]]) -> None:
        by_key = self.by_key
        for key, row in texts:
            if by_key.get(key) == row:  # else it was stored again since
                del by_key[key]

    # --- checkpoint ---------------------------------------------------------------------------------------------------

    def bytes_remembered(self) -> int:
        """Return the approximate size of ``packed``."""
        return len(self.by_key) * (UNIQUE_KEY_SIZE + UNIQUE_ROW_SIZE)

    def prepare(self) -> Work[None]:
        """Do in pieces most of what ``packed`` does."""
        for part in list(self._parts):
            if part.is_full and not part.is_packed:
                part.pack()
                yield _PACK_WORK

    def packed(self, unclaimed: Mapping[int, int], now_us: int) -> bytes:
        """Return the state for a checkpoint: all texts, oldest first.

        Batches that lie at or behind the position that *unclaimed* gives for their partition are left out: they may be
        gone at the next start, which reads the log from there.
        """
        return b"".join([_CLOCK.pack(now_us), *(part.claimed(unclaimed) for part in self._parts)])

    def restore(self, packed: bytes, now_us: int) -> None:
        """Restore the state that ``packed`` returned."""
        view, at = memoryview(packed), _CLOCK.size
        (packed_us,) = _CLOCK.unpack_from(view)
        while at < len(view):
            part = _TextsPart.unpack(view[at:], now_us - packed_us)
            at += part.size
            self.by_key.update(part.all_texts())
            if part.texts:
                self._parts.append(part)
        self.expire(now_us)
        while len(self.by_key) > self._most and self._parts:
            self._forget_oldest()
