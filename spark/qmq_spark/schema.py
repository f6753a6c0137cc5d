"""The Arrow columns of messages."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_TIME: Final = pa.timestamp("us", "UTC")

_TEXT: Final = pa.string()


def _there(name: str, kind: pa.DataType) -> pa.Field:
    """Return a column that every message has."""
    return pa.field(name, kind, nullable=False)


#: All columns in their order.
SCHEMA: Final = pa.schema(
    [
        _there("subject", _TEXT),
        _there("lane", pa.int32()),
        _there("priority", _TEXT),
        _there("partition", pa.int32()),
        _there("position", pa.int64()),
        _there("sequence", pa.int64()),
        _there("message_id", _TEXT),
        pa.field("key", _TEXT),
        _there("keys", pa.list_(_there("element", _TEXT))),
        pa.field("order_key", _TEXT),
        _there("tags", pa.list_(_there("element", _TEXT))),
        _there("properties", pa.map_(_TEXT, _there("value", _TEXT))),
        _there("created_at", _TIME),
        _there("stored_at", _TIME),
        pa.field("source", _TEXT),
        pa.field("sender", _TEXT),
        pa.field("producer", _TEXT),
        pa.field("app", _TEXT),
        _there("body", pa.binary()),
    ]
)
