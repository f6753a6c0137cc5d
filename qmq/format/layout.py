"""Every fixed record layout of QMQ on one page: magics, versions, offsets, sizes, dtypes.

All integers are little-endian. Times are microseconds since 1970-01-01 UTC (u64), and their names end in ``_us``.
docs/FORMAT.md draws the bytes; the code uses the definitions here, and every size is asserted at import.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# The batch: one format for wire, disk and Spark
#
#   header (96) | run records (32 each) | table (msgpack) | run 0 | run 1 | ...
#   each run:   length u32[n] | header_size u16[n] | crc32c u32[n] | optional columns | payload
#
# A piece has a part of one run (magic PIECE_MAGIC), or several whole runs (RUNS_MAGIC); only the broker makes pieces,
# for pulls.

BATCH_MAGIC: Final = 0x62514D51  # the bytes "QMQb"
PIECE_MAGIC: Final = 0x70514D51  # the bytes "QMQp"
RUNS_MAGIC: Final = 0x72514D51  # the bytes "QMQr"
BATCH_VERSION: Final = 1

#: magic u32 | version u8 | reserved u8 | flags u16 | size u32 | table_size u32 | messages u32 | runs u32 |
#: position u64 | stored_at_us u64 | created_at_us u64 | partition u16 | store_id 6s | producer_id 16s |
#: producer_sequence u64 | data_crc u32 | header_crc u32 | mark 8s
BATCH_HEADER: Final = struct.Struct("<IBBHIIIIQQQH6s16sQII8s")
BATCH_HEADER_SIZE: Final = 96
BATCH_HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("reserved", "u1"),
        ("flags", "<u2"),
        ("size", "<u4"),
        ("table_size", "<u4"),
        ("messages", "<u4"),
        ("runs", "<u4"),
        ("position", "<u8"),
        ("stored_at_us", "<u8"),
        ("created_at_us", "<u8"),
        ("partition", "<u2"),
        ("store_id", "V6"),
        ("producer_id", "V16"),
        ("producer_sequence", "<u8"),
        ("data_crc", "<u4"),
        ("header_crc", "<u4"),
        ("mark", "<u8"),
    ]
)

#: The fields that the broker stamps, each group as one packed write: position and stored_at_us (offset 24, 16 bytes);
#: partition and store id (offset 48, 8 bytes); header_crc and mark (offset 84, 12 bytes).
STAMP_POSITION: Final = struct.Struct("<QQ")
STAMP_POSITION_OFFSET: Final = 24
STAMP_STORE: Final = struct.Struct("<H6s")
STAMP_STORE_OFFSET: Final = 48
STAMP_SEAL: Final = struct.Struct("<I8s")
STAMP_SEAL_OFFSET: Final = 84
HEADER_CRC_OFFSET: Final = 84
#: header_crc covers header bytes [0, 84) and everything from 96 up to the end of the table.
BATCH_PREFIX_SIZE: Final = 84

MARK_SIZE: Final = 8

#: Batch flags (also piece flags): which optional columns every run of the batch has, in this order.
HAS_TAGS: Final = 1 << 0
HAS_KEY_HASH: Final = 1 << 1
HAS_DELIVER_AT: Final = 1 << 2
HAS_EXPIRE_AT: Final = 1 << 3
HAS_CREATED_AT: Final = 1 << 4
HAS_ORIGIN_ID: Final = 1 << 5
#: A flag without a column: messages of the batch may have more than one key; the column has the hash of the first.
HAS_MORE_KEYS: Final = 1 << 6
#: A column of copies that came from several batches: which record of the source is that of the message.
HAS_SOURCE: Final = 1 << 7
KNOWN_FLAGS: Final = (
    HAS_TAGS | HAS_KEY_HASH | HAS_DELIVER_AT | HAS_EXPIRE_AT | HAS_CREATED_AT | HAS_ORIGIN_ID | HAS_MORE_KEYS
    | HAS_SOURCE
)  # fmt: skip
#: The flags that a client may send; only the broker gives ids, and values that differ by the batch that a message came
#: from.
SENT_FLAGS: Final = KNOWN_FLAGS & ~(HAS_CREATED_AT | HAS_ORIGIN_ID | HAS_SOURCE)
#: The flags of copies that a client hands over or restores.
HANDED_FLAGS: Final = KNOWN_FLAGS & ~HAS_DELIVER_AT

#: A deliver_at below this is a delay, in microseconds from when the batch is stored; 0: none.
DELAY_END_US: Final = 1 << 50
#: deliver_at is rounded up to this.
DELIVER_UNIT_US: Final = 10_000
#: The longest time after which a message may be delivered, expire or come again, and the longest that a group may set.
MAX_DELAY_US: Final = 731 * 86_400 * 1_000_000
#: MAX_DELAY_US as errors show it.
MAX_DELAY_SHOWN: Final = f"{MAX_DELAY_US // 86_400_000_000} days (two years)"

#: Bytes a message in the column of HAS_SOURCE.
SOURCE_SIZE: Final = 4
#: (flag, bytes a message) of the optional columns, in file order.
OPTIONAL_COLUMNS: Final = (
    (HAS_TAGS, 4),
    (HAS_KEY_HASH, 8),
    (HAS_DELIVER_AT, 8),
    (HAS_EXPIRE_AT, 8),
    (HAS_CREATED_AT, 8),
    (HAS_ORIGIN_ID, 16),
    (HAS_SOURCE, SOURCE_SIZE),
)
#: length u32, header_size u16, check u32
FIXED_COLUMN_BYTES: Final = 10
#: Bytes a message in the columns before the checksums, and in the column of the checksums.
BEFORE_CHECK_COLUMN_BYTES: Final = 6
CHECK_COLUMN_BYTES: Final = 4

#: subject u16 (index into the table) | lane u16 | flags u16 | reserved u16 | count u32 | offset u32 (of the run, from
#: the end of the table) | size u32 (columns and payload) | crc32c u32 (of those bytes) | first_sequence u64 (stamped)
RUN: Final = struct.Struct("<HHHHIIIIQ")
RUN_SIZE: Final = 32
RUN_FIRST_SEQUENCE_OFFSET: Final = 24
RUN_DTYPE: Final = np.dtype(
    [
        ("subject", "<u2"),
        ("lane", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u2"),
        ("count", "<u4"),
        ("offset", "<u4"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("first_sequence", "<u8"),
    ]
)
MAX_RUNS: Final = 65_535
#: The lane of a run: the priority of its messages. For messages with an order key it is the sum of their slot, which is
#: the key's hash modulo ORDER_SLOTS, and of LANE_ORDERED, or what stands there for another priority. A subject number
#: stands for a subject and a lane.
LANE_NORMAL: Final = 0
LANE_HIGH: Final = 1
LANE_LOW: Final = 2
LANE_ORDERED: Final = 0x1000
LANE_ORDERED_HIGH: Final = 0x2000
LANE_ORDERED_LOW: Final = 0x3000
ORDER_SLOTS: Final = 4_096
#: Flag of a run: its messages were restored from an archive.
RUN_REPLAYED: Final = 1 << 0
#: Producer sequences end before this, so counting on from one never leaves 64 bits.
PRODUCER_SEQUENCE_END: Final = 1 << 63
#: Times of clients end here: with the year 9999, as calendars do.
CREATED_AT_END_US: Final = 253_402_300_800_000_000
#: The most bytes of a message's header: its column is u16.
MAX_HEADER_BYTES: Final = 65_535
#: The most keys of a message, and the most bytes of one, as UTF-8.
MAX_KEYS: Final = 16
MAX_KEY_BYTES: Final = 1_024
#: The most bytes of a unique text, as UTF-8, and the bytes of its hash.
MAX_UNIQUE_BYTES: Final = 1_024
UNIQUE_HASH_SIZE: Final = 16

#: A piece's header: magic u32 | version u8 | whole u8 (1: the whole run, data_crc is its crc; 0: cut, the messages' own
#: crcs decide) | flags u16 (of the batch) | size u32 (of the piece) | messages u32 | ordinal u32 (in the batch, of the
#: piece's first message) | subject_size u16 | lane u16 | position u64 (of the batch) | stored_at_us u64 |
#: created_at_us u64 | first_sequence u64 | partition u16 | store_id 6s | run_flags u16 | run u16 | data_crc u32 |
#: table_size u32 | header_crc u32 (of the header before it, the subject and the table); then the subject, the table
#: (which has the source only), and the data.
PIECE_HEADER: Final = struct.Struct("<IBBHIIIHHQQQQH6sHHIII")
PIECE_HEADER_SIZE: Final = 80
PIECE_CRC_OFFSET: Final = 76

#: The header of a piece of several runs: the first 56 bytes as those of a batch (size, table_size, messages and runs
#: are the piece's) | reserved u32 | header_crc u32 (of the header before it, the run records, the ordinals and the
#: table). Then the run records (subject is an index into this table, offset counts from the end of the table), the
#: ordinal u32 of each run's first message in the batch, the table, and the data.
RUNS_HEADER: Final = struct.Struct("<IBBHIIIIQQQH6sII")
RUNS_HEADER_SIZE: Final = 64
RUNS_CRC_OFFSET: Final = 60
ORDINAL_SIZE: Final = 4

# ---------------------------------------------------------------------------------------------------------------------
# Message log: segments and their sparse index

SEGMENT_MAGIC: Final = b"QMQSEGMT"
SEGMENT_VERSION: Final = 1
#: magic 8s | version u16 | partition u16 | store_id 6s | reserved 6s | base u64 (position of file offset 0) |
#: created_at_us u64 | previous_end u64 and reserved 12s | crc32c u32 (of the 60 bytes before)
SEGMENT_HEADER: Final = struct.Struct("<8sHH6s6sQQ20sI")
SEGMENT_HEADER_SIZE: Final = 64

#: position u64 | stored_at_us u64, one a batch, in position order
INDEX_ENTRY: Final = struct.Struct("<QQ")
INDEX_ENTRY_SIZE: Final = 16
INDEX_DTYPE: Final = np.dtype([("position", "<u8"), ("stored_at_us", "<u8")])

# ---------------------------------------------------------------------------------------------------------------------
# Consumer log: one entry a run, in position order; and its order by (subject, lane, sequence)

#: first_sequence u64 | position u64 (of the batch) | stored_at_us u64 | subject u32 (store-wide number) | count u32 |
#: run u16 (index in the batch) | lane u16 | runs u16 (of the batch) | flags u16 (low byte: of the run; high byte: those
#: of the batch that ENTRY_BATCH_FLAGS has) | run_size u32 |
#: batch_size u32
ENTRY: Final = struct.Struct("<QQQIIHHHHII")
ENTRY_SIZE: Final = 48
#: The batch flags that an entry has too (flag << 8), so that a pull need not read the batch for them.
ENTRY_BATCH_FLAGS: Final = HAS_TAGS | HAS_EXPIRE_AT | HAS_ORIGIN_ID | HAS_SOURCE
ENTRY_HAS_TAGS: Final = HAS_TAGS << 8
ENTRY_HAS_EXPIRE_AT: Final = HAS_EXPIRE_AT << 8
ENTRY_HAS_ORIGIN_ID: Final = HAS_ORIGIN_ID << 8
ENTRY_HAS_SOURCE: Final = HAS_SOURCE << 8
ENTRY_DTYPE: Final = np.dtype(
    [
        ("first_sequence", "<u8"),
        ("position", "<u8"),
        ("stored_at_us", "<u8"),
        ("subject", "<u4"),
        ("count", "<u4"),
        ("run", "<u2"),
        ("lane", "<u2"),
        ("runs", "<u2"),
        ("flags", "<u2"),
        ("run_size", "<u4"),
        ("batch_size", "<u4"),
    ]
)

#: The header of a derived file (index, entries, order):
#: magic 8s | version u16 | partition u16 | store_id 6s | sealed u8 | reserved 5s | base u64 (of its segment) |
#: covered u64 (position up to which it covers, when sealed) | count u64 (records, when sealed) |
#: first_row u64 | body_crc u32 (crc32c of all after this header, when sealed) | crc32c u32 (of the 60 bytes before)
DERIVED_HEADER: Final = struct.Struct("<8sHH6sB5sQQQQII")
DERIVED_HEADER_SIZE: Final = 64
INDEX_MAGIC: Final = b"QMQINDEX"
ENTRIES_MAGIC: Final = b"QMQENTRY"
ORDER_MAGIC: Final = b"QMQORDER"
DERIVED_VERSION: Final = 1

#: A key index, of pages: the header, padded; entries; the filter. A page is 4,092 bytes and their crc32c, whose seed is
#: the page's number. A page of entries: hash u64[341], ascending | offset u32[341], of the batch in its segment.
KEYS_MAGIC: Final = b"QMQKHASH"
KEY_PAGE_SIZE: Final = 4_096
KEY_PAGE_CONTENT: Final = KEY_PAGE_SIZE - 4
KEY_PAGE_ENTRIES: Final = KEY_PAGE_CONTENT // 12
#: Bits of a page of the filter, bits of the filter for each entry, and how many of them a hash sets.
KEY_FILTER_PAGE_BITS: Final = 8 * KEY_PAGE_CONTENT
KEY_FILTER_BITS: Final = 12
KEY_FILTER_PROBES: Final = 8

# ---------------------------------------------------------------------------------------------------------------------
# Store identity (two copies), checkpoints, subject registry

IDENTITY_MAGIC: Final = b"QMQSTORE"
IDENTITY_VERSION: Final = 2
CHECKPOINT_MAGIC: Final = b"QMQCHECK"
#: Also of the states in it: of groups, of producers, of delayed messages. Under version 1 they had several shapes.
#: Version 2 forgets no subjects.
CHECKPOINT_VERSION: Final = 3
OLDEST_CHECKPOINT_VERSION: Final = 2
#: A part of the broker's state beside the checkpoints.
STATE_FILE_MAGIC: Final = b"QMQSTATE"
STATE_FILE_VERSION: Final = 1
SUBJECTS_MAGIC: Final = b"QMQSUBJS"
SUBJECTS_VERSION: Final = 1

# ---------------------------------------------------------------------------------------------------------------------
# Unique texts, in the state of the broker in a checkpoint, and in the answers to sends

#: Where the first message with a unique text is: position u64 (of the message) | stored_at_us u64 | sequence u64
#: (NO_SEQUENCE: none) | partition u16
UNIQUE_ROW: Final = struct.Struct("<QQQH")
UNIQUE_ROW_SIZE: Final = 26
UNIQUE_ROW_DTYPE: Final = np.dtype(
    [("position", "<u8"), ("stored_at_us", "<u8"), ("sequence", "<u8"), ("partition", "<u2")]
)
#: hash of the subject 16s | hash of the text 16s
UNIQUE_KEY_SIZE: Final = 32

# ---------------------------------------------------------------------------------------------------------------------
# Pull log: the records of groups

PULL_LOG_MAGIC: Final = b"QMQPULLS"
#: Also of the kinds of records and of their fields. Under version 1 they had several shapes; version 2 lacks the kinds
#: with heads.
PULL_LOG_VERSION: Final = 3
OLDEST_PULL_LOG_VERSION: Final = 2
#: magic 8s | version u16 | reserved u16 | store_id 6s | reserved 6s | base u64 | created_at_us u64 | generation u32 |
#: cut u64 | reserved 8s | crc32c u32 (of the 60 bytes before)
PULL_FILE_HEADER: Final = struct.Struct("<8sHH6s6sQQIQ8sI")
PULL_FILE_HEADER_SIZE: Final = 64
#: size u32 (of the record) | crc32c u32 | kind u8 | reserved u8 | reserved u16; then the payload
PULL_RECORD_HEADER: Final = struct.Struct("<IIB3x")
PULL_RECORD_HEADER_SIZE: Final = 12
#: The kinds of records are numbered from 1 to this. (RecordKind names them.)
PULL_RECORD_KINDS: Final = 29
#: The kinds with the numbers from here on have payloads that begin with a head.
PULL_HEADED_KINDS: Final = 23

#: The head of a payload: group u32 | now_us u64 | consumer u32 | sequence u64 | count u32. In this order fewer bytes
#: of it look like the header of a record.
PULL_HEAD: Final = struct.Struct("<IQIQI")
PULL_HEAD_SIZE: Final = 28
_HEAD_FIELDS: Final = [
    ("group", "<u4"),
    ("now_us", "<u8"),
    ("consumer", "<u4"),
    ("sequence", "<u8"),
    ("count", "<u4"),
]
PULL_HEAD_DTYPE: Final = np.dtype(_HEAD_FIELDS)
#: That of messages that are handed out: a head | size u32 | first u64 | log u32 | ranges u16; then the ranges
PULL_HANDED: Final = struct.Struct("<IQIQIIQIH")
PULL_HANDED_SIZE: Final = 46
PULL_HANDED_DTYPE: Final = np.dtype(
    [*_HEAD_FIELDS, ("size", "<u4"), ("first", "<u8"), ("log", "<u4"), ("ranges", "<u2")]
)
#: log u32 | first u64 | run u32 | skip u32 | count u32 | end u64
PULL_RANGE: Final = struct.Struct("<IQIIIQ")
PULL_RANGE_SIZE: Final = 32
PULL_RANGE_DTYPE: Final = np.dtype(
    [("log", "<u4"), ("first", "<u8"), ("run", "<u4"), ("skip", "<u4"), ("count", "<u4"), ("end", "<u8")]
)
#: The greatest count of a head: it stands for so many, or more.
PULL_MANY: Final = (1 << 32) - 1

# ---------------------------------------------------------------------------------------------------------------------
# Error log and delay log: items by due time

SCHEDULE_MAGIC: Final = b"QMQSCHED"
SCHEDULE_VERSION: Final = 1
#: magic 8s | version u16 | slot size u16 | store_id 6s | reserved 6s | number u64 | slots u64 | reserved 20s |
#: crc32c u32 (of the 60 bytes before)
SCHEDULE_HEADER: Final = struct.Struct("<8sHH6s6sQQ20sI")
SCHEDULE_HEADER_SIZE: Final = 64

#: Messages to hand out again: due_us u64 | number u64 | log u32 (subject number, or 2^31 + partition) | run u32 |
#: first u64 (sequence, or position of the batch) | skip u32 | count u32 | end u64 (position of the last batch) |
#: attempt u16 (of the next time) | session_expiries u8 | flags u8 | consumer u32 | delivery_sequence u64 |
#: failed_at_us u64 | reason u32 (the number of its first slot; 0: none) | crc32c u32
RETRY_DTYPE: Final = np.dtype(
    [
        ("due_us", "<u8"),
        ("number", "<u8"),
        ("log", "<u4"),
        ("run", "<u4"),
        ("first", "<u8"),
        ("skip", "<u4"),
        ("count", "<u4"),
        ("end", "<u8"),
        ("attempt", "<u2"),
        ("session_expiries", "u1"),
        ("flags", "u1"),
        ("consumer", "<u4"),
        ("delivery_sequence", "<u8"),
        ("failed_at_us", "<u8"),
        ("reason", "<u4"),
        ("crc", "<u4"),
    ]
)
RETRY_SIZE: Final = 80
#: The most bytes of a reason, as UTF-8.
REASON_BYTES: Final = 300
#: The message is quarantined: handed out alone, to a consumer with nothing else in flight.
RETRY_QUARANTINED: Final = 1 << 0

#: Delayed messages: due_us u64 | number u64 (position of the first message) | position u64 (of the batch) | count u32 |
#: crc32c u32
DELAY_DTYPE: Final = np.dtype(
    [("due_us", "<u8"), ("number", "<u8"), ("position", "<u8"), ("count", "<u4"), ("crc", "<u4")]
)
DELAY_SIZE: Final = 32

#: Partition numbers from here on are delay logs.
DELAY_PARTITION: Final = 0x8000
#: The sequence of a message whose sequence is unknown.
NO_SEQUENCE: Final = (1 << 64) - 1

STORE_ID_SIZE: Final = 6
SECRET_SIZE: Final = 16
PRODUCER_ID_SIZE: Final = 16
MESSAGE_ID: Final = struct.Struct(">6sHQ")  # big-endian, so that the hex form sorts by store, partition, position
MESSAGE_ID_SIZE: Final = 16

#: Positions of a new directory start at a random base below this.
MAX_POSITION_BASE: Final = 1 << 61

assert struct.pack("<I", BATCH_MAGIC) == b"QMQb"
assert struct.pack("<I", PIECE_MAGIC) == b"QMQp"
assert struct.pack("<I", RUNS_MAGIC) == b"QMQr"
assert BATCH_HEADER.size == BATCH_HEADER_SIZE == BATCH_HEADER_DTYPE.itemsize
assert PIECE_HEADER.size == PIECE_HEADER_SIZE
assert RUNS_HEADER.size == RUNS_HEADER_SIZE
assert RUN.size == RUN_SIZE == RUN_DTYPE.itemsize
assert SEGMENT_HEADER.size == SEGMENT_HEADER_SIZE
assert INDEX_ENTRY.size == INDEX_ENTRY_SIZE == INDEX_DTYPE.itemsize
assert ENTRY.size == ENTRY_SIZE == ENTRY_DTYPE.itemsize
assert DERIVED_HEADER.size == DERIVED_HEADER_SIZE
assert PULL_FILE_HEADER.size == PULL_FILE_HEADER_SIZE
assert PULL_RECORD_HEADER.size == PULL_RECORD_HEADER_SIZE
assert PULL_HEAD.size == PULL_HEAD_SIZE == PULL_HEAD_DTYPE.itemsize
assert PULL_HANDED.size == PULL_HANDED_SIZE == PULL_HANDED_DTYPE.itemsize
assert PULL_RANGE.size == PULL_RANGE_SIZE == PULL_RANGE_DTYPE.itemsize
assert SCHEDULE_HEADER.size == SCHEDULE_HEADER_SIZE
assert RETRY_DTYPE.itemsize == RETRY_SIZE
assert DELAY_DTYPE.itemsize == DELAY_SIZE
assert MESSAGE_ID.size == MESSAGE_ID_SIZE
