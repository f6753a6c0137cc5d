"""A small record as one line of JSON with its checksum in it: manifests of archives, receipts beside segments.

Its ``check`` is the crc32c, 8 hex digits, of the JSON of all other fields with sorted names and no blanks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile


def pack_json(version: int, content: Mapping[str, Any]) -> bytes:
    """The line, with its version."""
    fields = {"version": version, **content}
    return _json({**fields, "check": _check(fields)}) + b"\n"


def parse_json(data: bytes, version: int, name: str, advice: str) -> dict[str, Any]:
    """The fields of a line, without version and check; *advice* says what to do about a bad one.

    Raises BadBytes when it is not what was written, ForeignFile for a version after *version*.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        check, found = content.pop("check"), content["version"]
        if check != _check(content):
            raise BadBytes(f"{name} does not fit its checksum; {advice}")
        if found > version:
            raise ForeignFile(f"{name} has format version {found}; this QMQ reads {version}: use a newer one")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBytes(f"{name} is not one of QMQ's ({error!r:.80}); {advice}") from error
    del content["version"]
    return content


def _check(content: Mapping[str, Any]) -> str:
    return f"{crc32c(_json(content)):08x}"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
