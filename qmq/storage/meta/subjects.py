"""The registry of subjects: names, lanes and numbers, and the first and next sequence of each.

A number stands for one lane of a subject: for its messages of one priority, or with order keys of one slot. The file
``subjects`` is append-only; a number is the index of its record, and is never given again. A number whose messages are
all gone may be forgotten: its name is free then, and gets another number with its next message. Of two records with the
same name and lane the later one counts.

    header (32)   magic "QMQSUBJS" 8s | version u16 | store_id 6s | reserved 12s | crc32c u32 (of the 28 bytes before)
    record        size u16 (of the name) | lane u16 | check u32 | name (ASCII)

check is crc32c(name, seed = size | lane << 16) plus the record's number, modulo 2^32. So a record tells
its number, and after bad bytes the next good record is found wherever it lies.

In memory a subject costs its name, an entry in a dict and in two lists, and 18 bytes of arrays: about 210 bytes with
names of 37 characters, 210 MB for a million; 100,000 are read in 0.08 s. A further lane of a name costs about 135
bytes. A number that is forgotten costs 27 bytes.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.lanes import is_known, kind_of
from qmq.format.layout import LANE_NORMAL, LANE_ORDERED, STORE_ID_SIZE, SUBJECTS_MAGIC, SUBJECTS_VERSION
from qmq.format.private import is_private, origin_subject
from qmq.format.versions import check_version
from qmq.names import MAX_SUBJECT_BYTES  # bounds what a rotten size can claim
from qmq.storage.disk.disk import Disk, failure, read_fully, write_atomically, write_fully
from qmq.storage.disk.fsync import SureSync
from qmq.storage.meta.gaps import Gaps

SUBJECTS_HEADER: Final = struct.Struct("<8sH6s12sI")
SUBJECTS_HEADER_SIZE: Final = 32
RECORD: Final = struct.Struct("<HHI")
RECORD_SIZE: Final = 8

#: The first character of names that no client may use.
INTERNAL: Final = "~"
#: Stands for the name of a number that is forgotten; no client may use it.
FORGOTTEN: Final = "~forgotten"

_FIRST_CAPACITY: Final = 1_024
_NO_BYTES: Final = bytes(12)
_MODULUS: Final = 1 << 32

assert SUBJECTS_HEADER.size == SUBJECTS_HEADER_SIZE
assert RECORD.size == RECORD_SIZE


class DamagedRecord(NamedTuple):
    """Bytes of the registry that do not fit their checksum: from subject *number* on, at an offset in the file."""

    number: int
    position: int
    reason: str


class RegistryContent(NamedTuple):
    """The content of a registry: name (None: its record is bad) and lane by number, and the end of the good bytes."""

    names: list[str | None]
    lanes: list[int]
    end: int
    damaged: list[DamagedRecord]


def pack_header(store_id: bytes) -> bytes:
    """Return the header of the registry of a store."""
    head = SUBJECTS_HEADER.pack(SUBJECTS_MAGIC, SUBJECTS_VERSION, store_id, _NO_BYTES, 0)[:-4]
    return head + crc32c(head).to_bytes(4, "little")


def check_header(data: bytes, store_id: bytes | None, path: Path) -> None:
    """Check the header. Raises BadBytes when it is rotten, ForeignFile when it is another store's or format's."""
    if len(data) < SUBJECTS_HEADER_SIZE:
        raise BadBytes(f"{path} has {len(data)} bytes, fewer than its header")
    magic, version, found_id, _, crc = SUBJECTS_HEADER.unpack_from(data)
    if crc != crc32c(data[: SUBJECTS_HEADER_SIZE - 4]):
        raise BadBytes(f"the header of {path} does not fit its checksum")
    if magic != SUBJECTS_MAGIC:
        raise ForeignFile(f"{path} is no registry of subjects; move it away")
    check_version(path, version, SUBJECTS_VERSION)
    if store_id is not None and found_id != store_id:
        raise ForeignFile(f"{path} belongs to store {found_id.hex()}, not {store_id.hex()}; put the right file back")


def pack_record(name: str, number: int, lane: int = LANE_NORMAL) -> bytes:
    """Return the record of subject *number*: one lane of a name."""
    raw = name.encode("ascii")
    size = len(raw)
    return RECORD.pack(size, lane, (crc32c(raw, size | lane << 16) + number) % _MODULUS) + raw


def parse_records(data: bytes) -> RegistryContent:
    """Parse a registry's bytes, header and all. Bad records are skipped and listed, a bad end is left out."""
    names: list[str | None] = []
    lanes: list[int] = []
    damaged: list[DamagedRecord] = []
    position, size_of_data, number = SUBJECTS_HEADER_SIZE, len(data), 0
    unpack = RECORD.unpack_from
    while position + RECORD_SIZE <= size_of_data:
        size, lane, check = unpack(data, position)
        name = data[position + RECORD_SIZE : position + RECORD_SIZE + size]
        fits = 0 < size <= MAX_SUBJECT_BYTES and len(name) == size and is_known(lane)  # zeros would pass the checksum
        if fits and (crc32c(name, size | lane << 16) + number) % _MODULUS == check:
            names.append(name.decode("ascii"))
            lanes.append(lane)
            position += RECORD_SIZE + size
            number += 1
            continue
        found = _next_record(data, position + 1, number)
        if found is None:
            break
        damaged.append(DamagedRecord(number, position, f"{found[1] - number} records do not fit their checksum"))
        position, next_number = found
        names.extend([None] * (next_number - number))
        lanes.extend([LANE_NORMAL] * (next_number - number))
        number = next_number
    return RegistryContent(names, lanes, position, damaged)


