"""An archive: a directory of any file system, with copies of sealed segments of any stores.

    segments/<store id>-<partition>/<base>.messages, .index, .manifest
    _lock                               who writes to it

A segment is there when its manifest is: that comes last. Names that begin with ``_`` are nobody's yet.
"""

from __future__ import annotations

from typing import Final

from qmq.errors import BadBytes
from qmq.history.files import Files
from qmq.history.manifest import Manifest, parse_manifest
from qmq.history.segments import INDEX, MESSAGES, SegmentSource

SEGMENTS: Final = "segments"
MANIFEST: Final = ".manifest"


def directory_of(store_id: bytes, partition: int) -> str:
    """Where the segments of a partition lie."""
    return f"{SEGMENTS}/{store_id.hex()}-{partition}"


def is_archive(files: Files) -> bool:
    """Whether anything was archived there. Raises StorageFailed."""
    return SEGMENTS in files.names("")


def manifests(files: Files) -> list[tuple[str, Manifest]]:
    """All segments that are there: their path less the suffix, and what is said of them, by partition and position.

    Raises BadBytes for a manifest that is rotten, or of another place; StorageFailed.
    """
    found = []
    for directory in files.names(SEGMENTS):
        for name in files.names(f"{SEGMENTS}/{directory}"):
            if name.startswith("_") or not name.endswith(MANIFEST):
                continue
            path = f"{SEGMENTS}/{directory}/{name}"
            manifest = parse_manifest(files.read_whole(path), f"{files.name}/{path}")
            place = f"{directory_of(bytes.fromhex(manifest.store_id), manifest.partition)}/{manifest.base:016x}"
            if place + MANIFEST != path:
                raise BadBytes(f"{files.name}/{path} tells of {place}; put it back where it belongs")
            found.append((place, manifest))
    return found


def archived_segments(files: Files) -> list[SegmentSource]:
    """What there is to read. Raises as ``manifests`` does."""
    return [
        SegmentSource(
            bytes.fromhex(manifest.store_id), manifest.partition, manifest.base, manifest.end, path + MESSAGES,
            path + INDEX, None,
        )
        for path, manifest in manifests(files)
    ]  # fmt: skip
