"""An archive: a directory in any file system, with copies of sealed segments of any stores.

    segments/<store id>-<partition>/<base>.messages, .index, .keys, .manifest
    tables/, parquet/                   the same messages as Parquet (qmq/archive/file_table.py)
    _lock                               the run that writes to it

The manifest of a segment is written last: without it, the segment does not count. Names that begin with ``_`` belong to
unfinished files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qmq.archive.file_table import TABLES
from qmq.archive.files import Files
from qmq.archive.manifest import Manifest, parse_manifest
from qmq.archive.segments import INDEX, MESSAGES, SegmentSource
from qmq.errors import BadBytes

SEGMENTS: Final = "segments"
MANIFEST: Final = ".manifest"


def directory_of(store_id: bytes, partition: int) -> str:
    """Return the directory that has the segments of a partition."""
    return f"{SEGMENTS}/{store_id.hex()}-{partition}"


def is_archive(files: Files) -> bool:
    """Return whether the tree has an archive. Raises StorageFailed."""
    return not {SEGMENTS, TABLES}.isdisjoint(files.names(""))


def manifests(files: Files) -> list[tuple[str, Manifest]]:
    """Return the path (without suffix) and the manifest of each archived segment, by partition and position.

    Raises BadBytes for a manifest that is damaged or at the wrong path; StorageFailed.
    """
    paths = [
        f"{SEGMENTS}/{directory}/{name.removesuffix(MANIFEST)}"
        for directory in files.names(SEGMENTS)
        for name in files.names(f"{SEGMENTS}/{directory}")
        if _is_manifest(name)
    ]
    return [(path, _manifest(files, path)) for path in paths]


def archived_segments(files: Files, known: Iterable[SegmentSource] = ()) -> list[SegmentSource]:
    """Return the archived segments. Of the *known* segments of an earlier call, only the last of each partition is read
    again, since no other can have become longer. Raises as ``manifests`` does.
    """
    settled = {segment.path: segment for segment in known}
    lasts = {segment.partition_key: segment.path for segment in settled.values()}  # ordered by partition and position
    for path in lasts.values():
        del settled[path]
    found = []
    for directory in files.names(SEGMENTS):
        names = [name for name in files.names(f"{SEGMENTS}/{directory}") if _is_manifest(name)]
        for name in names:
            path = f"{SEGMENTS}/{directory}/{name.removesuffix(MANIFEST)}"
            found.append(settled.get(path + MESSAGES) or _segment(path, _manifest(files, path)))
    return found


def _segment(path: str, manifest: Manifest) -> SegmentSource:
    store_id = bytes.fromhex(manifest.store_id)
    return SegmentSource(store_id, manifest.partition, manifest.base, manifest.end, path + MESSAGES, path + INDEX, None)


def _is_manifest(name: str) -> bool:
    return name.endswith(MANIFEST) and not name.startswith("_")


def _manifest(files: Files, path: str) -> Manifest:
    """Return the manifest of the segment at *path*, which has no suffix."""
    name = f"{files.name}/{path}{MANIFEST}"
    manifest = parse_manifest(files.read_whole(path + MANIFEST), name)
    place = f"{directory_of(bytes.fromhex(manifest.store_id), manifest.partition)}/{manifest.base:016x}"
    if place != path:
        raise BadBytes(f"{name} is the manifest of {place}; put it back there")
    return manifest