def _next_record(data: bytes, start: int, number: int) -> tuple[int, int] | None:
    """Return the offset of the next good record after *number*, and its number; None when there is none."""
    for position in range(start, len(data) - RECORD_SIZE):
        size, lane, check = RECORD.unpack_from(data, position)
        if not 0 < size <= MAX_SUBJECT_BYTES or position + RECORD_SIZE + size > len(data) or not is_known(lane):
            continue
        name = data[position + RECORD_SIZE : position + RECORD_SIZE + size]
        found = (check - crc32c(name, size | lane << 16)) % _MODULUS
        if number < found <= number + 1 + (position - start) // RECORD_SIZE and name.isascii():
            return position, found
    return None


class SubjectTable:
    """Names and lanes to numbers and back, the next and the first sequence of each number, and the gaps between.

    ``ends`` and ``firsts`` are u64 by number, ``lanes`` is u16, ``is_forgotten`` bool; they are replaced when they
    grow, so read the attributes again after ``add``, and use [:count]. New subjects begin at ``new_begin``. New records
    are on disk after flush and fsync.
    """

    __slots__ = (
        "_copied", "_disk", "_fd", "_header", "_heads", "_kinds", "_lane_names", "_names", "_numbers", "_other_lanes",
        "_pending", "checkpointed", "cut_bytes", "damaged", "ends", "firsts", "forgotten_count", "forgotten_end",
        "gaps", "generation", "has_lanes", "has_private", "is_forgotten", "lane_kinds", "lanes", "length_bytes",
        "lost", "path", "sequence_base", "sync",
    )  # fmt: skip

    def __init__(self, disk: Disk, path: Path, fd: int, header: bytes, records: RegistryContent) -> None:
        self._disk = disk
        self._header = header
        self._fd = fd
        self._names = records.names
        #: There are subjects of one group alone: their names begin with a ~.
        self.has_private = False
        #: There are messages with a priority or an order key: some lane is not LANE_NORMAL.
        self.has_lanes = False
        #: The lanes that exist; each of ORDERED_KINDS stands for all of its slots.
        self.lane_kinds: set[int] = set()
        #: How often numbers were forgotten: whoever remembers the number of a name looks again after a change.
        self.generation = 0
        #: How many numbers are forgotten; and the sequence behind all that they had, so that no name gets one again.
        self.forgotten_count = 0
        self.forgotten_end = 0
        self.path = path
        self.damaged = records.damaged
        self.cut_bytes = 0
        #: [thread] Syncs the descriptor that ``flush`` gives.
        self.sync = SureSync(disk)
        self.length_bytes = records.end
        self.sequence_base = 0
        #: How many numbers the recovered checkpoint had: a start may have given the others anew.
        self.checkpointed = 0
        self.gaps = Gaps()
        capacity = _FIRST_CAPACITY
        while capacity < len(self._names):
            capacity *= 2
        self.ends: npt.NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.firsts: npt.NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.lanes: npt.NDArray[np.uint16] = np.zeros(capacity, np.uint16)
        self.lanes[: len(records.lanes)] = records.lanes
        self.is_forgotten: npt.NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._pending: list[bytes] = []
        self._index()

    @classmethod
    def open(cls, disk: Disk, path: Path, store_id: bytes, length_bytes: int | None = None) -> SubjectTable:
        """Read or create the registry; cut the bytes past *length_bytes* (of the checkpoint), or past the last good
        record when that is None.

        ``damaged`` lists bad records and missing bytes before *length_bytes*; ``name`` raises BadBytes for them.
        Raises ForeignFile, StorageFull, StorageFailed.
        """
        assert len(store_id) == STORE_ID_SIZE
        try:
            fd = disk.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise failure(error, "open", path) from error
        try:
            return cls._read(disk, path, fd, store_id, length_bytes)
        except OSError as error:
            disk.close(fd)
            raise failure(error, "read or write", path) from error
        except ForeignFile:
            disk.close(fd)
            raise

    @classmethod
    def _read(cls, disk: Disk, path: Path, fd: int, store_id: bytes, length_bytes: int | None) -> SubjectTable:
        size = disk.size(fd)
        data = read_fully(disk, fd, size if length_bytes is None else min(size, length_bytes), 0)
        damaged: list[DamagedRecord] = []
        try:
            check_header(data, store_id, path)
        except BadBytes as error:
            if data or length_bytes:
                damaged.append(DamagedRecord(0, 0, str(error)))
            write_fully(disk, fd, [pack_header(store_id)], 0)
        records = parse_records(data)
        if length_bytes is not None and records.end < length_bytes:
            reason = f"the checkpoint knows {length_bytes} bytes of {path}, good are {records.end}"
            damaged.append(DamagedRecord(len(records.names), records.end, reason))
        table = cls(disk, path, fd, pack_header(store_id), records._replace(damaged=damaged + records.damaged))
        if size > records.end:
            table.cut_bytes = size - records.end
            disk.ftruncate(fd, records.end)
        return table

    @property
    def count(self) -> int:
        """The count of numbers; the next lane of a subject gets this number."""
        return len(self._names)

    @property
    def new_begin(self) -> int:
        """The first sequence of a new subject."""
        return max(self.sequence_base, self.forgotten_end)

    def _index(self) -> None:
        """Find all subjects by their names anew."""
        #: The numbers of normal lanes by name; those of other lanes by name and lane, ascending.
        self._numbers: dict[str, int] = {}
        self._other_lanes: dict[str, dict[int, int]] = {}
        #: The number of the first lane of each name, ascending, lost names among them; and the names with other lanes.
        self._heads: array[int] = array("I")
        self._lane_names: list[str] = []
        #: The first number of each kind of other lanes of each name, ascending, with the name and the kind.
        self._kinds: list[tuple[int, str, int]] = []
        #: The numbers whose names are lost, ascending.
        self.lost: list[int] = []
        #: How many private subjects there are for copies of each subject.
        self._copied: Counter[str] = Counter()
        forgotten = list[int]()
        for number, (name, lane) in enumerate(zip(self._names, self.lanes[: self.count].tolist(), strict=True)):
            if name == FORGOTTEN:
                forgotten.append(number)
            elif name is not None and _is_found(name):
                before = self.number(name, lane)
                if before is None:
                    self._map(name, lane, number)
                else:
                    forgotten.append(before)
                    self._replace(before, lane, number)
            else:
                self._heads.append(number)
                self.lost.append(number)
        self.is_forgotten[forgotten] = True
        self.forgotten_count = len(forgotten)
        for number in forgotten:
            self._names[number] = FORGOTTEN
        if forgotten:
            firsts = [self.numbers_of(name)[0] for name in self._numbers.keys() | self._other_lanes.keys()]
            self._heads = array("I", sorted([*firsts, *self.lost]))

    def _replace(self, before: int, lane: int, number: int) -> None:
        """Give the name and lane of a number to a later one."""
        name = self._names[number] = self._names[before]
        assert name is not None
        if lane == LANE_NORMAL:
            self._numbers[name] = number
        else:
            others = self._other_lanes[name]
            del others[lane]  # they are ascending by number
            others[lane] = number

    def _map(self, name: str, lane: int, number: int) -> None:
        others = self._other_lanes.get(name)
        known = self._numbers.get(name) if others is None else next(iter(others.values()))
        if known is None:
            self._heads.append(number)
            if is_private(name):
                self._copied[origin_subject(name)] += 1
        else:
            self._names[number] = self._names[known]  # all lanes share one text
        kind = kind_of(lane)
        if lane == LANE_NORMAL:
            self._numbers[name] = number
        else:
            if others is None:
                others = self._other_lanes[name] = {}
                self._lane_names.append(name)
            if kind < LANE_ORDERED or not any(kind_of(other) == kind for other in others):  # priorities are two
                self._kinds.append((number, name, kind))
            others[lane] = number
            self.has_lanes = True
        self.lane_kinds.add(kind)
        if name[0] == INTERNAL:
            self.has_private = True

    def number(self, name: str, lane: int = LANE_NORMAL) -> int | None:
        """Return the number of a lane of a subject, None when it does not exist or stands for a lost name."""
        if lane == LANE_NORMAL:
            return self._numbers.get(name)
        others = self._other_lanes.get(name)
        return None if others is None else others.get(lane)

    def has_name(self, name: str) -> bool:
        """Return whether a subject exists, in any lane."""
        return name in self._numbers or name in self._other_lanes

    def count_under(self, prefix: str, place: int) -> int:
        """Return how many names start with *prefix*, from the subject on that is *place* subjects after the first."""
        names = self._names
        return sum((name := names[head]) is not None and name.startswith(prefix) for head in self._heads[place:])

    def count_lanes_under(self, prefix: str) -> int:
        """Return how many other lanes than the normal one the subjects have whose names start with *prefix*."""
        return sum(len(self._other_lanes[name]) for name in self._lane_names if name.startswith(prefix))

    def numbers(self, names: Iterable[str]) -> list[int | None]:
        """Return the number of the normal lane of each of many subjects, None for those that do not exist."""
        return list(map(self._numbers.get, names))

    def numbers_of(self, name: str) -> list[int]:
        """Return the numbers of all lanes of a subject, ascending; none when it does not exist."""
        normal, others = self._numbers.get(name), self._other_lanes.get(name)
        if others is None:
            return [] if normal is None else [normal]
        numbers = list(others.values())
        if normal is not None:
            insort(numbers, normal)
        return numbers

    def other_lanes(self, name: str) -> dict[int, int]:
        """Return the number of each lane of a subject but the normal one, by lane; it may change with the next
        ``add``.
        """
        return self._other_lanes.get(name, {})

    def names_with_lanes(self, place: int, most: int) -> list[str]:
        """Return *most* names of subjects that have other lanes than the normal one, in the order in which they got
        these, from that place on.
        """
        return self._lane_names[place : place + most]

    def kinds_under(self, prefix: str, since: int) -> set[int]:
        """Return the kinds of other lanes than the normal one of which a subject under *prefix* got its first one from
        number *since* on. It takes a look at each such subject, not at each slot.
        """
        new = self._kinds[bisect_left(self._kinds, (since,)) :]
        return {kind for _, name, kind in new if name.startswith(prefix)}

    def lanes_of(self, name: str) -> dict[int, int]:
        """Return the number of each lane of a subject, by lane."""
        normal = self._numbers.get(name)
        lanes = {} if normal is None else {LANE_NORMAL: normal}
        return lanes | self._other_lanes.get(name, {})

    def lane(self, number: int) -> int:
        """Return the lane of a number."""
        return int(self.lanes[number])

    @property
    def lane_name_count(self) -> int:
        """The count of subjects that have other lanes than the normal one."""
        return len(self._lane_names)

    @property
    def name_count(self) -> int:
        """The count of subjects, each counted once whatever its lanes."""
        return len(self._heads)

    @property
    def further_lane_count(self) -> int:
        """How many lanes all subjects have beyond one each."""
        return len(self._names) - self.forgotten_count - len(self._heads)

    def heads(self, start: int, most: int) -> list[int]:
        """Return the number of the first lane of each subject, from number *start* on, of *most* subjects."""
        place = bisect_left(self._heads, start)
        return self._heads[place : place + most].tolist()

    def has_copies(self, name: str) -> bool:
        """Return whether there is a private subject for copies of a subject's messages."""
        return name in self._copied

    def count_live(self, new: int) -> int:
        """Return how many subjects have messages; those from number *new* on count in any case, for they are about to
        get their first. Each is looked at.
        """
        count = len(self._names)
        has_messages = self.ends[:count] > self.firsts[:count]
        has_messages[new:] = True
        heads = np.array(self._heads, np.int64)
        live = int(np.count_nonzero(has_messages[heads]))
        for name in self._lane_names:
            others = self.further_lanes(name)
            normal = self._numbers.get(name)
            head = min(self._other_lanes[name].values()) if normal is None else normal
            live += not has_messages[head] and bool(has_messages[others].any())
        return live

    def names_of(self, numbers: Iterable[int]) -> list[str | None]:
        """Return the names of these numbers, None where the record is damaged."""
        return list(map(self._names.__getitem__, numbers))

    def names_between(self, start: int, end: int) -> list[str | None]:
        """Return the names of the numbers in [start, end), None where the record is damaged."""
        return self._names[start:end]

    def name(self, number: int) -> str:
        """Return the name of a subject. Raises BadBytes when its record is damaged."""
        name = self._names[number]
        if name is None:
            raise BadBytes(f"the record of subject {number} in {self.path} is damaged; run qmq verify")
        return name

    def under(self, prefix: str, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the numbers in [start, end), of all lanes, of subjects whose names start with *prefix*, ascending: a
        million subjects take 0.2 s.
        """
        if end - start <= len(self._names) - len(self._heads):  # further lanes
            names = enumerate(self._names[start:end], start)
            named = [number for number, name in names if name is not None and name.startswith(prefix)]
            return np.array(named, np.int64)
        names_of, first, last = self._names, bisect_left(self._heads, start), bisect_left(self._heads, end)
        numbers = [
            number
            for number in self._heads[first:last]
            if (name := names_of[number]) is not None and name.startswith(prefix)
        ]
        under = [name for name in self._lane_names if name.startswith(prefix)]
        if not under:
            return np.array(numbers, np.int64)
        is_under = np.zeros(end - start, np.bool_)
        is_under[np.array(numbers, np.int64) - start] = True
        for name in under:
            lanes = self.further_lanes(name)
            is_under[lanes[(lanes >= start) & (lanes < end)] - start] = True
        return np.flatnonzero(is_under) + start

    def further_lanes(self, name: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the lanes of a subject but its first: i64[n]."""
        others = self._other_lanes.get(name, {})
        numbers = np.fromiter(others.values(), np.int64, len(others))
        normal = self._numbers.get(name)
        if normal is None or not len(numbers):
            return numbers[1:]
        if normal < numbers[0]:
            return numbers
        numbers[0] = normal  # in the place of the first
        return numbers

    def add(self, name: str, lane: int = LANE_NORMAL) -> int:
        """Add a lane of a name (not empty, ASCII) and return its number. The caller knows that it does not exist."""
        number = len(self._names)
        if number >= len(self.ends):
            self.ends = np.concatenate((self.ends, np.zeros_like(self.ends)))
            self.firsts = np.concatenate((self.firsts, np.zeros_like(self.firsts)))
            self.lanes = np.concatenate((self.lanes, np.zeros_like(self.lanes)))
            self.is_forgotten = np.concatenate((self.is_forgotten, np.zeros_like(self.is_forgotten)))
        self._pending.append(pack_record(name, number, lane))
        self._names.append(name)
        self.lanes[number] = lane
        if _is_found(name):
            self._map(name, lane, number)
        else:
            self._heads.append(number)
            self.lost.append(number)
        self.ends[number] = self.firsts[number] = self.new_begin
        return number

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget numbers without messages: the names are free for new numbers. *numbers* are known, each given once.

        It costs 2 us a number, and 2 ms where a million subjects are known.
        """
        names, lanes, touched = self._names, self.lanes[list(numbers)].tolist(), set[str]()
        for number, lane in zip(numbers, lanes, strict=True):
            name = names[number]
            names[number] = FORGOTTEN
            if name is None or not _is_found(name):
                continue
            touched.add(name)
            if lane == LANE_NORMAL:
                del self._numbers[name]
            else:
                del self._other_lanes[name][lane]
        self.is_forgotten[list(numbers)] = True
        heads = np.array(self._heads, np.uint32)
        heads = heads[~self.is_forgotten[heads]]
        moved = [left for left in map(self._forget_name, touched) if left is not None]
        if moved:
            heads = np.union1d(heads, np.array(moved, np.uint32))
        self._heads = array("I", heads.tobytes())
        self.lost = [number for number in self.lost if not self.is_forgotten[number]]
        if any(lanes):
            self._lane_names = [name for name in self._lane_names if name in self._other_lanes]
            self._kinds = [known for known in self._kinds if self._has_kind(known[1], known[2])]
        self.forgotten_end = max(self.forgotten_end, int(self.ends[list(numbers)].max(initial=0)))
        self.ends[list(numbers)] = self.firsts[list(numbers)] = 0
        self.forgotten_count += len(numbers)
        self.generation += 1

    def _forget_name(self, name: str) -> int | None:
        """Forget a name that has no lanes any more; return the number of its first lane where it has some."""
        if not self._other_lanes.get(name, True):
            del self._other_lanes[name]
        left = self.numbers_of(name)
        if left:
            return left[0]
        if is_private(name):
            origin = origin_subject(name)
            self._copied[origin] -= 1
            if not self._copied[origin]:
                del self._copied[origin]
        return None

    def _has_kind(self, name: str, kind: int) -> bool:
        return any(kind_of(lane) == kind for lane in self._other_lanes.get(name, ()))

    def restore_forgotten(self, numbers: npt.NDArray[np.uint32], end: int) -> None:
        """Forget the numbers that a checkpoint had forgotten, whose sequences lay before *end*."""
        new = numbers[~self.is_forgotten[numbers]]
        self.forget(new.tolist())
        self.forgotten_end = max(self.forgotten_end, end)

    def settle_forgotten(self, raise_by: int) -> None:
        """Forget the sequences of forgotten numbers, too, after a start that has raised all sequences."""
        gone = self.is_forgotten[: len(self._names)]
        if gone.any():
            self.ends[: len(gone)][gone] = self.firsts[: len(gone)][gone] = 0
            left = ~self.is_forgotten[self.gaps.subjects]
            gaps = self.gaps
            gaps.subjects, gaps.starts, gaps.ends = gaps.subjects[left], gaps.starts[left], gaps.ends[left]
        if self.forgotten_end:
            self.forgotten_end += raise_by

    def restore(self, names: dict[int, tuple[str, int]]) -> None:
        """Give all damaged records the names and lanes that the message log still has, and write the registry again.

        It is on disk when this returns. Raises StorageFull or StorageFailed; the old file stands then.
        """
        assert all(name is not None or number in names for number, name in enumerate(self._names))
        lanes = self.lanes[: len(self._names)].tolist()
        whole = [
            names[number] if name is None else (name, lane)
            for number, (name, lane) in enumerate(zip(self._names, lanes, strict=True))
        ]
        records = [pack_record(name, number, lane) for number, (name, lane) in enumerate(whole)]
        data = b"".join((self._header, *records))
        write_atomically(self._disk, self.path, data)
        try:
            fd = self._disk.open(self.path, os.O_RDWR)
        except OSError as error:
            raise failure(error, "open", self.path) from error
        self._disk.close(self._fd)
        self._fd, self._names, self.length_bytes, self.damaged = fd, [name for name, _ in whole], len(data), []
        self.lanes[: len(whole)] = [lane for _, lane in whole]
        self.is_forgotten[:] = False
        self._index()
        self._pending.clear()

    def message_count(self, number: int, first: int, end: int) -> int:
        """Return how many messages the sequences [first, end) of a subject are, gaps left out."""
        return max(0, end - first - self.gaps.missing(number, first, end))

    def skip_sequences(self, numbers: npt.ArrayLike, firsts: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Note that no message has these sequences of some subjects, unless the next start finds one: columns, or ints
        of one subject.
        """
        self.gaps.add(numbers, firsts, np.asarray(firsts, np.uint64) + np.asarray(counts, np.uint64))

    def messages_of(
        self, numbers: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> int:  # fmt: skip
        """Return the messages in the sequences [first, end) of these subjects, each named once, gaps left out: i64[n]
        each.
        """
        messages = int(np.maximum(ends - firsts, 0).sum())
        if not len(self.gaps) or not len(numbers):
            return messages
        by_number = np.argsort(numbers, kind="stable")
        at = np.searchsorted(numbers, self.gaps.subjects, sorter=by_number)
        within = at < len(numbers)
        within[within] = numbers[by_number[at[within]]] == self.gaps.subjects[within]
        which = by_number[at[within]]
        low = np.maximum(self.gaps.starts[within].astype(np.int64), firsts[which])
        high = np.minimum(self.gaps.ends[within].astype(np.int64), ends[which])
        return messages - int(np.maximum(high - low, 0).sum())

    def flush(self) -> int:
        """Write the new records, and return the descriptor that is to be fsynced. ``length_bytes`` then covers all.

        Raises StorageFull or StorageFailed; nothing is lost then, the next call tries again.
        """
        if self._pending:
            data = b"".join(self._pending)
            try:
                write_fully(self._disk, self._fd, [data], self.length_bytes)
            except OSError as error:
                raise failure(error, "write", self.path, self.length_bytes) from error
            self.length_bytes += len(data)
            self._pending.clear()
        return self._fd

    def close(self) -> None:
        """Close the file; records that were not flushed are lost."""
        self._disk.close(self._fd)


def _is_found(name: str) -> bool:
    """Return whether batches may use the name: not if it stands for a lost name, with a ~ at its beginning only."""
    return name[0] != INTERNAL or INTERNAL in name[1:]
