"""The content of each file of tests/format/golden, made anew.

`python -m tests.format.golden_cases` writes the files; only a new version of the format may need that, under a new
version number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qmq.broker.journal.record_bytes import pack
from qmq.broker.journal.record_types import RecordKind
from qmq.format.batch import check_batch
from qmq.format.build import build_flat, make_header, with_unique
from qmq.format.layout import (
    BATCH_VERSION,
    DERIVED_HEADER,
    DERIVED_VERSION,
    ENTRIES_MAGIC,
    ENTRY,
    INDEX_ENTRY,
    PULL_FILE_HEADER,
    PULL_LOG_MAGIC,
    PULL_LOG_VERSION,
    PULL_RECORD_HEADER,
    RETRY_DTYPE,
    RETRY_SIZE,
    SCHEDULE_HEADER,
    SCHEDULE_MAGIC,
    SCHEDULE_VERSION,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SEGMENT_VERSION,
)
from qmq.format.left_out import without
from qmq.format.pieces import StoredBatch, piece_of_run
from qmq.format.unique import hash_of
from qmq.storage.error_log.items import RETRY_ITEMS, to_slots
from tests.format.contents import (
    CREATED_US,
    LIMITS,
    POSITION,
    PRODUCER,
    SOURCE,
    STORE,
    STORED_US,
    Contents,
    Sent,
    batch_of,
    plain,
    rich,
    stored,
)

DIRECTORY = Path(__file__).parent / "golden"

ONE: Contents = [[Sent("hotel.order.created", b"hello")]]
MANY: Contents = [plain("hotel.order.created", 40)]
RUNS: Contents = [plain("hotel.order.created", 2), [Sent("hotel.order.paid", b"")], plain("hotel.order.cancelled", 20)]
RICH: Contents = [[Sent("a.b", b"x", ("order-4421",), ("vip",), (("price", "125"),)), Sent("a.b", b"y")], rich("c", 3)]

SEVERAL_KEYS: Contents = [[Sent("a.b", b"x", ("order-4421", "user-7")), Sent("a.b", b"y", ("order-4422",))]]

BATCHES: dict[str, Contents] = {
    "one-message": ONE,
    "many": MANY,
    "several-runs": RUNS,
    "keys-tags-properties": RICH,
    "several-keys": SEVERAL_KEYS,
}


#: Records of the pull log: their kinds and fields.
_LOG = (1 << 31) + 3
_RANGE = (_LOG, POSITION, 2, 5, 40, POSITION + 999)
RECORDS: dict[str, tuple[RecordKind, list[Any]]] = {
    "pull-one-batch": (RecordKind.PULL, [7, 3, 500, 640, STORED_US, [_LOG, POSITION, 0, 0, 40, POSITION], []]),
    "pull-one-subject": (RecordKind.PULL, [7, 3, 500, 640, STORED_US, [9, 77, 0, 0, 40, 0], [["a.", [POSITION]]]]),
    "pull-two-ranges": (RecordKind.PULL, [7, 3, 500, 640, STORED_US, [*_RANGE, 9, 77, 0, 0, 1, 0], []]),
    "passed": (RecordKind.PASSED, [7, 3, 500, 640, STORED_US, [*_RANGE], [9, 77, 0, 0, 1, 0], 39, 0, []]),
    "again": (RecordKind.AGAIN, [7, 3, 500, 640, STORED_US, True, [[12, *_RANGE, 2, 1]]]),
    "ack-one-interval": (RecordKind.ACK, [7, 3, STORED_US, [500, 540]]),
    "ack-two-intervals": (RecordKind.ACK, [7, 3, STORED_US, [500, 501, 510, 540]]),
    "back": (RecordKind.BACK, [7, [4, 13, 2], 3, [[500, 501, 1, None, 0], [510, 512, 2, 9, 1]], ["no", ""], STORED_US]),
    "leave": (RecordKind.LEAVE, [7, [4, 13, 2], 3, 1, STORED_US]),
    "part": (RecordKind.PART, [7, [4, 13, 2], 3, 2, 540, STORED_US]),
}

#: The unique texts of the messages of a batch; one has none.
TEXTS = ("order-4421-charge", None, "Zürich")


def unique_batch() -> memoryview:
    """Return a batch of messages with unique texts, as a broker receives it."""
    headers = [make_header("k") if text is None else with_unique(make_header("k"), hash_of(text)) for text in TEXTS]
    parts = build_flat(
        ["a.b"], [len(TEXTS)], [b"x", b"y", b"z"], headers, created_at_us=CREATED_US, producer_id=PRODUCER,
        producer_sequence=7, source=SOURCE, has_unique=True,
    )  # fmt: skip
    return memoryview(bytearray(b"".join(parts)))


def cases() -> dict[str, bytes]:
    """Return the bytes of every file, by its name."""
    found = {f"batch-{name}": bytes(batch_of(runs)) for name, runs in BATCHES.items()}
    found |= {f"stored-{name}": bytes(stored(runs)) for name, runs in BATCHES.items()}
    batch = unique_batch()
    found["batch-unique"] = bytes(batch)
    found["batch-unique-left-out"] = bytes(without(batch, check_batch(batch, LIMITS), [0])[0])
    found["piece-whole"] = b"".join(piece_of_run(stored(RUNS), 2, 0, None)[0])
    found["piece-cut"] = b"".join(piece_of_run(stored(RICH), 1, 1, 3)[0])
    found["piece-runs"] = b"".join(StoredBatch(stored(RUNS)).runs_piece(np.array([0, 2])))
    found["segment-header"] = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, SEGMENT_VERSION, 3, STORE, bytes(6), POSITION, CREATED_US, bytes(20), 0x12345678
    )
    found["index-entry"] = INDEX_ENTRY.pack(POSITION, STORED_US)
    found["consumer-log-entry"] = ENTRY.pack(5, POSITION, STORED_US, 7, 40, 1, 0, 3, 0, 640, 1_200)
    found["derived-header"] = DERIVED_HEADER.pack(
        ENTRIES_MAGIC, DERIVED_VERSION, 3, STORE, 1, bytes(5), POSITION, POSITION + 999, 2, 17, 0x89ABCDEF, 0x12345678
    )
    found["pulls-header"] = PULL_FILE_HEADER.pack(
        PULL_LOG_MAGIC, PULL_LOG_VERSION, 0, STORE, bytes(6), POSITION, CREATED_US, 3,
        POSITION - 99, bytes(8), 0x12345678
    )  # fmt: skip
    found["pulls-record-header"] = PULL_RECORD_HEADER.pack(40, 0x89ABCDEF, 5)
    for name, (kind, fields) in RECORDS.items():
        found[f"pulls-{name}"] = pack(kind, fields)
    found["run-header"] = SCHEDULE_HEADER.pack(
        SCHEDULE_MAGIC, SCHEDULE_VERSION, RETRY_SIZE, STORE, bytes(6), 7, 2, bytes(20), 0x12345678
    )
    item = (STORED_US, 9, (1 << 31) + 3, 1, POSITION, 2, 40, POSITION + 999, 4, 1, 1, 6, 12, STORED_US - 5, 44)
    found["run-item"] = np.array([(*item, 0x89ABCDEF)], RETRY_DTYPE).tobytes()
    several = np.zeros(3, RETRY_ITEMS)
    several["number"], several["reason"] = (1, 2, 3), [b"ValueError: no such customer", b"", b"a long reason " * 12]
    found["run-slots"] = to_slots(several, RETRY_DTYPE)
    assert (PULL_LOG_VERSION, SCHEDULE_VERSION) == (3, 1)
    assert BATCH_VERSION == SEGMENT_VERSION == DERIVED_VERSION == 1
    return found


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name, content in cases().items():
        (DIRECTORY / f"{name}.bin").write_bytes(content)
