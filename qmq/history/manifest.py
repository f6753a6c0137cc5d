"""The manifest beside an archived segment: what was archived, to be trusted and compared. One line of JSON.

Its ``check`` is the crc32c, 8 hex digits, of the JSON of all other fields with sorted names and no blanks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile

VERSION: Final = 1


@dataclass(frozen=True)
class Manifest:
    """One archived segment. Positions; times in microseconds; checksums are crc32c of whole files."""

    store_id: str
    partition: int
    base: int
    #: Behind the last batch.
    end: int
    batches: int
    messages: int
    first_stored_at_us: int
    last_stored_at_us: int
    #: Of the file: end - base, but of a segment that had been cut.
    messages_bytes: int
    messages_crc: int
    index_bytes: int
    index_crc: int
    archived_at_us: int

    def pack(self) -> bytes:
        """The bytes of the file."""
        content = {"version": VERSION, **asdict(self)}
        return _json({**content, "check": _check(content)}) + b"\n"


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read a manifest. Raises BadBytes when it is not what was written, ForeignFile for a newer version."""
    try:
        content: dict[str, Any] = json.loads(data)
        check = content.pop("check")
        version = content.pop("version")
        if check != _check({"version": version, **content}):
            raise BadBytes(f"{name} does not fit its checksum; remove it, and archive its segment again")
        if version > VERSION:
            raise ForeignFile(f"{name} has format version {version}; this QMQ reads {VERSION}: use a newer one")
        return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBytes(f"{name} is no manifest ({error!r:.80}); remove it, and archive its segment again") from error


def _check(content: dict[str, Any]) -> str:
    return f"{crc32c(_json(content)):08x}"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
