"""The safeguards of archives, and of those who read segments without a broker."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_ARCHIVING: Final = ("tests/archive/test_write.py",)
_RECEIPTS: Final = ("tests/archive/test_receipts.py",)
_SAME_BYTES: Final = ("tests/archive/test_same_bytes.py",)
_LOG_READS: Final = ("tests/broker/test_log_reads.py",)
_READING: Final = ("tests/spark/test_read.py",)

OF_HISTORY: Final = (
    Mutant(
        "refuse a format version that is not known",
        "check_version",
        never("not oldest <= version <= newest"),
        ("tests/faults/test_start_up.py",),
    ),
    Mutant(
        "refuse a record of a kind that is not known",
        "_check_kinds",
        never("not 1 <= record.kind <= PULL_RECORD_KINDS"),
        ("tests/storage/pull_log/test_log.py",),
    ),
    Mutant(
        "refuse a stored batch of a version that is not known",
        "validate_stored_header",
        never("header.version != BATCH_VERSION"),
        ("tests/faults/test_start_up.py",),
    ),
    Mutant(
        "let a clock that was ahead once not stop retention",
        "OldSegment.stored_before_us",
        always("until_us <= wall_us"),
        ("tests/broker/retention/test_retention.py",),
    ),
    Mutant(
        "give the rows of a repeated task the numbers that they had",
        "QmqWriter._send",
        skip("client._number_from(first)"),
        ("tests/spark/test_write.py",),
    ),
    Mutant(
        "take no copy of other batches for one of a segment",
        "_check_batches",
        never("other != header and (other is not None or position not in archived)"),
        _SAME_BYTES,
    ),
    Mutant(
        "let a receipt cover no more than was compared",
        "ArchiveReceipt.covers",
        instead("self.end == end", "self.end >= end"),
        _SAME_BYTES,
    ),
    Mutant(
        "let nothing open a directory whose id is being changed",
        "latest",
        never("identity.next_store_id"),
        ("tests/storage/verify/test_renew_id.py",),
    ),
    Mutant(
        "know a delayed message by a former id of the directory",
        "DelayedMessages._read_message_log",
        instead("store_id in store.store_ids", "store_id == store.store_id"),
        ("tests/cli/operate/test_repair.py",),
    ),
    Mutant(
        "let the manifest come last",
        "_Run._put_in_place",
        instead("(MESSAGES, INDEX, KEYS, MANIFEST)", "(MANIFEST, INDEX, KEYS, MESSAGES)"),
        _ARCHIVING,
    ),
    Mutant(
        "put nothing in place once another run has the archive",
        "_Run._put_in_place",
        skip("self._lock.confirm()"),
        _ARCHIVING,
    ),
    Mutant(
        "give copies their names in the order of positions, though two are made at once",
        "_Run._copy_each",
        instead("self._wait_for(under_way[0].manifest)", "under_way.rotate(-1)"),
        _ARCHIVING,
    ),
    Mutant(
        "renew the lock while a disk takes long",
        "open_run",
        instead(
            "with ArchiveLock(files, clock, this_process()) as lock, lock.renewed():\n"
            "    yield ArchiveRun(open_data_directory(source), files, lock)",
            "with ArchiveLock(files, clock, this_process()) as lock:\n"
            "    yield ArchiveRun(open_data_directory(source), files, lock)",
        ),
        ("tests/archive/test_archive_run.py",),
    ),
    Mutant(
        "let the copies of a run that has ended go no further",
        "_Run._copied",
        never("self._has_ended"),
        _ARCHIVING,
    ),
    Mutant(
        "copy one by one where there is room for one only",
        "_Run._copy_all",
        instead("self._copy_each(left, 1)", "raise"),
        _ARCHIVING,
    ),
    Mutant(
        "leave others the room that the copies of a run took which found none",
        "_Run._copy_each",
        skip("self._remove(under_way)"),
        _ARCHIVING,
    ),
    Mutant(
        "never put a beginning in the place of a whole segment, nor copy twice",
        "_Run.run",
        instead(
            "manifest is not None and self._has_good_copy(segment, path, manifest)",
            "False and manifest is not None and self._has_good_copy(segment, path, manifest)",
        ),
        _ARCHIVING,
    ),
    Mutant(
        "verify a copy before it gets its name",
        "_Run._copy",
        skip("self._verify(unfinished, manifest, self._verified)"),
        _RECEIPTS,
    ),
    Mutant(
        "verify a copy that is there before it gets a receipt",
        "_Run._has_good_copy",
        skip("self._verify(path, manifest, lambda _: self._lock.renew())"),
        _RECEIPTS,
    ),
    Mutant(
        "take no receipt for a segment that has gone on",
        "ArchiveReceipt.covers",
        always("self.end == end"),
        ("tests/storage/message_log/test_archive_receipt.py", *_RECEIPTS),
    ),
    Mutant(
        "let an archive in HDFS be claimed by one run only",
        "WritableHdfsFiles.claim",
        instead("self._rename_class.NONE", "self._rename_class.OVERWRITE"),
        ("tests/hdfs/test_hdfs_files.py", "tests/hdfs/test_archive_in_hdfs.py"),
    ),
    Mutant(
        "give up a call to HDFS that does not end",
        "Hadoop._connect",
        instead(
            ("py4j.java_gateway.GatewayParameters(port=int(port), auth_token=token, read_timeout=TIMEOUT_S)"),
            "py4j.java_gateway.GatewayParameters(port=int(port), auth_token=token)",
        ),
        ("tests/hdfs/test_hadoop.py",),
    ),
    Mutant(
        "keep errors of Hadoop's client from Spark",
        "Hadoop.doing",
        skip("_keep_apart(self._py4j)"),
        ("tests/hdfs/test_hadoop.py::test_errors_stay_what_they_are_beside_a_session_of_spark",),
    ),
    Mutant(
        "end what waits for HDFS once its call was given up",
        "Hadoop._lost",
        skip("self._process.kill()"),
        ("tests/hdfs/test_hadoop.py",),
    ),
    Mutant(
        "refuse a second run",
        "ArchiveLock.__enter__",
        instead(
            "held is not None and (not held.is_gone()) and (self._clock() - renewed_us < LOCK_EXPIRY_US)",
            "held is not None and False",
        ),
        ("tests/archive/test_lock.py",),
    ),
    Mutant(
        "take an index for one up to the end of its segment only",
        "index_pieces",
        always("header.covered >= end"),
        ("tests/archive/test_segments.py",),
    ),
    Mutant(
        "read what may be of a time where not all batches are looked at",
        "plan:_ranges",
        instead("not is_whole and low > 0", "0"),
        ("tests/spark/test_plan.py",),
    ),
    Mutant(
        "leave what a broker is writing",
        "_Partition._scanned",
        never("not sealed"),
        ("tests/archive/test_data_directory.py",),
    ),
    Mutant(
        "keep no more of a large segment in memory than of a small one",
        "restore/read:WINDOW_BYTES",
        instead("8 << 20", "1 << 30"),
        ("tests/spark/test_memory.py",),
    ),
    Mutant(
        "check the data of a batch before Spark gets it",
        "check_headers",
        never("crc32c(window[offset + start:offset + size]) != data_crc"),
        _READING,
    ),
    Mutant(
        "tell of bytes behind a batch that are none",
        "RangeReader._of_window",
        never("behind < end"),
        _READING,
    ),
    Mutant(
        "refuse headers of messages that nobody can decode",
        "MessageColumns._texts",
        instead("set(walked.odd.tolist()).union(*map(_without_text, found))", "set(walked.odd.tolist())"),
        ("tests/spark/test_columns.py",),
    ),
    Mutant(
        "give readers of history nothing that may not be pulled yet",
        "LogReads._begin_reads",
        instead("self._visible(partition)", "1 << 63"),
        _LOG_READS,
    ),
    Mutant(
        "list no segment further than may be pulled",
        "LogReads.list_segments",
        instead("min(end, visible)", "end"),
        _LOG_READS,
    ),
    Mutant(
        "bound what waits to be read of the log for a connection",
        "LogReads._count",
        never("self._by_connection[connection] >= MAX_WAITING"),
        _LOG_READS,
    ),
    Mutant(
        "take no list of batches that was damaged on its way",
        "log_reader:_checked",
        never("frames.unpack_meta(frame.meta).get('crc') != crc32c(frame.payload)"),
        ("tests/net/client/test_log_reader.py",),
    ),
    Mutant(
        "let a stream say what was removed before it was read",
        "QmqStreamReader._check_there",
        always("not position or (first is not None and first <= position)"),
        ("tests/spark/test_stream.py::test_what_was_removed_is_said",),
    ),
    Mutant(
        "end a stream over what was there where that ends",
        "QmqStreamReader.latestOffset",
        instead("limited(source, read, most_bytes, self._target)", "limited(source, read, most_bytes)"),
        ("tests/spark/test_stream.py::test_available_now_ends_at_what_was_there",),
    ),
    Mutant(
        "read what comes before what a stream has read",
        "offsets:_add",
        instead("first if source.may_fill else 0", "0"),
        (
            "tests/spark/test_offsets.py",
            "tests/spark/test_stream.py::test_what_is_archived_behind_what_was_read_comes_too",
        ),
    ),
    Mutant(
        "look again at the segment that was the last",
        "archived_segments",
        skip("del settled[path]"),
        ("tests/spark/test_stream.py::test_a_segment_that_goes_on_is_read_to_its_end",),
    ),
    Mutant(
        "plan nothing in the first micro-batch of a stream that begins at the end",
        "QmqStreamReader.latestOffset",
        never("last == start"),
        ("tests/spark/test_stream.py::test_begins_at_the_end",),
    ),
)
