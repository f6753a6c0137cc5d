"""The key index of one sealed segment: ``<base:016x>.keys``, made once and read a page at a time.

A page is 4,096 bytes with a checksum of its own, so a look-up trusts what it reads without reading the whole file:

    page 0         DERIVED_HEADER (magic ``QMQKHASH``; covered: where the segment ends; count: entries), then zeros
    entries        ascending by (hash, offset), 341 a page: hash u64[341] | offset u32[341] of the batch in the segment
    filter         a Bloom filter, 12 bits an entry; the page of a hash is (hash >> 32) x pages >> 32

All of it is derived from the segment: made again, it is equal byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import (
    DERIVED_HEADER_SIZE,
    KEY_FILTER_BITS,
    KEY_FILTER_PAGE_BITS,
    KEY_FILTER_PROBES,
    KEY_PAGE_CONTENT,
    KEY_PAGE_ENTRIES,
    KEY_PAGE_SIZE,
    KEYS_MAGIC,
)
from qmq.storage.consumer_log.header import DerivedHeader, parse_derived
from qmq.storage.disk.disk import Disk, read_fully

SUFFIX: Final = ".keys"
#: The suffix of a file that is not whole yet, and that of the sorted parts of one that is being made.
UNFINISHED: Final = ".tmp"
PARTS: Final = ".keys.parts"

_HASH_BYTES: Final = 8 * KEY_PAGE_ENTRIES
_PAD: Final = KEY_PAGE_SIZE - DERIVED_HEADER_SIZE
_FIRST_STEP: Final = 4
_READ_BYTES: Final = 1 << 20
_DELETE: Final = "delete it, it is made again"

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.uint32]


class Sizes(NamedTuple):
    """How many pages a key index of so many entries has."""

    entry_pages: int
    filter_pages: int

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return KEY_PAGE_SIZE * (1 + self.entry_pages + self.filter_pages)


def sizes_of(entries: int) -> Sizes:
    """Return the sizes of a key index with this many entries."""
    return Sizes(-(-entries // KEY_PAGE_ENTRIES), -(-entries * KEY_FILTER_BITS // KEY_FILTER_PAGE_BITS))


def keys_path(directory: Path, base: int) -> Path:
    """Return the path of the key index of the segment that begins at *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def base_of(name: str) -> int | None:
    """Return the base in the name of a key index, also of one that is being made; None for any other file."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix not in (SUFFIX, SUFFIX + UNFINISHED, PARTS) or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def seal_page(content: bytes, number: int) -> bytes:
    """Return the page with this content, padded, and this number in its file."""
    padded = content + bytes(KEY_PAGE_CONTENT - len(content))
    return padded + crc32c(padded, number).to_bytes(4, "little")


def is_page(page: bytes, number: int) -> bool:
    """Return whether a page is whole, and the one with this number."""
    content, crc = page[:KEY_PAGE_CONTENT], page[KEY_PAGE_CONTENT:]
    return len(page) == KEY_PAGE_SIZE and crc32c(content, number) == int.from_bytes(crc, "little")


def pack_entries(hashes: Hashes, offsets: Offsets, first_page: int) -> bytes:
    """Return the pages of these entries, sorted; only the last may be less than full."""
    pages = []
    for start in range(0, len(hashes), KEY_PAGE_ENTRIES):
        part = slice(start, start + KEY_PAGE_ENTRIES)
        column = hashes[part].astype("<u8").tobytes()
        content = column + bytes(_HASH_BYTES - len(column)) + offsets[part].astype("<u4").tobytes()
        pages.append(seal_page(content, first_page + start // KEY_PAGE_ENTRIES))
    return b"".join(pages)


def probes_of(hashes: Hashes) -> npt.NDArray[np.int64]:
    """Return the bits of a filter page that stand for hashes: int64[n, KEY_FILTER_PROBES]."""
    low = (hashes & np.uint64(0xFFFFFFFF)).astype(np.int64)
    step = 1 + (hashes >> np.uint64(16)).astype(np.uint32).astype(np.int64) % (KEY_FILTER_PAGE_BITS - 1)
    return (low[:, None] + step[:, None] * np.arange(KEY_FILTER_PROBES)) % KEY_FILTER_PAGE_BITS


def probes_of_one(value: int) -> list[int]:
    """Return the bits of a filter page that stand for one hash."""
    low, step = value & 0xFFFFFFFF, 1 + (value >> 16 & 0xFFFFFFFF) % (KEY_FILTER_PAGE_BITS - 1)
    return [(low + step * probe) % KEY_FILTER_PAGE_BITS for probe in range(KEY_FILTER_PROBES)]


def may_have(page: bytes | memoryview, probes: list[int]) -> bool:
    """Return False when the page of a filter has none with these bits."""
    return all(page[bit >> 3] >> (bit & 7) & 1 for bit in probes)


class Filter:
    """The filter of a key index, filled by ascending hashes."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._bits = np.zeros((pages, KEY_PAGE_CONTENT), np.uint8)

    def add(self, hashes: Hashes) -> None:
        """Add hashes, ascending."""
        pages = ((hashes >> np.uint64(32)) * np.uint64(self._pages) >> np.uint64(32)).astype(np.int64)
        for start in range(0, len(hashes), _FILTER_STEP):
            part = slice(start, start + _FILTER_STEP)
            first, last = int(pages[start]), int(pages[part][-1])
            flags = np.zeros(((last - first + 1), KEY_FILTER_PAGE_BITS), np.bool_)
            flags[(pages[part] - first)[:, None], probes_of(hashes[part])] = True
            self._bits[first : last + 1] |= np.packbits(flags, axis=1, bitorder="little")

    def pack(self, first_page: int) -> bytes:
        """Return its pages."""
        return b"".join(seal_page(bits.tobytes(), first_page + page) for page, bits in enumerate(self._bits))


