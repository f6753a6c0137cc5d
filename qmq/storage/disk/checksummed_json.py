"""A small record as one line of JSON with its checksum: manifests of archives, and receipts beside segments.

The field ``check`` is the crc32c, as 8 hex digits, of the JSON of all other fields with sorted names and no blanks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.versions import check_version


def pack_json(version: int, content: Mapping[str, Any]) -> bytes:
    """Return the record as a line, with its version and checksum."""
    fields = {"version": version, **content}
    return _json({**fields, "check": _check(fields)}) + b"\n"


def parse_json(data: bytes, version: int, name: str, advice: str) -> dict[str, Any]:
    """Return the fields of a line, without version and checksum.

    *name* and *advice*, which says what to do, are for errors. Raises BadBytes for a line that QMQ did not write so,
    ForeignFile for a version that is not from 1 to *version*.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        check, found = content.pop("check"), content["version"]
        if check != _check(content):
            raise BadBytes(f"{name} does not fit its checksum; {advice}")
        check_version(name, found, version)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBytes(f"{name} is not a record of QMQ ({error!r:.80}); {advice}") from error
    del content["version"]
    return content


def _check(content: Mapping[str, Any]) -> str:
    return f"{crc32c(_json(content)):08x}"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
