"""The columns of messages, as Arrow has them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_TIME: Final = pa.timestamp("us", "UTC")

#: All columns, in their order.
SCHEMA: Final = pa.schema(
    [
        ("subject", pa.string()),
        ("lane", pa.int32()),
        ("partition", pa.int32()),
        ("position", pa.int64()),
        ("sequence", pa.int64()),
        ("message_id", pa.string()),
        ("key", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("created_at", _TIME),
        ("stored_at", _TIME),
        ("body", pa.binary()),
    ]
)
