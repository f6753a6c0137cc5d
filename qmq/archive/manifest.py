"""The manifest beside an archived segment: what was archived, to be trusted and compared. One line of JSON with its
checksum in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Final

from qmq.errors import BadBytes
from qmq.format.checked import pack_checked, parse_checked

VERSION: Final = 1
_ADVICE: Final = "remove it, and archive its segment again"


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
        return pack_checked(VERSION, asdict(self))


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read a manifest. Raises BadBytes when it is not what was written, ForeignFile for a newer version."""
    content = parse_checked(data, VERSION, name, _ADVICE)
    try:
        return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})
    except (KeyError, TypeError) as error:
        raise BadBytes(f"{name} is no manifest ({error!r:.80}); {_ADVICE}") from error
