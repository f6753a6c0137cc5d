"""The safeguards that `make mutants` switches off, one at a time."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

SAFEGUARDS: Final = (
    # --- durability --------------------------------------------------------------------------------------------------
    Mutant(
        "acknowledge flush after the fdatasync",
        "qmq/broker/intake.py",
        "            if flush:\n                self._wait(partition, batch.end, batch.answer)\n",
        "            if False:\n                self._wait(partition, batch.end, batch.answer)\n",
        ("tests/broker/test_intake.py",),
    ),
    Mutant(
        "show flush batches after the fdatasync",
        "qmq/broker/intake.py",
        "        if barrier.flush and barrier.end > partition.synced and partition.broken is None:\n"
        "            return False\n",
        "",
        ("tests/broker/test_intake.py", "tests/broker/test_model.py"),
    ),
    Mutant(
        "fdatasync at all",
        "qmq/storage/segment.py",
        "        self._disk.fdatasync(self.fd)\n",
        "        pass\n",
        ("tests/storage/test_message_log.py",),
    ),
    Mutant(
        "sync the directory of a new segment",
        "qmq/storage/message_log.py",
        "                    self._disk.fsync_directory(path)\n",
        "",
        ("tests/storage/test_message_log.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "sync a file before it replaces another",
        "qmq/storage/disk.py",
        "            disk.fsync(fd)\n        finally:",
        "        finally:",
        ("tests/storage/test_disk.py",),
    ),
    Mutant(
        "sync the directory of a file that replaces another",
        "qmq/storage/disk.py",
        "        disk.fsync_directory(path.parent)\n",
        "",
        ("tests/storage/test_disk.py",),
    ),
    Mutant(
        "take nothing more after a failed sync",
        "qmq/storage/message_log.py",
        "                raise SyncFailed(self.broken) from error",
        "                self.broken = None\n                raise SyncFailed('') from error",
        ("tests/storage/test_message_log.py", "tests/storage/test_store_failures.py"),
    ),
    Mutant(
        "sync the logs before a checkpoint claims them",
        "qmq/storage/checkpointing.py",
        "            self._sync_log(log)\n",
        "            pass\n",
        ("tests/storage/test_checkpointing.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "write rows and names again that a sync has failed to bring to the disk",
        "qmq/storage/disk.py",
        "            with suppress(OSError):  # now, while it is in memory; else the next call tries\n"
        "                self._write_again(fd)\n            raise\n",
        "            self._is_behind = False\n            raise\n",
        ("tests/storage/test_disk.py",),
    ),
    Mutant(
        "keep on disk at once that a sync has failed",
        "qmq/storage/checkpointed.py",
        "            with suppress(StorageError):  # the next checkpoint tries again\n"
        "                self._identity.forget_boot()\n",
        "",
        ("tests/broker/test_broken_partition.py",),
    ),
    Mutant(
        "leave the indexes of a broken partition out of checkpoints",
        "qmq/storage/checkpointed.py",
        "            if self._partitions[index.owner.partition].given_up:\n",
        "            if False:\n",
        ("tests/storage/test_store_failures.py",),
    ),
    Mutant(
        "write the unsynced tail again in recovery",
        "qmq/storage/recovery.py",
        "        rewrite=not facts.clean,\n",
        "        rewrite=False,\n",
        ("tests/storage/test_recovery.py", "tests/storage/test_opening.py"),
    ),
    # --- what is told apart ------------------------------------------------------------------------------------------
    Mutant(
        "tell a repeated batch from a new one",
        "qmq/broker/producers.py",
        "        return self._find(producer, first, messages, data_crc)\n",
        "        return None\n",
        ("tests/broker/test_producers.py", "tests/faults/test_lost_answers.py"),
    ),
    Mutant(
        "remember producers over a restart",
        "qmq/broker/core.py",
        '            self._producers.restore(msgpack.unpackb(state["producers"]), now_us)\n',
        "            pass\n",
        ("tests/broker/test_producers.py", "tests/faults/test_lost_answers.py"),
    ),
    Mutant(
        "repeat a send with the sequence it had",
        "qmq/net/sending.py",
        "        if batch.buffers is None:\n            batch.build(",
        "        if True:\n            batch.build(",
        ("tests/net/test_sending.py",),
    ),
    Mutant(
        "go on past the reserve after a loss of power",
        "qmq/storage/recovery.py",
        "        jump=lost,\n",
        "        jump=False,\n",
        ("tests/storage/test_recovery.py", "tests/storage/test_opening.py"),
    ),
    Mutant(
        "raise sequences after a loss of power",
        "qmq/storage/recovery.py",
        "        raise_sequences=lost or Tail.BLIND in facts.tail,\n",
        "        raise_sequences=False,\n",
        ("tests/storage/test_recovery.py", "tests/storage/test_opening.py"),
    ),
    Mutant(
        "never give a stamp twice",
        "qmq/broker/intake.py",
        "max(now.wall_us, self._stamp_us + 1)",
        "now.wall_us",
        ("tests/broker/test_intake.py", "tests/broker/test_model.py"),
    ),
    Mutant(
        "take back sequences of a failed write",
        "qmq/broker/intake.py",
        "            self._producers.forget(batch.producer_id, batch.producer_sequence)\n",
        "",
        ("tests/broker/test_failures.py", "tests/broker/test_intake.py"),
    ),
    # --- bad bytes ---------------------------------------------------------------------------------------------------
    Mutant(
        "check the data of a batch that comes in",
        "qmq/format/batch.py",
        '    if crc32c(data) != header.data_crc:\n        raise BadBatch("the checksum of the data is wrong")\n'
        "    names",
        "    names",
        ("tests/format/test_batch_lies.py", "tests/format/test_batch.py"),
    ),
    Mutant(
        "check the header of a batch that comes in",
        "qmq/format/batch.py",
        "    if header_crc_of(view, data_start) != header.header_crc:\n"
        '        raise BadBatch("the checksum of header, runs and table is wrong")\n    if header.producer',
        "    if header.producer",
        ("tests/format/test_batch_lies.py", "tests/format/test_batch.py"),
    ),
    Mutant(
        "check what a pull brings",
        "qmq/format/pieces.py",
        "    if crc32c(rest[start:size]) == header.data_crc:\n",
        "    if True:\n",
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "check the messages of a cut run",
        "qmq/format/pieces.py",
        "    bad: list[int] = np.flatnonzero(crcs != run.crcs()).tolist()\n",
        "    bad: list[int] = []\n",
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "cut what follows the last valid batch",
        "qmq/storage/recovery.py",
        "        cut=Tail.JUNK in facts.tail,\n",
        "        cut=False,\n",
        ("tests/storage/test_recovery.py", "tests/storage/test_opening.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "take a header after bad bytes only with the store's mark",
        "qmq/storage/scan.py",
        "            return validate_stored_header(batch, position, self._secret, self._store_id)\n",
        "            header = parse_header(batch)\n            if header.position == position:\n"
        "                return header\n"
        "            return validate_stored_header(batch, position, self._secret, self._store_id)\n",
        ("tests/storage/test_scan.py",),
    ),
    Mutant(
        "clean up after a write that failed",
        "qmq/storage/message_log.py",
        "            self._clean_up(failed)\n",
        "",
        ("tests/storage/test_message_log.py", "tests/storage/test_store_failures.py"),
    ),
    Mutant(
        "stop where a write that failed cannot be cleaned up after",
        "qmq/storage/message_log.py",
        "        if self._soiled and self._has_leftovers():\n",
        "        if False:\n",
        ("tests/storage/test_message_log.py", "tests/broker/test_failures.py"),
    ),
    Mutant(
        "leave room on a full disk",
        "qmq/storage/room.py",
        "            if free - size < kept:\n",
        "            if False:\n",
        ("tests/storage/test_room.py",),
    ),
    Mutant(
        "hand nothing out that is known to be bad",
        "qmq/broker/damages.py",
        "        marked = [self._store.mark_unreadable(damage.partition, *mark) for mark in damage.marks]\n",
        "        marked = [True for _ in damage.marks]\n",
        ("tests/broker/test_unreadable.py", "tests/broker/test_reports.py"),
    ),
    Mutant(
        "check the data of sealed segments again",
        "qmq/storage/scrub.py",
        "                if crc == header.data_crc:\n",
        "                if True:\n",
        ("tests/storage/test_scrub.py",),
    ),
    Mutant(
        "read no segment of another store",
        "qmq/storage/segment.py",
        "    if store_id != owner.store_id:\n",
        "    if False:\n",
        ("tests/storage/test_segment.py", "tests/storage/test_opening.py"),
    ),
    Mutant(
        "tell who holds a directory by more than a file",
        "qmq/storage/lock.py",
        "            if not disk.flock(fd):\n",
        "            if False:\n",
        ("tests/storage/test_lock.py",),
    ),
    # --- bounds and strangers ----------------------------------------------------------------------------------------
    Mutant(
        "bound the size of a frame",
        "qmq/net/wire.py",
        "        if not FRAME_SIZE + meta_size <= size <= max_frame_bytes:\n",
        "        if not FRAME_SIZE + meta_size <= size:\n",
        ("tests/net/test_wire.py",),
    ),
    Mutant(
        "bound the size of a message",
        "qmq/format/batch.py",
        "    if longest > limits.max_message_bytes:\n        raise _too_large(longest, limits)\n    return run\n",
        "    return run\n",
        ("tests/format/test_batch_lies.py",),
    ),
    Mutant(
        "bound how many connections there are",
        "qmq/net/server/server.py",
        "        if len(self._open) > most:\n            if",
        "        if False:\n            if",
        ("tests/net/server",),
    ),
    Mutant(
        "bound the time to the first frame",
        "qmq/net/server/server.py",
        '        connection.end(ProtocolError(f"no hello within {limit:g} s of connecting (first_frame_timeout_ms)"))',
        "        del limit",
        ("tests/net/server/test_connection.py",),
    ),
    Mutant(
        "stop reading from who does not read",
        "qmq/net/server/connection.py",
        "        self.stop_reading(SLOW_READER)\n",
        "        pass\n",
        ("tests/net/server",),
    ),
    Mutant(
        "bound what all connections hold together",
        "qmq/net/server/holdings.py",
        "        if self.total <= self._limit:\n            return None\n        for",
        "        if True:\n            return None\n        for",
        ("tests/net/server",),
    ),
    Mutant(
        "bound the reports of a client",
        "qmq/broker/reports.py",
        "        if self._by_connection[report.connection] >= MAX_REPORTS or len(self._open) >= MAX_ALL_REPORTS:\n",
        "        if False:\n",
        ("tests/broker/test_reports.py",),
    ),
    Mutant(
        "check names at the edge",
        "qmq/names.py",
        "    if not _NAME.fullmatch(name):\n",
        "    if False:\n",
        ("tests/test_names.py",),
    ),
    Mutant(
        "one broker a directory",
        "qmq/storage/disk.py",
        "        except BlockingIOError:\n            return False\n",
        "        except BlockingIOError:\n            return True\n",
        ("tests/storage/test_lock.py", "tests/faults/test_start_up.py"),
    ),
    Mutant(
        "refuse a newer format",
        "qmq/storage/recovery.py",
        "        return Action.REFUSE_NEWER\n",
        "        pass\n",
        ("tests/storage/test_recovery.py", "tests/storage/test_rot.py"),
    ),
)
