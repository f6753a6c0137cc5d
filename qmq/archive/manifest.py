"""The manifest beside an archived segment, which describes it: one line of JSON with its checksum."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Final

from qmq.errors import BadBytes
from qmq.storage.disk.checksummed_json import pack_json, parse_json

VERSION: Final = 1
_ADVICE: Final = "remove it, and archive its segment again"


@dataclass(frozen=True)
class Manifest:
    """One archived segment: positions, times in microseconds, and crc32c checksums of whole files."""

    store_id: str
    partition: int
    base: int
    #: After the last batch.
    end: int
    batches: int
    messages: int
    first_stored_at_us: int
    last_stored_at_us: int
    #: The size of the file: end - base, or less for a segment that was cut.
    messages_bytes: int
    messages_crc: int
    index_bytes: int
    index_crc: int
    #: Of the key index.
    keys_bytes: int
    keys_crc: int
    archived_at_us: int

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        return pack_json(VERSION, asdict(self))


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Parse a manifest. Raises BadBytes if it is damaged, ForeignFile for a newer version."""
    content = parse_json(data, VERSION, name, _ADVICE)
    try:
        return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})
    except (KeyError, TypeError) as error:
        raise BadBytes(f"{name} is no manifest ({error!r:.80}); {_ADVICE}") from error
