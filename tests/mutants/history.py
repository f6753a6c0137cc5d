"""The safeguards of archives, and of those who read segments without a broker."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_ARCHIVING: Final = ("tests/history/test_archiving.py",)
_RECEIPTS: Final = ("tests/history/test_receipts.py",)
_LOG_READS: Final = ("tests/broker/test_log_reads.py",)
_READING: Final = ("tests/spark/test_reading.py",)

OF_HISTORY: Final = (
    Mutant(
        "let the manifest come last",
        "qmq/history/archiving.py",
        "for suffix in (MESSAGES, INDEX, MANIFEST):",
        "for suffix in (MANIFEST, INDEX, MESSAGES):",
        _ARCHIVING,
    ),
    Mutant(
        "put nothing in place once another run has the archive",
        "qmq/history/archiving.py",
        "manifest.pack())\n        self._lock.confirm()\n",
        "manifest.pack())\n",
        _ARCHIVING,
    ),
    Mutant(
        "give copies their names in the order of positions, though two are made at once",
        "qmq/history/archiving.py",
        "self._wait_for(under_way[0].manifest)",
        "under_way.rotate(-1)",
        _ARCHIVING,
    ),
    Mutant(
        "renew the lock while a disk takes long",
        "qmq/history/archive_run.py",
        "as lock, lock.renewed():",
        "as lock:",
        ("tests/history/test_archive_run.py",),
    ),
    Mutant(
        "let the copies of a run that has ended go no further",
        "qmq/history/archiving.py",
        "if self._ended:",
        "if False:",
        _ARCHIVING,
    ),
    Mutant(
        "copy one by one where there is room for one only",
        "qmq/history/archiving.py",
        "            self._copy_each(left, 1)\n",
        "            raise\n",
        _ARCHIVING,
    ),
    Mutant(
        "leave others the room that the copies of a run took which found none",
        "qmq/history/archiving.py",
        "            self._remove(under_way)\n",
        "",
        _ARCHIVING,
    ),
    Mutant(
        "never put a beginning in the place of a whole segment, nor copy twice",
        "qmq/history/archiving.py",
        "elif manifest is not None and manifest.end >= segment.end and",
        "elif False and manifest is not None and",
        _ARCHIVING,
    ),
    Mutant(
        "verify a copy before it gets its name",
        "qmq/history/archiving.py",
        "        self._verify(unfinished, manifest, self._checked)\n",
        "",
        _RECEIPTS,
    ),
    Mutant(
        "verify a copy that is there before it gets a receipt",
        "qmq/history/archiving.py",
        "            self._verify(path, manifest, lambda _: self._lock.renew())\n",
        "            pass\n",
        _RECEIPTS,
    ),
    Mutant(
        "take no receipt for a segment that has gone on",
        "qmq/storage/receipt.py",
        "self.end >= end",
        "True",
        ("tests/storage/test_receipt.py", *_RECEIPTS),
    ),
    Mutant(
        "let an archive in HDFS be claimed by one run only",
        "qmq/history/hdfs_files.py",
        "self._rename(draft, path, self._rename_class.NONE)",
        "self._rename(draft, path, self._rename_class.OVERWRITE)",
        ("tests/hdfs/test_hdfs_files.py", "tests/hdfs/test_archive_in_hdfs.py"),
    ),
    Mutant(
        "give up a call to HDFS that does not end",
        "qmq/history/hadoop.py",
        "auth_token=token, read_timeout=PATIENCE_S",
        "auth_token=token",
        ("tests/hdfs/test_hadoop.py",),
    ),
    Mutant(
        "keep errors of Hadoop's client from Spark",
        "qmq/history/hadoop.py",
        "        _keep_apart(self._py4j)\n",
        "",
        ("tests/hdfs/test_hadoop.py::test_errors_stay_what_they_are_beside_a_session_of_spark",),
    ),
    Mutant(
        "end what waits for HDFS once its call was given up",
        "qmq/history/hadoop.py",
        "                self._process.kill()\n                if ended is None:\n",
        "                if ended is None:\n",
        ("tests/hdfs/test_hadoop.py",),
    ),
    Mutant(
        "refuse a second run",
        "qmq/history/archive_lock.py",
        "not held.is_gone() and self._clock() - renewed_us < LAPSE_US",
        "False",
        ("tests/history/test_archive_lock.py",),
    ),
    Mutant(
        "take an index for one up to the end of its segment only",
        "qmq/history/segments.py",
        " and header.covered >= end",
        "",
        ("tests/history/test_segments.py",),
    ),
    Mutant(
        "read what may be of a time where not all batches are looked at",
        "spark/qmq_spark/planning.py",
        "    low -= not is_whole and low > 0",
        "    low -= 0",
        ("tests/spark/test_planning.py",),
    ),
    Mutant(
        "leave what a broker is writing",
        "qmq/history/data_directory.py",
        "while not sealed and positions and",
        "while False and positions and",
        ("tests/history/test_data_directory.py",),
    ),
    Mutant(
        "keep no more of a large segment in memory than of a small one",
        "spark/qmq_spark/reading.py",
        "WINDOW_BYTES: Final = 8 << 20",
        "WINDOW_BYTES: Final = 1 << 30",
        ("tests/spark/test_memory.py",),
    ),
    Mutant(
        "check the data of a batch before Spark gets it",
        "spark/qmq_spark/heads.py",
        "crc32c(window[offset + start : offset + size]) != data_crc",
        "False",
        _READING,
    ),
    Mutant(
        "tell of bytes behind a batch that are none",
        "spark/qmq_spark/reading.py",
        "            elif behind < end:\n",
        "            elif False:\n",
        _READING,
    ),
    Mutant(
        "refuse headers of messages that nobody can decode",
        "spark/qmq_spark/columns.py",
        "        odd = set(walked.odd.tolist()).union(*map(_without_text, found))\n",
        "        odd = set(walked.odd.tolist())\n",
        ("tests/spark/test_columns.py",),
    ),
    Mutant(
        "give readers of history nothing that may not be pulled yet",
        "qmq/broker/log_reads.py",
        "fetch = self._store.fetch(partition, asked.position, size, self._visible(partition))",
        "fetch = self._store.fetch(partition, asked.position, size, 1 << 63)",
        _LOG_READS,
    ),
    Mutant(
        "list no segment further than may be pulled",
        "qmq/broker/log_reads.py",
        "rows = [(base, min(end, visible),",
        "rows = [(base, end,",
        _LOG_READS,
    ),
    Mutant(
        "bound what waits to be read of the log for a connection",
        "qmq/broker/log_reads.py",
        "if self._by_connection[connection] >= MAX_WAITING:",
        "if False:",
        _LOG_READS,
    ),
    Mutant(
        "take no list of batches that was damaged on its way",
        "qmq/net/log_reading.py",
        'if wire.unpack_meta(frame.meta).get("crc") != crc32c(frame.payload):',
        "if False:",
        ("tests/net/test_log_reading.py",),
    ),
    Mutant(
        "let a stream say what was removed before it was read",
        "spark/qmq_spark/streaming.py",
        "if not position or (first is not None and first <= position):",
        "if True:",
        ("tests/spark/test_streaming.py::test_what_was_removed_is_said",),
    ),
    Mutant(
        "end a stream over what was there where that ends",
        "spark/qmq_spark/streaming.py",
        "limited(source, read, most_bytes, self._target)",
        "limited(source, read, most_bytes)",
        ("tests/spark/test_streaming.py::test_available_now_ends_at_what_was_there",),
    ),
    Mutant(
        "read what comes before what a stream has read",
        "spark/qmq_spark/offsets.py",
        "first if source.may_fill else 0",
        "0",
        (
            "tests/spark/test_offsets.py",
            "tests/spark/test_streaming.py::test_what_is_archived_behind_what_was_read_comes_too",
        ),
    ),
    Mutant(
        "look again at the segment that was the last",
        "qmq/history/archive.py",
        "        del settled[path]\n",
        "        pass\n",
        ("tests/spark/test_streaming.py::test_a_segment_that_goes_on_is_read_to_its_end",),
    ),
    Mutant(
        "plan nothing in the first micro-batch of a stream that begins at the end",
        "spark/qmq_spark/streaming.py",
        "if last == start:",
        "if False:",
        ("tests/spark/test_streaming.py::test_begins_at_the_end",),
    ),
)
