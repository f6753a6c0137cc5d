"""The safeguards that `make mutants` switches off, one at a time."""

from __future__ import annotations

from typing import Final

from tests.mutants.accounting import OF_ACCOUNTS
from tests.mutants.consuming import CONSUMING
from tests.mutants.delays import OF_DELAYS
from tests.mutants.encrypting import OF_TLS
from tests.mutants.finding import FINDING
from tests.mutants.following import FOLLOWING
from tests.mutants.handing_over import HANDING_OVER
from tests.mutants.history import OF_HISTORY
from tests.mutants.indexing import OF_KEY_INDEXES
from tests.mutants.letting_in import OF_RIGHTS
from tests.mutants.modelled import MODELLED
from tests.mutants.ordering import OF_ORDER
from tests.mutants.parquet import OF_PARQUET
from tests.mutants.querying import OF_SQL
from tests.mutants.relaying import OF_RELAYS
from tests.mutants.resending import OF_RESENDS
from tests.mutants.restoring import OF_RESTORES
from tests.mutants.retaining import OF_RETENTION
from tests.mutants.rotting import ROTTING
from tests.mutants.running import Mutant
from tests.mutants.seen import OF_GROUPS
from tests.mutants.sending_from import OF_SOURCES
from tests.mutants.sending_once import OF_UNIQUE
from tests.mutants.serving import OF_ANSWERS, OF_OPERATION
from tests.mutants.several import OF_SEVERAL
from tests.mutants.sharing import OF_SHARING
from tests.mutants.short_way import OF_SHORT_WAY
from tests.mutants.symbols import always, instead, never, skip
from tests.mutants.tracing import OF_TRACES

