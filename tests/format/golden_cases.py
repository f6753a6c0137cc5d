"""What each file of tests/format/golden holds, made anew. `python -m tests.format.golden_cases` writes the files:

only a new version of the format may need that, and then under a new version number.
"""

from __future__ import annotations

from pathlib import Path

from qmq.format.layout import (
    BATCH_VERSION,
    DERIVED_HEADER,
    DERIVED_VERSION,
    ENTRIES_MAGIC,
    ENTRY,
    INDEX_ENTRY,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SEGMENT_VERSION,
)
from qmq.format.pieces import piece_of_run
from tests.format.contents import CREATED_US, POSITION, STORE, STORED_US, Contents, Sent, batch_of, plain, rich, stored

DIRECTORY = Path(__file__).parent / "golden"

ONE: Contents = [[Sent("hotel.order.created", b"hello")]]
MANY: Contents = [plain("hotel.order.created", 40)]
RUNS: Contents = [plain("hotel.order.created", 2), [Sent("hotel.order.paid", b"")], plain("hotel.order.cancelled", 20)]
RICH: Contents = [[Sent("a.b", b"x", "order-4421", ("vip",), (("price", "125"),)), Sent("a.b", b"y")], rich("c", 3)]

BATCHES: dict[str, Contents] = {"one-message": ONE, "many": MANY, "several-runs": RUNS, "keys-tags-properties": RICH}


def cases() -> dict[str, bytes]:
    """The bytes of every file, by its name."""
    found = {f"batch-{name}": bytes(batch_of(runs)) for name, runs in BATCHES.items()}
    found |= {f"stored-{name}": bytes(stored(runs)) for name, runs in BATCHES.items()}
    found["piece-whole"] = b"".join(piece_of_run(stored(RUNS), 2, 0, None)[0])
    found["piece-cut"] = b"".join(piece_of_run(stored(RICH), 1, 1, 3)[0])
    found["segment-header"] = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, SEGMENT_VERSION, 3, STORE, bytes(6), POSITION, CREATED_US, bytes(20), 0x12345678
    )
    found["index-entry"] = INDEX_ENTRY.pack(POSITION, STORED_US)
    found["consumer-log-entry"] = ENTRY.pack(5, POSITION, STORED_US, 7, 40, 1, 0, 3, 0, 640, 1_200)
    found["derived-header"] = DERIVED_HEADER.pack(
        ENTRIES_MAGIC, DERIVED_VERSION, 3, STORE, 1, bytes(5), POSITION, POSITION + 999, 2, 17, 0x89ABCDEF, 0x12345678
    )
    assert BATCH_VERSION == SEGMENT_VERSION == DERIVED_VERSION == 1
    return found


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name, content in cases().items():
        (DIRECTORY / f"{name}.bin").write_bytes(content)
