"""The table of files of an archive: the Parquet files that count, and the segments whose messages they have.

    tables/<number>.table                                    the highest number counts
    tables/<number>.second                                   a second copy of that table, which is a base
    parquet/date=<day>/subjects=<subject>/<name>.parquet     a file that it lists

A file that the table does not list does not count: the run that wrote it was killed. A commit creates the table with
the next number, unless it exists: if two runs committed at once, which the lock prevents, one of them would fail. A
table is whole, or, if it would be large, has the changes since a whole one, its base. All later tables are based on it,
also the last but one. So a base has a second copy, which is read if the first one is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, NamedTuple, TypeVar

from qmq.archive.files import Files, WritableFiles
from qmq.archive.segments import SegmentSource
from qmq.errors import BadBytes, DirectoryInUse, StorageFailed
from qmq.storage.disk.checksummed_json import pack_json, parse_json

_LOG: Final = logging.getLogger("qmq")

VERSION: Final = 1
TABLES: Final = "tables"
PARQUET: Final = "parquet"
#: How often to read again if the table disappears during a read, because two runs have finished meanwhile.
_TRIES: Final = 5
_SUFFIX: Final = ".table"
_SECOND: Final = ".second"
#: A table with at least this many files and segments is not rewritten at each commit; only its changes are written,
#: unless they are more than this part of it.
_LARGE: Final = 2_000
_SHARE: Final = 8
_ADVICE: Final = (
    "put back a good copy, or remove it and archive again; then the table before it counts, if that is good"
)


@dataclass(frozen=True)
class ListedFile:
    """A Parquet file: its path in the archive, crc32c of all its bytes, times in microseconds."""

    path: str
    #: The subject of all its messages; None if they have several.
    subject: str | None
    messages: int
    size: int
    crc: int
    first_stored_at_us: int
    last_stored_at_us: int
    #: The files of its directory that it was merged from, in order, and how many messages each had.
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def origins(self) -> tuple[tuple[str, int], ...]:
        """Return the files that runs wrote and this one has the messages of: its parts, or the file itself."""
        return self.parts or ((self.path.rpartition("/")[2], self.messages),)


class SegmentKey(NamedTuple):
    """The key of a segment: store id in hex, partition and base."""

    store_id: str
    partition: int
    base: int


@dataclass(frozen=True)
class ListedSegment:
    """A segment that the files have up to the position ``end``, and the number of these messages."""

    store_id: str
    partition: int
    base: int
    end: int
    messages: int
    #: The position of the last batch before ``end``, and the crc32c of its header; None where there was no good one, as
    #: in tables of before.
    last_position: int | None = None
    last_crc: int | None = None

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.store_id, self.partition, self.base)


@dataclass(frozen=True)
class ListedDamage:
    """Bytes of a segment, at positions [start, end), that were bad when it was archived; the files lack their
    messages.
    """

    store_id: str
    partition: int
    start: int
    end: int
    #: The number of messages; None if it is unknown.
    messages: int | None
    reason: str


@dataclass(frozen=True)
class FileTable:
    """The whole table; its number is 0 if nothing was archived yet."""

    number: int = 0
    files: tuple[ListedFile, ...] = ()
    segments: tuple[ListedSegment, ...] = ()
    damages: tuple[ListedDamage, ...] = ()
    #: The last table that was written as a whole; later ones have the changes since.
    base: FileTable | None = field(default=None, compare=False, repr=False)

    @property
    def messages(self) -> int:
        """Return the number of messages in all files."""
        return sum(file.messages for file in self.files)

    def ends(self) -> dict[SegmentKey, int]:
        """Return the position up to which the files have each segment."""
        return {segment.key: segment.end for segment in self.segments}

    def by_key(self) -> dict[SegmentKey, ListedSegment]:
        """Return the segments by their keys."""
        return {segment.key: segment for segment in self.segments}

    def with_more(
        self, files: Iterable[ListedFile], segments: Iterable[ListedSegment], damages: Iterable[ListedDamage]
    ) -> FileTable:
        """Return the next table, with more files. *segments* have their new ends and the number of messages added."""
        known = {segment.key: segment for segment in self.segments}
        for segment in segments:
            before = known.get(segment.key)
            more = before.messages if before is not None else 0
            known[segment.key] = replace(segment, messages=segment.messages + more)
        return replace(
            self,
            number=self.number + 1,
            files=(*self.files, *files),
            segments=tuple(known[key] for key in sorted(known)),
            damages=(*self.damages, *damages),
        )

    def with_merged(self, merged: Iterable[ListedFile]) -> FileTable:
        """Return the next table, with the *merged* files instead of their parts."""
        merged = tuple(merged)
        gone = {(file.path.rpartition("/")[0], part) for file in merged for part, _ in file.parts}
        kept = [file for file in self.files if (file.path.rpartition("/")[0], file.origins[0][0]) not in gone]
        return replace(self, number=self.number + 1, files=(*kept, *merged))

    def pack(self) -> bytes:
        """Return the bytes of the whole table."""
        rows = [*map(asdict, self.files)], [*map(_row_of, self.segments)], [*map(asdict, self.damages)]
        return _packed(self.number, 0, [], *rows)

    def pack_changes(self) -> bytes | None:
        """Return the bytes of the changes since the base; None if the table is small or the changes are many."""
        base = self.base
        if base is None or len(base.files) + len(base.segments) < _LARGE:
            return None
        known, segments, paths = set(base.files), set(base.segments), {file.path for file in self.files}
        gone = [file.path for file in base.files if file.path not in paths]
        new = [file for file in self.files if file not in known]
        more = [segment for segment in self.segments if segment not in segments]
        if _SHARE * (len(gone) + len(new) + len(more)) > len(base.files) + len(base.segments):
            return None
        damages = self.damages[len(base.damages) :]
        return _packed(
            self.number, base.number, gone, [*map(asdict, new)], [*map(_row_of, more)], [*map(asdict, damages)]
        )

    def changed(self, changes: FileTable, gone: Iterable[str]) -> FileTable:
        """Return the table that these *changes*, without the files that are *gone*, make of this base."""
        lost = set(gone)
        segments = {segment.key: segment for segment in (*self.segments, *changes.segments)}
        return FileTable(
            changes.number,
            (*(file for file in self.files if file.path not in lost), *changes.files),
            tuple(segments[key] for key in sorted(segments)),
            (*self.damages, *changes.damages),
            self,
        )


def _row_of(segment: ListedSegment) -> dict[str, Any]:
    row = asdict(segment)
    if segment.last_crc is None:
        del row["last_position"], row["last_crc"]
    return row


def _packed(number: int, base: int, gone: list[str], *rows: list[dict[str, Any]]) -> bytes:
    named = dict(zip(("files", "segments", "damages"), rows, strict=True))
    return pack_json(VERSION, {"number": number, "base": base, "gone": gone, **named})


def path_of(number: int) -> str:
    """Return the path of a table."""
    return f"{TABLES}/{number:08}{_SUFFIX}"


def second_of(number: int) -> str:
    """Return the path of the second copy of a base."""
    return f"{TABLES}/{number:08}{_SECOND}"


def numbers(files: Files) -> list[int]:
    """Return the numbers of the existing tables, ascending. Raises StorageFailed."""
    stems = [name.removesuffix(_SUFFIX) for name in files.names(TABLES) if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_table(files: Files) -> FileTable:
    """Return the table that counts. Raises BadBytes if it is damaged, ForeignFile, StorageFailed."""
    for _ in range(_TRIES):
        found = numbers(files)
        if not found:
            return FileTable()
        try:
            return _read(files, found[-1], found)
        except FileNotFoundError:
            continue
    raise StorageFailed(f"the tables of {files.name} are replaced faster than they can be read; try again")


def _read(files: Files, number: int, there: list[int]) -> FileTable:
    path = path_of(number)
    table, base, gone = parse_table(files.read_whole(path), number, f"{files.name}/{path}")
    if not base:
        return table
    try:
        if base not in there:
            what = f"has changes of {path_of(base)}, which is missing"
            raise BadBytes(f"{files.name}/{path} {what}; {_ADVICE}")
        return _read_whole(files, path_of(base), base).changed(table, gone)
    except BadBytes as error:
        try:
            second = _read_whole(files, second_of(base), base)
        except FileNotFoundError:
            raise error from None
        _LOG.warning("%s. Its second copy was read, and the next table will be a whole one again", error)
        return replace(second.changed(table, gone), base=None)


def _read_whole(files: Files, path: str, number: int) -> FileTable:
    name = f"{files.name}/{path}"
    whole, before, _ = parse_table(files.read_whole(path), number, name)
    if before:
        raise BadBytes(f"{name} is not a whole table, but others are based on it; {_ADVICE}")
    return whole


def parse_table(data: bytes, number: int, name: str) -> tuple[FileTable, int, list[str]]:
    """Parse a table, or the changes of one: return also the number of its base (else 0) and the paths that are gone.

    Raises BadBytes if it is damaged, ForeignFile for a newer version.
    """
    content = parse_json(data, VERSION, name, _ADVICE)
    try:
        table = FileTable(
            content["number"],
            _listed(ListedFile, content["files"]),
            _listed(ListedSegment, content["segments"]),
            _listed(ListedDamage, content["damages"]),
        )
        base, gone = int(content["base"]), list(content["gone"])
    except (KeyError, TypeError) as error:
        raise BadBytes(f"{name} lacks a part of a table ({error!r:.80}); {_ADVICE}") from error
    if table.number != number:
        raise BadBytes(f"{name} is the table {table.number}; put it back in its place")
    return (table if base else replace(table, base=table)), base, gone


def commit(files: WritableFiles, table: FileTable) -> FileTable:
    """Make *table* the one that counts, and return it as the base of the next. The table before stays for its readers,
    and the bases of both stay.

    Raises DirectoryInUse if another run has made one meanwhile, StorageFull or StorageFailed.
    """
    files.make_directory(TABLES)
    before, changes = table.base, table.pack_changes()
    if before is not None and changes is not None:
        _write_second(files, before)
    if not files.claim(path_of(table.number), changes if changes is not None else table.pack()):
        raise DirectoryInUse(f"another run has archived to {files.name} meanwhile; run it again")
    table = table if changes is not None else replace(table, base=replace(table, base=None))
    kept = {table.number, table.number - 1, before.number if before is not None else 0}
    for number in numbers(files):
        if number < table.number and number not in kept:
            files.remove(path_of(number))
            files.remove(second_of(number))
    return table


def _write_second(files: WritableFiles, base: FileTable) -> None:
    """Write the second copy of a base, before other tables are based on it."""
    path = second_of(base.number)
    if path.rpartition("/")[2] not in files.names(TABLES):
        files.claim(path, base.pack())


def only_in_files(table: FileTable, segments: Iterable[SegmentSource]) -> list[ListedSegment]:
    """Return the segments, or ends of segments, that the table has and the archived *segments* lack."""
    ends = {SegmentKey(each.store_id.hex(), each.partition, each.base): each.end for each in segments}
    return [segment for segment in table.segments if segment.end > ends.get(segment.key, 0)]


_Listed = TypeVar("_Listed", ListedFile, ListedSegment, ListedDamage)


def _listed(kind: type[_Listed], rows: list[dict[str, Any]]) -> tuple[_Listed, ...]:
    names = [one.name for one in fields(kind)]
    return tuple(kind(**{name: _frozen(row[name]) for name in names if name in row}) for row in rows)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
