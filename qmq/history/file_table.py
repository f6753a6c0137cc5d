"""The table of files of an archive: which Parquet files count, and how much of which segments is in them.

    tables/<number>.table                                    the highest number counts, as a whole
    parquet/date=<day>/subjects=<subject>/<name>.parquet     what it lists

A file that the table does not list is nobody's: the run that wrote it was killed. Whoever commits makes the table with
the next number, unless it is there: of two runs at once, which the lock refuses, one would fail here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple, TypeVar

from qmq.errors import BadBytes, DirectoryInUse, StorageFailed
from qmq.format.checked import pack_checked, parse_checked
from qmq.history.files import Files, WritableFiles
from qmq.history.segments import SegmentSource

VERSION: Final = 1
TABLES: Final = "tables"
PARQUET: Final = "parquet"
#: How often a reader looks again whose table went while it was reading: two runs have finished meanwhile.
_TRIES: Final = 5
_SUFFIX: Final = ".table"
_ADVICE: Final = "put back a good copy, or remove it and archive again: the table before it counts then"


@dataclass(frozen=True)
class ListedFile:
    """A Parquet file. Its path in the archive; crc32c of all its bytes; times in microseconds."""

    path: str
    #: That of all its messages; None where it has several.
    subject: str | None
    messages: int
    size: int
    crc: int
    first_stored_at_us: int
    last_stored_at_us: int


class SegmentKey(NamedTuple):
    """Which segment: store id in hex, and positions."""

    store_id: str
    partition: int
    base: int


@dataclass(frozen=True)
class ListedSegment:
    """A segment that is in the files up to the position ``end``, and how many messages that are."""

    store_id: str
    partition: int
    base: int
    end: int
    messages: int

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.store_id, self.partition, self.base)


@dataclass(frozen=True)
class ListedDamage:
    """Bytes of a segment that were bad when it was archived: positions [start, end), what they held nobody has here."""

    store_id: str
    partition: int
    start: int
    end: int
    #: None where nobody can tell.
    messages: int | None
    reason: str


@dataclass(frozen=True)
class FileTable:
    """The whole table; number 0 where nothing was archived yet."""

    number: int = 0
    files: tuple[ListedFile, ...] = ()
    segments: tuple[ListedSegment, ...] = ()
    damages: tuple[ListedDamage, ...] = ()

    @property
    def messages(self) -> int:
        """In all files."""
        return sum(file.messages for file in self.files)

    def ends(self) -> dict[SegmentKey, int]:
        """Up to where each segment is in."""
        return {segment.key: segment.end for segment in self.segments}

    def with_more(
        self, files: Iterable[ListedFile], segments: Iterable[ListedSegment], damages: Iterable[ListedDamage]
    ) -> FileTable:
        """The next table. *segments* say how far they are in now, and how many messages came with that."""
        known = {segment.key: segment for segment in self.segments}
        for segment in segments:
            before = known.get(segment.key)
            more = before.messages if before is not None else 0
            known[segment.key] = replace(segment, messages=segment.messages + more)
        return FileTable(
            self.number + 1,
            (*self.files, *files),
            tuple(known[key] for key in sorted(known)),
            (*self.damages, *damages),
        )

    def pack(self) -> bytes:
        """The bytes of its file."""
        return pack_checked(VERSION, asdict(self))


def path_of(number: int) -> str:
    """Where a table lies."""
    return f"{TABLES}/{number:08}{_SUFFIX}"


def numbers(files: Files) -> list[int]:
    """The numbers of the tables that are there, ascending. Raises StorageFailed."""
    stems = [name.removesuffix(_SUFFIX) for name in files.names(TABLES) if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_table(files: Files) -> FileTable:
    """The table that counts. Raises BadBytes when it is rotten, ForeignFile, StorageFailed."""
    for _ in range(_TRIES):
        found = numbers(files)
        if not found:
            return FileTable()
        path = path_of(found[-1])
        try:
            return parse_table(files.read_whole(path), found[-1], f"{files.name}/{path}")
        except FileNotFoundError:
            continue
    raise StorageFailed(f"the tables of {files.name} go as fast as they are read; try again")


def parse_table(data: bytes, number: int, name: str) -> FileTable:
    """Read a table. Raises BadBytes when it is not what was written, ForeignFile for a newer version."""
    content = parse_checked(data, VERSION, name, _ADVICE)
    try:
        table = FileTable(
            content["number"],
            _listed(ListedFile, content["files"]),
            _listed(ListedSegment, content["segments"]),
            _listed(ListedDamage, content["damages"]),
        )
    except (KeyError, TypeError) as error:
        raise BadBytes(f"{name} lacks what a table has ({error!r:.80}); {_ADVICE}") from error
    if table.number != number:
        raise BadBytes(f"{name} is the table {table.number}; put it back where it belongs")
    return table


def commit(files: WritableFiles, table: FileTable) -> None:
    """Make a table the one that counts; the one before stays for who is reading it. Raises DirectoryInUse when another
    run has made one meanwhile, StorageFull or StorageFailed.
    """
    files.make_directory(TABLES)
    if not files.claim(path_of(table.number), table.pack()):
        raise DirectoryInUse(f"another run has archived to {files.name} meanwhile; run it again")
    for number in numbers(files):
        if number < table.number - 1:
            files.remove(path_of(number))


def only_in_files(table: FileTable, segments: Iterable[SegmentSource]) -> list[ListedSegment]:
    """What a table has more than the archived *segments*: those that go on in the files, or are in these alone."""
    ends = {SegmentKey(each.store_id.hex(), each.partition, each.base): each.end for each in segments}
    return [segment for segment in table.segments if segment.end > ends.get(segment.key, 0)]


_Listed = TypeVar("_Listed", ListedFile, ListedSegment, ListedDamage)


def _listed(kind: type[_Listed], rows: list[dict[str, Any]]) -> tuple[_Listed, ...]:
    names = [field.name for field in fields(kind)]
    return tuple(kind(**{name: row[name] for name in names}) for row in rows)