SAFEGUARDS: Final = (
    *CONSUMING,
    *FINDING,
    *FOLLOWING,
    *ROTTING,
    *MODELLED,
    *HANDING_OVER,
    *OF_ACCOUNTS,
    *OF_DELAYS,
    *OF_HISTORY,
    *OF_KEY_INDEXES,
    *OF_ORDER,
    *OF_PARQUET,
    *OF_SQL,
    *OF_RESENDS,
    *OF_RESTORES,
    *OF_RETENTION,
    *OF_RIGHTS,
    *OF_SHARING,
    *OF_SHORT_WAY,
    *OF_SOURCES,
    *OF_TLS,
    *OF_TRACES,
    # --- modes, tags, expiry -----------------------------------------------------------------------------------------
    Mutant(
        "hand out of an at_most_once group only what is reserved",
        "AtMostOnce.covers",
        never("any((_need(subject_filter, parts) > subject_filter.reserved for subject_filter, parts in taken))"),
        ("tests/broker/delivery/test_at_most_once.py",),
    ),
    Mutant(
        "hand out to an at_most_once group only what is on disk",
        "PullSelector.choose",
        instead("self._on_disk.count(selection.parts, selection.count)", "selection.count"),
        ("tests/broker/delivery/test_at_most_once_on_disk.py",),
    ),
    Mutant(
        "have a checkpoint know of blocks whose sync has not ended",
        "Group.packed",
        instead("subject_filter.recorded", "subject_filter.reserved"),
        ("tests/broker/delivery/test_at_most_once.py",),
    ),
    Mutant(
        "pass what an at_most_once group may have got before a crash",
        "AtMostOnce.resume",
        instead("part.consumer_log.row_at_time(end + 1) if end else 0", "0"),
        ("tests/broker/delivery/test_at_most_once.py",),
    ),
    Mutant(
        "bury what has expired",
        "MessageFilter._states_of_run",
        instead("states[(expire_at != 0) & (since <= self._now_us)] = self._expired", "states[:] = states"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "refuse a pull that does not account for what it passes",
        "DeliveryTracker.record_pull",
        never("given + dropped != passed"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "change nothing for a pull that is refused",
        "DeliveryTracker.record_pull",
        instead("given + dropped != passed", "apply() or given + dropped != passed"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "count after a kill what was filtered",
        "Ledger._apply_passed",
        skip("self._returning.filtered += filtered"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "move after a kill behind what was filtered",
        "DeliveryTracker.replay",
        skip("self._replay_cursors(group, where, unflat(ranges))"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "filter retries by the tags of now",
        "Redelivery._settle_unwanted",
        never("state == FILTERED"),
        ("tests/testing/test_tags_and_expiry.py",),
    ),
    Mutant(
        "look at tags and expiry in a pull",
        "PullSelection._take_entry",
        never("self._chooses or entry[8] & ENTRY_HAS_EXPIRE_AT"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "ask for the checkpoint that a resend waits for",
        "Resends._steps",
        skip("self._effects.append(CheckpointWanted())"),
        ("tests/daemon/test_main.py",),
    ),
    Mutant(
        "keep a start at a time over new subject numbers",
        "GroupReplay._begin",
        never('rule.kind == "time"'),
        ("tests/broker/startup/test_replay.py",),
    ),
    Mutant(
        "ask for the checkpoint that a roll waits for",
        "SegmentRoll.begin",
        skip("self._effects.append(CheckpointWanted())"),
        ("tests/broker/publish/test_roll.py",),
    ),
    Mutant(
        "tell tags with the same bits apart",
        "with_tags",
        always("all(wanted)"),
        ("tests/net/client/consumer/test_message_tags.py",),
    ),
    Mutant(
        "take back what takes too long",
        "AckDeadlines.tick",
        instead("self._nack_overdue(ledger, member, now, left)", "0"),
        ("tests/broker/delivery/test_ack_deadline.py",),
    ),
    Mutant(
        "let the time of what is held go on over a start",
        "AckDeadlines.restore",
        instead("max(0, now.wall_us - pull.taken_us)", "0"),
        ("tests/broker/delivery/test_ack_deadline.py",),
    ),
    Mutant(
        "hear of what was handled before a start takes it back",
        "AckDeadlines.restore",
        instead("min(REACH_US, most_us)", "0"),
        ("tests/broker/delivery/test_ack_deadline.py",),
    ),
    # --- durability --------------------------------------------------------------------------------------------------
    Mutant(
        "acknowledge flush after the fdatasync",
        "Intake._write",
        never("batch.flush", at=3),
        ("tests/broker/publish/test_publish.py",),
    ),
    Mutant(
        "show flush batches after the fdatasync",
        "Visibility._passable",
        never("barrier.flush and barrier.end > partition.synced and (partition.broken is None)"),
        ("tests/broker/publish/test_publish.py", "tests/broker/test_model.py"),
    ),
    Mutant(
        "keep runs that are made while a checkpoint is written",
        "sweep",
        instead("claimed | unclaimed()", "claimed"),
        ("tests/storage/error_log/test_group_files.py",),
    ),
    Mutant(
        "fdatasync at all",
        "Segment.sync",
        skip("self._disk.fdatasync(self.fd)"),
        ("tests/storage/message_log/test_partition_log.py",),
    ),
    Mutant(
        "take nothing more once a sync by the system has failed",
        "MessageLog.end_sync",
        skip("self._break(error, self._begun)"),
        ("tests/storage/disk/test_aio.py",),
    ),
    Mutant(
        "name the file of which a sync by the system has failed",
        "MessageLog.end_sync",
        instead("self._begun", "self._unsynced[0].path"),
        ("tests/storage/disk/test_aio.py",),
    ),
    Mutant(
        "have the system sync one file, and leave others to a thread",
        "MessageLog.begin_sync",
        always("len(segments) == 1"),
        ("tests/storage/disk/test_aio.py",),
    ),
    Mutant(
        "sync the directory of a new segment",
        "MessageLog.sync",
        skip("self._disk.fsync_directory(path)"),
        ("tests/storage/message_log/test_partition_log.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "sync a file before it replaces another",
        "write_atomically",
        skip("disk.fsync(fd)"),
        ("tests/storage/disk/test_disk.py",),
    ),
    Mutant(
        "sync the directory of a file that replaces another",
        "write_atomically",
        skip("disk.fsync_directory(path.parent)"),
        ("tests/storage/disk/test_disk.py",),
    ),
    Mutant(
        "take nothing more after a failed sync",
        "MessageLog.sync",
        (instead("self._break(error, path)", "raise SyncFailed('') from error"), skip("self.check()", at=2)),
        ("tests/storage/message_log/test_partition_log.py", "tests/storage/test_store_failures.py"),
    ),
    Mutant(
        "look before a checkpoint whether the directories are there",
        "Checkpointer._take",
        skip("await self.worker.run(self._store.check_there)"),
        ("tests/daemon/test_main.py",),
    ),
    Mutant(
        "look whether a lock that was got is still the one of its name",
        "ack_file:_locked",
        always("_is_at(lock, path)"),
        ("tests/net/client/consumer/test_ack_file_state_file.py",),
    ),
    Mutant(
        "sync the logs before a checkpoint claims them",
        "Checkpoint.write",
        skip("part.sync()"),
        ("tests/storage/meta/test_take_checkpoint.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "write rows and names again that a sync has failed to bring to the disk",
        "SureSync.__call__",
        instead(("with suppress(OSError):\n    self._write_again(fd)"), "self._is_behind = False"),
        ("tests/storage/disk/test_fsync.py",),
    ),
    Mutant(
        "write retries and dead letters again that a sync has failed to bring to the disk",
        "sorted_runs:RunSync.run",
        instead("sync(fd)", "self._disk.fdatasync(fd)"),
        ("tests/storage/error_log/test_group_files.py",),
    ),
    Mutant(
        "name the rows of a segment that are made again once they are on disk",
        "ActiveRows.__init__",
        skip("self.path = draft_of(self.path)"),
        ("tests/storage/test_claimed_files.py",),
    ),
    Mutant(
        "name an index that is made again once it is on disk",
        "SegmentIndex.__init__",
        instead("draft_of(self._name) if is_draft else self._name", "self._name"),
        ("tests/storage/test_claimed_files.py",),
    ),
    Mutant(
        "bring rows that a start has fed again to the disk",
        "ConsumerLog.settle_claimed",
        never("journal.is_draft and journal.count"),
        ("tests/storage/test_claimed_files.py",),
    ),
    Mutant(
        "keep on disk at once that a sync of the pull log has failed",
        "PullSync.run",
        skip("with suppress(StorageError):\n    self._forget_boot()"),
        ("tests/storage/error_log/test_group_files.py",),
    ),
    Mutant(
        "keep on disk later that a sync of the pull log has failed",
        "CheckpointTaker._renew",
        never("self._groups.broken or any((part.given_up for part in self._partitions))"),
        ("tests/storage/error_log/test_group_files.py",),
    ),
    Mutant(
        "keep on disk at once that a sync has failed",
        "partition:Partition.sync",
        skip("with suppress(StorageError):\n    self.shared.identity.forget_boot()"),
        ("tests/broker/test_broken_partition.py",),
    ),
    Mutant(
        "leave the indexes of a broken partition out of checkpoints",
        "CheckpointTaker._indexes_to_seal",
        never("self._partitions[index.owner.partition].given_up"),
        ("tests/storage/test_store_failures.py",),
    ),
    Mutant(
        "write the unsynced tail again in recovery",
        "decide",
        never("not facts.clean", at=2),
        ("tests/storage/recovery/test_decide.py", "tests/storage/recovery/test_open.py"),
    ),
    # --- what is told apart ------------------------------------------------------------------------------------------
    Mutant(
        "tell a repeated batch from a new one",
        "Producers.lookup",
        instead("self._find(producer, first, messages, data_crc)", "None"),
        ("tests/broker/publish/test_dedup.py", "tests/faults/test_lost_answers.py"),
    ),
    Mutant(
        "refuse what a producer sends again that may have been forgotten",
        "Producers.lookup",
        never("written_us is not None and forgotten_us is not None and forgotten_us >= written_us - _MARGIN_US"),
        ("tests/broker/publish/test_dedup.py",),
    ),
    Mutant(
        "remember over a restart that producers were forgotten",
        "Producers.packed",
        never("self._forgotten_us is not None"),
        ("tests/broker/publish/test_dedup.py",),
    ),
    Mutant(
        "forget no producer that has a connection",
        "Producers.attach",
        skip("self._idle.pop(producer_id, None)"),
        ("tests/broker/publish/test_dedup.py",),
    ),
    Mutant(
        "leave room for the subjects of other tokens",
        "SubjectShares.check",
        always("2 * used < most or not prefix or (share := count(prefix)) < most - used"),
        ("tests/broker/publish/test_subject_limits.py",),
    ),
    Mutant(
        "count no subjects whose messages are gone",
        "Store._check_room",
        always("self.live_subjects >= most"),
        ("tests/broker/publish/test_subject_limits.py",),
    ),
    Mutant(
        "do a part of administrative work in a turn",
        "WorkQueue._do_part",
        always("work < TURN_WORK", at=2),
        ("tests/broker/test_admin_turns.py",),
    ),
    Mutant(
        "remember producers over a restart",
        "Broker._restore",
        skip("self._producers.restore(msgpack.unpackb(state['producers']), now_us)"),
        ("tests/broker/publish/test_dedup.py", "tests/faults/test_lost_answers.py"),
    ),
    Mutant(
        "repeat a send with the sequence it had",
        "SendWindow.next_batch",
        always("batch.buffers is None"),
        ("tests/net/client/producer/test_window.py",),
    ),
    Mutant(
        "wait for the own broker with what it may have stored",
        "SendWindow.give_away",
        always("now >= batch.unknown_since + failover_after"),
        ("tests/net/client/test_brokers_failover.py",),
    ),
    Mutant(
        "say that another broker may have it too",
        "SendWindow.give_away",
        skip("batch.maybe_duplicate = True"),
        ("tests/net/client/test_brokers_failover.py",),
    ),
    Mutant(
        "let messages that join others in a queue wait for their own time",
        "SendWindow.expire",
        skip("self._accumulator.seal_due(now, self._takes)"),
        ("tests/net/client/producer/test_window.py",),
    ),
    Mutant(
        "gather messages for linger when the time is looked at",
        "Accumulator.seal_due",
        always("now >= batch.opened_at + self._linger"),
        ("tests/net/client/producer/test_window.py",),
    ),
    Mutant(
        "give other producer sequences at another broker",
        "SendWindow.take_over",
        skip("batch.renumber(self._outcomes.take_numbers(batch.count))"),
        ("tests/net/client/test_brokers_failover.py",),
    ),
    Mutant(
        "join the look-up of a host that still runs",
        "LookUps._join",
        never("waiting is not None"),
        ("tests/net/client/test_look_ups.py",),
    ),
    Mutant(
        "begin no look-up where too many hang",
        "LookUps._join",
        never("len(self._running) >= MOST_LOOK_UPS"),
        ("tests/net/client/test_look_ups.py",),
    ),
    Mutant(
        "make messages that keep nothing of a large run",
        "Run.views",
        always("self._stop - self._start <= KEPT_BYTES"),
        ("tests/net/client/consumer/test_message.py",),
    ),
    Mutant(
        "copy the small runs of a large answer",
        "_runs_of_batch",
        never("owned and len(data) > KEPT_BYTES"),
        ("tests/net/client/consumer/test_message.py",),
    ),
    Mutant(
        "keep what several brokers gave beyond what was asked for",
        "MultiBrokerPuller._cut",
        skip("self.put_back(beyond)"),
        ("tests/net/client/consumer/test_multi_broker.py",),
    ),
    Mutant(
        "leave out what goes back while a pull from several brokers waits",
        "_drop_early_returns",
        instead("open_runs(taken)", "taken"),
        ("tests/net/client/consumer/test_multi_broker.py",),
    ),
    Mutant(
        "take what a withdrawn pull still brings before others are asked",
        "MultiBrokerPuller._end",
        skip("await asyncio.gather(*(puller.settle(SETTLE_TIMEOUT) for puller in pullers))"),
        ("tests/net/client/consumer/test_multi_broker.py",),
    ),
    Mutant(
        "acknowledge a message that another broker has taken",
        "NackSender._hand_one_over",
        skip("in_flight.handed_over(back.start, back.end)"),
        ("tests/net/client/failover/test_handover.py",),
    ),
    Mutant(
        "leave a spool file to the client that writes it",
        "spool:_locked",
        skip("fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("tests/net/client/failover/test_spool.py",),
    ),
    # --- consumers, the client's side ---------------------------------------------------------------------------------
    Mutant(
        "refuse who was taken over from",
        "Ledger.join",
        never("member.nonce != nonce and 0 < known.epoch < member.epoch"),
        ("tests/broker/test_known.py",),
    ),
    Mutant(
        "pass over what was kept of another pull log",
        "DeliveryTracker.join",
        skip("known = known._replace(handled=())"),
        ("tests/broker/test_known.py",),
    ),
    Mutant(
        "take what a client kept before a takeover counts",
        "Ledger.join",
        skip("self.handled_before(member, known.handled, now_us)"),
        ("tests/broker/test_known.py",),
    ),
    Mutant(
        "give no delivery sequence twice after loss of power",
        "Ledger._apply_join",
        skip("member.in_flight.skip_to(expected)"),
        ("tests/broker/test_known.py",),
    ),
    Mutant(
        "count heartbeats after a start of the broker",
        "Membership.restore",
        instead("self.joined(ledger, member, member.client, now)", "self._watch(ledger, member, now)"),
        ("tests/broker/test_known.py",),
    ),
    Mutant(
        "check the numbers of acknowledgements",
        "_ack",
        never("crc32c(frame.payload[frames.ACK.size:]) != crc"),
        ("tests/net/server/test_requests.py",),
    ),
    Mutant(
        "check the numbers of messages",
        "decode_head",
        never("size < HEAD.size or crc32c(head[_CRC_SIZE:]) != _CRC.unpack_from(head)[0]"),
        ("tests/net/protocol/test_messages.py",),
    ),
    Mutant(
        "check a state file",
        "StateFile.read",
        instead("content != MAGIC + _CRC.pack(crc32c(body)) + body", "not body"),
        ("tests/net/client/consumer/test_ack_file_state_file.py",),
    ),
    Mutant(
        "lock a state file",
        "ack_file:_locked",
        skip("fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("tests/net/client/consumer/test_ack_file_state_file.py",),
    ),
    Mutant(
        "check the header of a message that comes alone",
        "read_single",
        never("header_crc_of(answer, start) != crc"),
        ("tests/format/test_pieces_arriving.py",),
    ),
    Mutant(
        "check the bytes of a message that comes alone",
        "read_single",
        never("crc32c(answer[start:]) != data_crc"),
        ("tests/format/test_pieces_arriving.py",),
    ),
    Mutant(
        "queue a send behind those that have no answer",
        "Accumulator.take_single",
        never("self.unfinished", at=1),
        ("tests/net/client/producer/test_accumulator.py",),
    ),
    Mutant(
        "seal the batch that has a subject before another one gets messages of it",
        "Accumulator._open_for",
        never("same_order and other != kind and (name in before.runs or (is_ordered and before.ordered))"),
        ("tests/net/client/producer/test_accumulator.py",),
    ),
    Mutant(
        "let no batch overtake the rest of one that was refused for a part of it",
        "Intake._refuse_batch",
        never("has_rest and isinstance(error, _OF_A_PART)"),
        ("tests/net/client/test_send_order.py",),
    ),
    Mutant(
        "connect again after an unexpected error",
        "Link._reconnect_until_done",
        instead("await going_on(self._reconnect, f'connecting to {self.address}')", "await self._reconnect()"),
        ("tests/net/client/test_unexpected.py",),
    ),
    Mutant(
        "answer a request whose answer cannot be made",
        "ReplyWriter.carry_out",
        never("request and (not isinstance(effect, effects.Refused))"),
        ("tests/net/server/test_server.py",),
    ),
    Mutant(
        "wait for another token in its file",
        "Link._may_log_in",
        always("not self.address.token_file"),
        ("tests/daemon/test_token_file.py",),
    ),
    Mutant(
        "give up the parent's sockets in a forked child",
        "Client._forked",
        skip("link.give_up_sockets()"),
        ("tests/net/client/test_forked.py",),
    ),
    Mutant(
        "send what a client has that the program left open",
        "Brokers.close_left_open",
        instead("self.outcomes.flush(sent)", "sent.set_result(None)"),
        ("tests/net/client/test_left_open.py",),
    ),
    Mutant(
        "close what the program left open when asyncio.run ends",
        "Brokers._until_left",
        skip("await self.close_left_open()"),
        ("tests/net/client/test_left_open.py",),
    ),
    Mutant(
        "refuse acknowledgements of what is not held",
        "InFlightWindow.ack",
        never("self.fenced is not None"),
        ("tests/net/client/consumer/test_in_flight.py",),
    ),
    Mutant(
        "end what hands back, though nobody waits",
        "NackSender._send",
        instead(
            "queued, self._queued = (self._queued, [])",
            (
                "queued = [one for one in self._queued if not any(waiter.done() for waiter in "
                "one.outcome.waiters)]\n"
                "self._queued = []"
            ),
        ),
        ("tests/net/client/consumer/test_nacks.py",),
    ),
    Mutant(
        "bring the parts of a range of which one message was refused",
        "NackSender._deliver",
        never("refusal is not None and end - start > 1"),
        ("tests/net/test_leaving.py",),
    ),
    Mutant(
        "release the messages of a range that have no disposition, though others of it have one",
        "NackSender._begin",
        instead("in_flight.open_within(back.start, back.end)", "[(back.start, back.end)]"),
        ("tests/net/client/consumer/test_early_releases.py",),
    ),
    Mutant(
        "have a client that is closed leave its consumers",
        "MessageFeed.enter",
        skip("self._consumers.add(self)"),
        ("tests/net/client/test_open_consumers.py",),
    ),
    Mutant(
        "tell each task that takes messages of refused acks",
        "MessageFeed.flush",
        instead("self._reported.get(taker, self._reported_to_any)", "self._reported_to_any"),
        ("tests/net/client/consumer/test_flush.py",),
    ),
    Mutant(
        "wait for all pieces of a disposition",
        "NackSender._deliver",
        skip("one.outcome.left += 1"),
        ("tests/net/client/consumer/test_early_releases.py",),
    ),
    Mutant(
        "give the dispositions of threads in their order",
        "ThreadDispositions.call",
        instead("self.waiting.append(dispose)", "call_soon_threadsafe(dispose)"),
        ("tests/net/client/sync/test_dispositions.py",),
    ),
    Mutant(
        "fail no message whose handler a stop has cancelled",
        "NackSender._decide",
        never("has_stopped"),
        ("tests/net/client/consumer/test_releases.py",),
    ),
    Mutant(
        "delay the release of a message that was released before",
        "ReleaseDelays.next_us",
        instead("min(FIRST_RELEASE_US << min(count - 1, 30), LAST_RELEASE_US) if count else None", "None"),
        ("tests/net/client/consumer/test_releases.py",),
    ),
    Mutant(
        "release what a loop has not come to when its block is left by an exception",
        "MessageFeed.leave",
        never("isinstance(error, Exception) and (not self._puller.is_solo)"),
        ("tests/net/test_leaving.py",),
    ),
    Mutant(
        "unsubscribe who is cancelled while leaving",
        "Puller.leave",
        instead(
            "unsubscribed = self.leave_now()",
            ('if __import__("sys").exc_info()[0] is None:\n    unsubscribed = self.leave_now()'),
        ),
        ("tests/net/test_cancelled.py",),
    ),
    Mutant(
        "undo a subscription that nobody waits for any more",
        "ConsumerSubscription._ask",
        skip("asking.add_done_callback(partial(self._undo, connection, self._departure(store_id, None)))"),
        ("tests/net/test_cancelled.py",),
    ),
    Mutant(
        "tell the broker on the next connection who has left",
        "Link._adopt",
        skip("self._departures.connected(connection, welcome.store_id)"),
        ("tests/net/test_cancelled.py",),
    ),
    Mutant(
        "end the heartbeats of a client whose loop has ended",
        "HeartbeatSender._goes_on",
        always("loop.is_running()"),
        ("tests/net/client/test_heartbeat.py",),
    ),
    Mutant(
        "tell whose message was refused, of those that are handed back together",
        "NackSender._deliver",
        instead("self._resolve(one, refusal)", "self._resolve(one)"),
        ("tests/net/client/consumer/test_nacks.py",),
    ),
    Mutant(
        "check a message that comes alone by its own checksum",
        "Run.is_sound_alone",
        always("check_of(self._view[self._start + columns:self._stop], fold) == check"),
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "hand nothing back twice that comes twice at once",
        "InFlight.in_flight",
        always("not seen.overlaps(start, end)"),
        ("tests/broker/test_group_model.py",),
    ),
    Mutant(
        "take what is handled in a tenth of a second",
        "Prefetch.wanted",
        instead("min(2 * self._count, fits, MAX_PREFETCH)", "min(2 * self._count, MAX_PREFETCH)"),
        ("tests/net/client/consumer/test_consumer_prefetch.py",),
    ),
    Mutant(
        "hand back what a stuck loop has not come to",
        "MessageFeed._look",
        never("self._left() + self._turns.count == before"),
        ("tests/net/client/consumer/test_consumer_feed.py",),
    ),
    Mutant(
        "keep a group's own messages from prefixes",
        "SubjectFilter.numbers_between",
        never("store.subjects.has_private", 2),
        ("tests/broker/transfer/test_handover.py",),
    ),
    Mutant(
        "know a message that is handed over again",
        "Handovers._name",
        always("key not in ledger.handed"),
        ("tests/broker/transfer/test_handover.py",),
    ),
    Mutant(
        "refuse a send to a group's own subject",
        "SubjectNumbering.of",
        skip("for name in batch.names:\n    check_subject(name)"),
        ("tests/broker/transfer/test_handover.py",),
    ),
    Mutant(
        "go on past the reserve after a loss of power",
        "decide",
        never("lost", at=1),
        ("tests/storage/recovery/test_decide.py", "tests/storage/recovery/test_open.py"),
    ),
    Mutant(
        "raise sequences after a loss of power",
        "decide",
        never("lost or Tail.BLIND in facts.tail"),
        ("tests/storage/recovery/test_decide.py", "tests/storage/recovery/test_open.py"),
    ),
    Mutant(
        "never give a stamp twice",
        "Intake._stage",
        instead("max(now.wall_us, self._stamp_us + 1)", "now.wall_us"),
        ("tests/broker/publish/test_publish.py", "tests/broker/test_model.py"),
    ),
    Mutant(
        "take back sequences of a failed write",
        "Intake._give_up",
        skip("self._producers.forget(batch.producer_id, batch.producer_sequence)"),
        ("tests/broker/test_failures.py", "tests/broker/publish/test_publish.py"),
    ),
    # --- bad bytes ---------------------------------------------------------------------------------------------------
    Mutant(
        "check the data of a batch that comes in",
        "check_batch",
        never("crc32c(data) != header.data_crc"),
        ("tests/format/test_batch_lies.py", "tests/format/test_batch.py"),
    ),
    Mutant(
        "check the header of a batch that comes in",
        "check_batch",
        never("header_crc_of(view, data_start) != header.header_crc"),
        ("tests/format/test_batch_lies.py", "tests/format/test_batch.py"),
    ),
    Mutant(
        "check what a pull brings",
        "_read_batch",
        always("crc32c(data) == header.data_crc"),
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "check the messages of a cut run",
        "bad_messages",
        instead("np.flatnonzero(checks != run.checks()).tolist()", "[]"),
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "cut what follows the last valid batch",
        "decide",
        never("Tail.JUNK in facts.tail"),
        ("tests/storage/recovery/test_decide.py", "tests/storage/recovery/test_open.py", "tests/storage/test_kill.py"),
    ),
    Mutant(
        "take a header after bad bytes only with the store's mark",
        "Scanner._right_header",
        instead(
            "return validate_stored_header(batch, position, self._secret, self._store_id)",
            (
                "header = parse_header(batch)\n"
                "if header.position == position:\n"
                "    return header\n"
                "return validate_stored_header(batch, position, self._secret, self._store_id)"
            ),
        ),
        ("tests/storage/message_log/test_reader.py",),
    ),
    Mutant(
        "clean up after a write that failed",
        "MessageLog.write",
        skip("self._clean_up(failed)"),
        ("tests/storage/message_log/test_partition_log.py", "tests/storage/test_store_failures.py"),
    ),
    Mutant(
        "stop where a write that failed cannot be cleaned up after",
        "MessageLog._clean_up",
        never("self._is_dirty and self._has_leftovers()"),
        ("tests/storage/message_log/test_partition_log.py", "tests/broker/test_failures.py"),
    ),
    Mutant(
        "publish again what could not be read",
        "Intake.turn",
        never("self._visibility.is_behind"),
        ("tests/broker/publish/test_publish_again.py",),
    ),
    Mutant(
        "leave room on a full disk",
        "FreeSpace._measured",
        never("free - size < reserved"),
        ("tests/storage/disk/test_free_space.py",),
    ),
    Mutant(
        "hand nothing out that is known to be bad",
        "Damages.found",
        instead("[log.unreadable.add(*mark) for mark in damage.marks]", "[True for _ in damage.marks]"),
        ("tests/broker/test_unreadable.py", "tests/broker/test_damage.py"),
    ),
    Mutant(
        "check the data of sealed segments again",
        "SegmentReader._one_batch",
        always("crc == header.data_crc"),
        ("tests/storage/verify/test_scrub.py",),
    ),
    Mutant(
        "read no segment of another store",
        "segment:check_header",
        never("store_id != owner.store_id"),
        ("tests/storage/message_log/test_segment.py", "tests/storage/recovery/test_open.py"),
    ),
    Mutant(
        "tell who holds a directory by more than a file",
        "DirectoryLock.acquire",
        never("not disk.flock(fd)"),
        ("tests/storage/disk/test_dir_lock.py",),
    ),
    # --- bounds and untrusted clients ---------------------------------------------------------------------------------
    Mutant(
        "bound the size of a frame",
        "split_frames",
        instead("FRAME_SIZE + meta_size <= size <= max_frame_bytes", "FRAME_SIZE + meta_size <= size"),
        ("tests/net/protocol/test_frames.py",),
    ),
    Mutant(
        "bound the size of a message",
        "_check_run",
        never("longest > limits.max_message_bytes"),
        ("tests/format/test_batch_lies.py",),
    ),
    Mutant(
        "bound how many connections there are",
        "Server.admit",
        never("len(self._open) > most"),
        ("tests/net/server",),
    ),
    Mutant(
        "bound the time to the first frame",
        "Server._no_first_frame",
        instead(
            ("connection.end(ProtocolError(f'no HELLO within {limit:g} s of connecting (first_frame_timeout_ms)'))"),
            "del limit",
        ),
        ("tests/net/server/test_connection.py",),
    ),
    Mutant(
        "stop reading from who does not read",
        "ClientConnection._tell_unread",
        skip("self.stop_reading(SLOW_READER)"),
        ("tests/net/server",),
    ),
    Mutant(
        "bound what all connections hold together",
        "Admission.over",
        always("self.total <= self._limit", at=1),
        ("tests/net/server",),
    ),
    Mutant(
        "schedule delayed messages once they may be seen",
        "DelayIntake.publish",
        always("self._hidden[0].end <= visible"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "round due times up",
        "due_times",
        instead("due + unit - np.uint64(1)", "due"),
        ("tests/format/copies/test_due.py", "tests/broker/delay/test_delay.py"),
    ),
    Mutant(
        "deliver what is delayed once",
        "DelayedMessages._read_message_log",
        skip("self._delivered.extend(positions)"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "keep what was delivered until it leaves the schedule",
        "DelayedMessages.packed",
        instead("self._delivered", "PositionSet()"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "answer a cancellation after the fdatasync",
        "Intake.append",
        instead("True", "answer is None", at=2),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "cancel nothing that may have been delivered",
        "DelayedMessages.cancel",
        instead("max(self._late_us, now.wall_us)", "now.wall_us - (1 << 60)"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "check headers where a client asks for that",
        "AnswerEncoder.__init__",
        instead("checks", "False"),
        ("tests/broker/test_damage.py",),
    ),
    Mutant(
        "ask for checks after a damaged answer",
        "Puller._ask",
        never("self._checks"),
        ("tests/net/client/consumer/test_corrupt_reads.py",),
    ),
    Mutant(
        "give up what the broker finds sound again and again",
        "Puller._report",
        never("self._sound[message] >= MAX_SOUND_REPORTS"),
        ("tests/net/client/consumer/test_corrupt_reads.py",),
    ),
    Mutant(
        "bound the reports of a client",
        "Reports.report",
        never("self._by_connection[report.connection] >= MAX_REPORTS or len(self._open) >= MAX_ALL_REPORTS"),
        ("tests/broker/test_damage.py",),
    ),
    Mutant(
        "check names at the edge",
        "names:_check",
        never("not _NAME.fullmatch(name)"),
        ("tests/test_names.py",),
    ),
    Mutant(
        "one broker a directory",
        "Disk.flock",
        always("False"),
        ("tests/storage/disk/test_dir_lock.py", "tests/faults/test_start_up.py"),
    ),
    Mutant(
        "refuse a newer format",
        "_action",
        skip("return Action.REFUSE_UNKNOWN"),
        ("tests/storage/recovery/test_decide.py", "tests/storage/test_rot.py"),
    ),
    *OF_GROUPS,
    *OF_ANSWERS,
    *OF_OPERATION,
    *OF_SEVERAL,
    *OF_UNIQUE,
    *OF_RELAYS,
)
