"""The table of files of an archive: which Parquet files count, and how much of which segments is in them.

    tables/<number>.table                                    the highest number counts
    tables/<number>.second                                   the same as the table of that number, a base
    parquet/date=<day>/subjects=<subject>/<name>.parquet     what it lists

A file that the table does not list is nobody's: the run that wrote it was killed. Whoever commits makes the table with
the next number, unless it is there: of two runs at once, which the lock refuses, one would fail here. A table is whole;
or, where there is much in it, what has changed since one that is, its base. On a base rest all tables that come after
it, the last but one too: so it is kept twice, and where one is rotten the other is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, NamedTuple, TypeVar

from qmq.archive.files import Files, WritableFiles
from qmq.archive.segments import SegmentSource
from qmq.errors import BadBytes, DirectoryInUse, StorageFailed
from qmq.format.checked import pack_checked, parse_checked

_LOG: Final = logging.getLogger("qmq")

VERSION: Final = 1
TABLES: Final = "tables"
PARQUET: Final = "parquet"
#: How often a reader looks again whose table went while it was reading: two runs have finished meanwhile.
_TRIES: Final = 5
_SUFFIX: Final = ".table"
_SECOND: Final = ".second"
#: A table of so many files and segments is not written anew at each commit, but what has changed since it was, unless
#: that is more than such a part of it.
_LARGE: Final = 2_000
_SHARE: Final = 8
_ADVICE: Final = (
    "put back a good copy, or remove it and archive again: the table before it counts then, if that is good"
)


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
    #: Files of its directory that it was merged from, one behind the other, and how many messages each had.
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def origins(self) -> tuple[tuple[str, int], ...]:
        """Those, or it alone: as runs wrote them."""
        return self.parts or ((self.path.rpartition("/")[2], self.messages),)


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
    #: The last one that was written as a whole; later ones say what has changed since.
    base: FileTable | None = field(default=None, compare=False, repr=False)

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
        return replace(
            self,
            number=self.number + 1,
            files=(*self.files, *files),
            segments=tuple(known[key] for key in sorted(known)),
            damages=(*self.damages, *damages),
        )

    def with_merged(self, merged: Iterable[ListedFile]) -> FileTable:
        """The next table: with these files instead of those whose parts they have."""
        merged = tuple(merged)
        gone = {(file.path.rpartition("/")[0], part) for file in merged for part, _ in file.parts}
        kept = [file for file in self.files if (file.path.rpartition("/")[0], file.origins[0][0]) not in gone]
        return replace(self, number=self.number + 1, files=(*kept, *merged))

    def pack(self) -> bytes:
        """The bytes of its file, with all of it."""
        rows = [*map(asdict, self.files)], [*map(asdict, self.segments)], [*map(asdict, self.damages)]
        return _packed(self.number, 0, [], *rows)

    def pack_changes(self) -> bytes | None:
        """The bytes of its file that say what has changed since its base; None where that is much, or all is little."""
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
            self.number, base.number, gone, [*map(asdict, new)], [*map(asdict, more)], [*map(asdict, damages)]
        )

    def changed(self, changes: FileTable, gone: Iterable[str]) -> FileTable:
        """The table that has this one as its base, and these *changes*."""
        lost = set(gone)
        segments = {segment.key: segment for segment in (*self.segments, *changes.segments)}
        return FileTable(
            changes.number,
            (*(file for file in self.files if file.path not in lost), *changes.files),
            tuple(segments[key] for key in sorted(segments)),
            (*self.damages, *changes.damages),
            self,
        )


def _packed(number: int, base: int, gone: list[str], *rows: list[dict[str, Any]]) -> bytes:
    named = dict(zip(("files", "segments", "damages"), rows, strict=True))
    return pack_checked(VERSION, {"number": number, "base": base, "gone": gone, **named})


def path_of(number: int) -> str:
    """Where a table lies."""
    return f"{TABLES}/{number:08}{_SUFFIX}"


def second_of(number: int) -> str:
    """Where a base lies once more."""
    return f"{TABLES}/{number:08}{_SECOND}"


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
        try:
            return _read(files, found[-1], found)
        except FileNotFoundError:
            continue
    raise StorageFailed(f"the tables of {files.name} go as fast as they are read; try again")


def _read(files: Files, number: int, there: list[int]) -> FileTable:
    path = path_of(number)
    table, base, gone = parse_table(files.read_whole(path), number, f"{files.name}/{path}")
    if not base:
        return table
    try:
        if base not in there:
            what = f"says what has changed since {path_of(base)}, which is missing"
            raise BadBytes(f"{files.name}/{path} {what}; {_ADVICE}")
        return _read_whole(files, path_of(base), base).changed(table, gone)
    except BadBytes as error:
        try:
            second = _read_whole(files, second_of(base), base)
        except FileNotFoundError:
            raise error from None
        _LOG.warning("%s. Its second copy was read, and the next table that is made has all of it again", error)
        return replace(second.changed(table, gone), base=None)


def _read_whole(files: Files, path: str, number: int) -> FileTable:
    name = f"{files.name}/{path}"
    whole, before, _ = parse_table(files.read_whole(path), number, name)
    if before:
        raise BadBytes(f"{name} is not whole, and other tables say that it is; {_ADVICE}")
    return whole


def parse_table(data: bytes, number: int, name: str) -> tuple[FileTable, int, list[str]]:
    """Read a table, or what has changed since another one: the number of that, else 0, and paths that are not listed
    any more. Raises BadBytes when it is not what was written, ForeignFile for a newer version.
    """
    content = parse_checked(data, VERSION, name, _ADVICE)
    try:
        table = FileTable(
            content["number"],
            _listed(ListedFile, content["files"]),
            _listed(ListedSegment, content["segments"]),
            _listed(ListedDamage, content["damages"]),
        )
        base, gone = int(content["base"]), list(content["gone"])
    except (KeyError, TypeError) as error:
        raise BadBytes(f"{name} lacks what a table has ({error!r:.80}); {_ADVICE}") from error
    if table.number != number:
        raise BadBytes(f"{name} is the table {table.number}; put it back where it belongs")
    return (table if base else replace(table, base=table)), base, gone


def commit(files: WritableFiles, table: FileTable) -> FileTable:
    """Make a table the one that counts, and give it to go on with; the one before stays for who is reading it, and what
    either is based on. Raises DirectoryInUse when another run has made one meanwhile, StorageFull or StorageFailed.
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
    """Before anything rests on a base it is there twice."""
    path = second_of(base.number)
    if path.rpartition("/")[2] not in files.names(TABLES):
        files.claim(path, base.pack())


def only_in_files(table: FileTable, segments: Iterable[SegmentSource]) -> list[ListedSegment]:
    """What a table has more than the archived *segments*: those that go on in the files, or are in these alone."""
    ends = {SegmentKey(each.store_id.hex(), each.partition, each.base): each.end for each in segments}
    return [segment for segment in table.segments if segment.end > ends.get(segment.key, 0)]


_Listed = TypeVar("_Listed", ListedFile, ListedSegment, ListedDamage)


def _listed(kind: type[_Listed], rows: list[dict[str, Any]]) -> tuple[_Listed, ...]:
    names = [one.name for one in fields(kind)]
    return tuple(kind(**{name: _frozen(row[name]) for name in names}) for row in rows)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