_FILTER_STEP: Final = 32_768


# ---------------------------------------------------------------------------------------------------------------------
# The file


class OpenFile(Protocol):
    """A file that is open for reading, on a disk or in an archive."""

    def size(self) -> int:
        """Return the size of the file."""

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes, fewer only at the end of the file."""

    def close(self) -> None:
        """Close the file."""


class _DiskFile:
    """A file of a disk, read without read-ahead."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._fd = disk.open_uncached(path)

    def size(self) -> int:
        return self._disk.size(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        return read_fully(self._disk, self._fd, size, offset)

    def close(self) -> None:
        self._disk.close(self._fd)


class KeyFile:
    """An open key index of a segment. Every page that is read is checked. Reading raises what the file's does."""

    def __init__(self, file: OpenFile, path: Path, owner: DerivedHeader) -> None:
        """Take over the file of the segment that *owner* names: the header of the file, but for count and body_crc.

        Raises BadBytes, with *file* left open, when it is not that, or is of another version.
        """
        self._file = file
        self.path = path
        self.header = _checked_header(file, path, owner)
        self.count = self.header.rows
        self.sizes = sizes_of(self.count)

    @classmethod
    def open(cls, disk: Disk, directory: Path, owner: DerivedHeader) -> KeyFile:
        """Open the file beside a segment in *directory*; *owner* as above. Raises BadBytes and OSError."""
        path = keys_path(directory, owner.base)
        file = _DiskFile(disk, path)
        try:
            return cls(file, path, owner)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def may_have(self, value: int) -> bool:
        """Return False when the segment has no message with this hash; True when it may have one. Raises BadBytes,
        OSError.
        """
        pages = self.sizes.filter_pages
        if not pages:
            return False
        page = self._page(1 + self.sizes.entry_pages + ((value >> 32) * pages >> 32))
        return may_have(page, probes_of_one(value))

    def offsets(self, value: int, low: int, high: int, *, newest: bool = False, limit: int = 0) -> list[int]:
        """Return the offsets in [low, high) of batches that have this hash, ascending, or descending with *newest*: a
        page of them at least, if there are so many, until *limit* is reached. Raises BadBytes, OSError.
        """
        pages = self.sizes.entry_pages
        if not pages or low >= high:
            return []
        at = self._page_before(value, high if newest else low)
        found: list[int] = []
        key = np.uint64(value)
        while 0 <= at < pages:
            hashes, offsets = self._entries(at)
            first, end = int(hashes.searchsorted(key)), int(hashes.searchsorted(key, "right"))
            same = offsets[first:end]
            same = same[(same >= low) & (same < high)]
            found += (same[::-1] if newest else same).tolist()
            goes_on = first == 0 if newest else end == len(hashes)
            if not goes_on or len(found) >= limit > 0:
                break
            at += -1 if newest else 1
        return found

    def _page_before(self, value: int, offset: int) -> int:
        """Return the last page of entries that begins before (value, offset); 0 when there is none."""
        target, pages = (value, offset), self.sizes.entry_pages
        low, high, step = 0, pages, _FIRST_STEP
        middle = value * pages >> 64  # hashes are even over their range
        while high - low > 1:
            middle = min(max(middle, low + 1), high - 1)
            hashes, offsets = self._entries(middle)
            if (int(hashes[0]), int(offsets[0])) < target:
                low = middle
            else:
                high = middle
            if step > high - low:
                middle = (low + high) // 2
            else:
                middle = low + step if low == middle else high - step
                step *= 4
        return low

    def _entries(self, page: int) -> tuple[Hashes, Offsets]:
        """Return the entries of a page of entries: never none."""
        count = min(KEY_PAGE_ENTRIES, self.count - page * KEY_PAGE_ENTRIES)
        data = self._page(1 + page)
        return np.frombuffer(data, "<u8", count), np.frombuffer(data, "<u4", count, _HASH_BYTES)

    def all_entries(self) -> tuple[Hashes, Offsets]:
        """Return all entries. Raises BadBytes, OSError."""
        parts = [self._entries(page) for page in range(self.sizes.entry_pages)]
        if not parts:
            return np.empty(0, np.uint64), np.empty(0, np.uint32)
        hashes, offsets = zip(*parts, strict=True)
        return np.concatenate(hashes), np.concatenate(offsets)

    def filter_bytes(self) -> bytes:
        """Return all pages of the filter. Raises BadBytes, OSError."""
        first = 1 + self.sizes.entry_pages
        return b"".join(self._page(first + page) for page in range(self.sizes.filter_pages))

    def check_body(self) -> None:
        """Read all of the file. Raises BadBytes when it does not fit its checksum."""
        crc, end = 0, self.sizes.file_bytes
        for offset in range(0, end, _READ_BYTES):
            data = self._file.read(offset, min(_READ_BYTES, end - offset))
            crc = crc32c(data[0 if offset else DERIVED_HEADER_SIZE :], crc)
        if crc != self.header.body_crc:
            raise BadBytes(f"{self.path} does not fit its checksum; {_DELETE}")

    def _page(self, number: int) -> bytes:
        page = self._file.read(number * KEY_PAGE_SIZE, KEY_PAGE_SIZE)
        if not is_page(page, number):
            raise BadBytes(f"{self.path} is rotten at byte {number * KEY_PAGE_SIZE}; {_DELETE}")
        return page


def _checked_header(file: OpenFile, path: Path, owner: DerivedHeader) -> DerivedHeader:
    """Return the header of a key index, whose size and first page are as they should be. Raises BadBytes."""
    first = file.read(0, KEY_PAGE_SIZE)
    try:
        header = parse_derived(first, KEYS_MAGIC, path)
    except ForeignFile as error:
        raise BadBytes(str(error)) from error
    expected = owner._replace(sealed=True, rows=header.rows, first_row=0, body_crc=header.body_crc)
    if first != pack_first_page(expected):
        raise BadBytes(f"{path} is not the key index of this segment, as far as it was written; {_DELETE}")
    if file.size() != sizes_of(header.rows).file_bytes:
        raise BadBytes(f"{path} has not the size for its {header.rows} entries; {_DELETE}")
    return header


def pack_first_page(header: DerivedHeader) -> bytes:
    """Return page 0, whose checksum is that of the header."""
    return header.pack(KEYS_MAGIC) + bytes(_PAD)


def owner_of(partition: int, store_id: bytes, base: int, end: int) -> DerivedHeader:
    """Return the header of the key index of a segment that ends at position *end*, but for count and body_crc."""
    return DerivedHeader(partition, store_id, True, base, end, 0, 0, 0)
