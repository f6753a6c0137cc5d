"""The broker: a state machine. Commands and time go in, effects come out; no socket, no clock, no thread.

In each turn of the loop the server calls ``handle`` for each command, then ``turn``, then ``take_effects``. ``tick``
does what is due by time, and returns when to call it next. CommandDispatch says which part takes which command.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import msgpack

from qmq.broker.admin import LETTERS, LOOKS, AdminCommands
from qmq.broker.damage import Damages, Reports
from qmq.broker.delay.delay import DelayedMessages
from qmq.broker.delivery.at_most_once import OnDiskWaits
from qmq.broker.delivery.pull import Delivery
from qmq.broker.delivery.read_waits import DeferredCommand
from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.error_log.dead_letters import Redriving
from qmq.broker.find.find import Finds
from qmq.broker.find.get import GetMessages
from qmq.broker.find.resend import Resends
from qmq.broker.find.trace.traces import Traces
from qmq.broker.groups.accounts import UnaccountedMessages
from qmq.broker.groups.group import Group
from qmq.broker.groups.membership import Broadcasts
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.groups.untaken import UntakenNames
from qmq.broker.journal.write_gate import WriteGate
from qmq.broker.log_reads import LogReads
from qmq.broker.ports.access import check
from qmq.broker.ports.commands import (
    Ack,
    Administer,
    Checked,
    Claim,
    Command,
    Connected,
    Disconnected,
    Fetched,
    Find,
    Get,
    HandBack,
    HandOver,
    Heartbeat,
    InfoFound,
    LastSequence,
    ListBatches,
    ListSegments,
    ListSubjects,
    Moved,
    Now,
    Pull,
    ReadDone,
    ReadLog,
    Report,
    Restore,
    Send,
    Subscribe,
    SyncBroken,
    Synced,
    TraceConsumer,
    TraceMessage,
    Unsubscribe,
    Withdraw,
)
from qmq.broker.ports.effects import (
    Administered,
    Asker,
    Claimed,
    Effect,
    HeartbeatSeen,
    InfoWanted,
    Refused,
    StatsWanted,
    SubjectList,
    SyncWanted,
    Unsubscribed,
    asker_of,
    failed,
)
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.metrics import Counters, FoundBy
from qmq.broker.ports.rights import UNCHECKED, Rights
from qmq.broker.ports.work import Work
from qmq.broker.publish.dedup import ProducerClaims, Producers
from qmq.broker.publish.publish import Intake
from qmq.broker.publish.roll import SegmentRoll
from qmq.broker.publish.unique_texts import TEXT_BYTES, UniqueTexts
from qmq.broker.retention.idle_subjects import IdleSubjectsForgetting
from qmq.broker.retention.retention import Dropped, Retention, UnreceiptedSegment
from qmq.broker.short_way import ShortWay
from qmq.broker.startup.checkpoint import rejecting_bad_state
from qmq.broker.startup.replay import GroupReplay
from qmq.broker.stats import MOST_GROUPS, BrokerStatistics
from qmq.broker.subject_list import SubjectLists
from qmq.broker.transfer.handover import Handovers
from qmq.broker.transfer.restore import Restores
from qmq.broker.work_queue import WorkQueue
from qmq.errors import BrokerStopping, InvalidOption, QmqError
from qmq.format.batch import Header, stored_table
from qmq.format.copies.due import DUE_PRODUCER
from qmq.format.copies.for_group import is_copy
from qmq.format.layout import BATCH_HEADER_SIZE, DELAY_PARTITION, RUN_SIZE
from qmq.format.table import is_plain_table, sent_as
from qmq.storage.store import NotInMemory, PartitionDamage, Store

#: Commands that are not refused, as no client waits for their answer.
_WITHOUT_ANSWER: Final = (
    Synced,
    SyncBroken,
    ReadDone,
    Checked,
    Fetched,
    InfoFound,
    Connected,
    Moved,
    Disconnected,
    Withdraw,
)
#: Commands that need no right.
_NOT_OF_CLIENTS: Final = frozenset(_WITHOUT_ANSWER) - {Withdraw}
#: Commands that a stopping broker refuses, beside sends.
_REFUSED_AT_STOP: Final = frozenset((Pull, HandOver, Restore, ReadLog, Get, Find, TraceMessage, TraceConsumer))


class BrokerParts(NamedTuple):
    """The parts of a broker."""

    store: Store
    effects: list[Effect]
    intake: Intake
    delivery: Delivery
    delaying: DelayedMessages
    records: WriteGate
    hand_overs: Handovers
    restores: Restores
    reports: Reports
    log_reads: LogReads
    admin: AdminCommands
    redriving: Redriving
    resends: Resends
    retention: Retention
    segment_roll: SegmentRoll
    damages: Damages
    finds: Finds
    traces: Traces
    rights: dict[int, Rights]
    statistics: BrokerStatistics
    subject_lists: SubjectLists
    work_queue: WorkQueue


class CommandDispatch:
    """Gives each command but Send to the part of the broker that takes it."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts
        self._rights = parts.rights
        self._effects = parts.effects
        self._claims = ProducerClaims()
        #: The error of refused commands once the broker stops.
        self.stopping: BrokerStopping | None = None
        delivery, log_reads, reports = parts.delivery, parts.log_reads, parts.reports
        add = parts.effects.append
        self._take: dict[type, Callable[[Any, Now], object]] = {
            Pull: lambda command, now: delivery.pull(command, now.monotonic_us),
            Ack: self._ack,
            Synced: self._synced,
            SyncBroken: self._sync_broken,
            ReadDone: lambda command, now: self._read_done[asker_of(command.number)](command, now),
            Withdraw: lambda command, now: delivery.withdraw(command),
            Subscribe: lambda command, now: delivery.subscribe(command),
            Unsubscribe: self._unsubscribe,
            HandBack: lambda command, now: add(delivery.hand_back(command)),
            HandOver: parts.hand_overs.take,
            Restore: parts.restores.take,
            Heartbeat: self._heartbeat,
            Administer: self._administer,
            LastSequence: self._last_sequence,
            Claim: self._claim,
            ListSubjects: self._list_subjects,
            Report: lambda command, now: reports.report(command),
            Checked: lambda command, now: reports.checked(command),
            ListSegments: lambda command, now: log_reads.list_segments(command),
            ListBatches: lambda command, now: log_reads.list_batches(command),
            ReadLog: lambda command, now: log_reads.read(command),
            Get: lambda command, now: parts.finds.get(command),
            Find: lambda command, now: parts.finds.find(command),
            TraceMessage: lambda command, now: parts.traces.trace(command),
            TraceConsumer: lambda command, now: parts.traces.trace_consumer(command),
            Fetched: lambda command, now: log_reads.fetched(command),
            InfoFound: lambda command, now: add(
                Administered(*command[:3])
                if command.failure is None
                else failed(command.connection, command.request, command.failure)
            ),
            Connected: self._connected,
            Moved: lambda command, now: delivery.moved(command.connection),
            Disconnected: self._disconnected,
        }
        self._read_done: dict[Asker, Callable[[ReadDone, Now], object]] = {
            Asker.PULL_LOG: lambda done, now: delivery.durable.synced(done.error),
            Asker.PULLS: lambda done, now: self._resume(delivery.read_done(done), done.error, now),
            Asker.REPORTS: lambda done, now: reports.read_done(done),
            Asker.HISTORY: lambda done, now: log_reads.read_done(done),
            Asker.DUE: parts.delaying.read_done,
            Asker.CANCEL: parts.delaying.lookup_done,
            Asker.RESTORE: lambda done, now: parts.restores.read_done(done.error),
            Asker.RESEND: lambda done, now: parts.resends.read_done(done.error, now),
            Asker.RETENTION: lambda done, now: self._read_for_retention(done, now, parts.retention.read_done),
            Asker.FIND: lambda done, now: parts.finds.read_done(done),
            Asker.TRACE: lambda done, now: parts.traces.read_done(done),
            Asker.FORWARDING: lambda done, now: self._read_for_retention(done, now, parts.retention.copied),
        }

    def take(self, command: Command, now: Now) -> None:
        """Carry out a command. Raises QmqError where the client is to be refused."""
        kind = type(command)
        if self.stopping is not None and kind in _REFUSED_AT_STOP:
            raise self.stopping
        if self._rights and kind not in _NOT_OF_CLIENTS:
            rights = self._rights.get(command.connection)  # type: ignore[union-attr]  # requests of clients have one
            if rights is not None:
                command = check(rights, command)
        self._take[kind](command, now)

    # --- single commands ---------------------------------------------------------------------------------------------

    def _ack(self, command: Ack, now: Now) -> None:
        answer = self._parts.delivery.ack(command)
        if command.may_wait:
            self._parts.records.answer_later(answer, now.monotonic_us)
        else:
            self._effects.append(answer)

    def _synced(self, command: Synced, now: Now) -> None:
        self._parts.intake.synced(*command)
        self._parts.delivery.synced()

    def _sync_broken(self, command: SyncBroken, now: Now) -> None:
        self._parts.intake.sync_broken(*command)
        self._parts.delivery.synced()

    def _unsubscribe(self, command: Unsubscribe, now: Now) -> None:
        self._parts.delivery.unsubscribe(command.connection, command.subscription)
        self._effects.append(Unsubscribed(command.connection, command.request))

    def _heartbeat(self, command: Heartbeat, now: Now) -> None:
        self._parts.delivery.tracker.heartbeat(command)
        self._effects.append(HeartbeatSeen(command.connection, command.request))

    def _last_sequence(self, command: LastSequence, now: Now) -> None:
        self._parts.intake.turn()
        self._parts.intake.replies.last_sequence(*command)

    def _claim(self, command: Claim, now: Now) -> None:
        self._claims.claim(command.connection, command.producer_id, command.client)
        self._effects.append(Claimed(command.connection, command.request))

    def _connected(self, command: Connected, now: Now) -> None:
        self._parts.intake.connected(command, now)
        self._parts.delivery.tracker.connected(command.connection, command.program)
        if command.rights is not None:
            self._rights[command.connection] = command.rights

    def _disconnected(self, command: Disconnected, now: Now) -> None:
        parts, connection = self._parts, command.connection
        self._rights.pop(connection, None)
        if command.for_good:
            parts.delivery.unsubscribe_all(connection)
        parts.work_queue.disconnected(connection)
        parts.log_reads.disconnected(connection)
        parts.finds.disconnected(connection)
        parts.traces.disconnected(connection)
        parts.delivery.disconnected(connection, by_client=command.by_client, has_read_all=command.has_read_all)
        parts.records.disconnected(connection)
        parts.intake.disconnected(connection)
        parts.hand_overs.disconnected(connection)
        parts.segment_roll.disconnected(connection)
        parts.restores.disconnected(connection)
        parts.resends.disconnected(connection)
        self._claims.disconnected(connection)

    def _list_subjects(self, command: ListSubjects, now: Now) -> None:
        connection, request, prefix, after, limit = command
        work = self._parts.subject_lists.page(prefix, after, limit, self._rights.get(connection))
        self._parts.work_queue.begin(
            command, work, lambda page: self._effects.append(SubjectList(connection, request, *page))
        )

    # --- administration, and commands that wait for reads ------------------------------------------------------------

    def _administer(self, command: Administer, now: Now, deferred: DeferredCommand | None = None) -> None:
        connection, request, action, fields = command
        parts, rights = self._parts, self._rights.get(connection)
        if action == "restore":
            parts.restores.begin(command)
        elif action == "resend":
            parts.resends.begin(command, now)
        elif action == "roll":
            parts.segment_roll.begin(command, now)
        elif action == "cancel":
            parts.delaying.cancel(command, now)
        elif action == "stats":
            self._stats(command, now)
        elif action == "rights":
            self._effects.append(Administered(connection, request, (rights or UNCHECKED).shown()))
        elif action == "info":
            self._effects.append(InfoWanted(connection, request, parts.admin.info()))
        elif action in LETTERS:
            parts.redriving.begin(command, *parts.admin.dead_of(fields), now)
        else:
            self._do(command, now, rights, deferred or DeferredCommand(command))

    def _do(self, command: Administer, now: Now, rights: Rights | None, deferred: DeferredCommand) -> None:
        """Carry out an action on groups, which may take several turns, and a read first."""
        connection, request, action, fields = command
        parts = self._parts

        def done(fields: dict[str, Any]) -> None:
            answer = Administered(connection, request, fields)
            if action in LOOKS:
                self._effects.append(answer)
            else:
                parts.delivery.durable.answer(answer)

        def missing(missing: NotInMemory) -> None:
            if not parts.delivery.begin_read(missing, deferred):
                begin(reads_at_once=True)

        def begin(*, reads_at_once: bool) -> None:
            with blocking_reads(parts.store) if reads_at_once else nullcontext():
                result = parts.admin.do(action, fields, now, rights)
            if isinstance(result, dict):
                done(result)
            else:
                parts.work_queue.begin(
                    command, result, done, None if reads_at_once else missing, is_change=action not in LOOKS
                )

        try:
            begin(reads_at_once=False)
        except NotInMemory as error:
            missing(error)

    def _stats(self, command: Administer, now: Now) -> None:
        after, limit = command.fields.get("after", ""), command.fields.get("limit", MOST_GROUPS)
        if type(after) is not str or type(limit) is not int:
            raise InvalidOption("stats takes the name of a group in after, and a whole number in limit")
        kind = Administered if after else StatsWanted
        self._parts.work_queue.begin(
            command, self._parts.statistics.answer(after, limit, now),
            lambda answer: self._effects.append(kind(command.connection, command.request, answer)),
        )  # fmt: skip

    def _resume(self, deferred: DeferredCommand | None, error: QmqError | None, now: Now) -> None:
        """Carry out a command whose read is done, or refuse it where the read has failed with *error*."""
        if deferred is None:
            return
        command = deferred.command
        try:
            if error is not None:
                raise error
            if isinstance(command, Subscribe):
                self._parts.delivery.subscribe(command, deferred)
            else:
                self._administer(command, now, deferred)
        except QmqError as refusal:
            self._effects.append(Refused(command.connection, command.request, refusal))
        except Exception as cause:
            self._effects.append(failed(command.connection, command.request, cause))

    def _read_for_retention(self, done: ReadDone, now: Now, then: Callable[[ReadDone, Now], None]) -> None:
        """Report the error of a read for retention, then hand its end on."""
        if done.error is not None:
            self._parts.damages.refused(done.error)
        then(done, now)


#: When the remembered producers take more bytes, only some checkpoints have them; a start reads the rest in the log.
_PRODUCERS_AT_ONCE_BYTES = 1 << 20
_PRODUCERS_EVERY_US = 30_000_000
#: A start reads the headers of this many runs within about a second.
_ROWS_AT_ONCE = 100_000


class Broker:
    """The rules of a broker over one store."""

    def __init__(self, store: Store, limits: BrokerLimits, now: Now) -> None:
        """Restore the state from the store's checkpoint and the logs since. Raises BadState and StorageError."""
        self._store = store
        self._effects: list[Effect] = []
        #: The rights of the connections that have a token.
        self._rights: dict[int, Rights] = {}
        #: Events since the start.
        self.counters = Counters()
        self._damages = Damages(store, self.counters)
        self._reports = Reports(store, self._effects, self._damages, self.counters, self._rights)
        self._ttl_us = limits.producer_ttl_ms * 1_000
        self._producers = Producers(limits.producer_window, limits.max_producers, self._ttl_us)
        most = min(limits.max_unique_texts, limits.max_unique_bytes // TEXT_BYTES)
        #: The unique texts that are remembered.
        self.unique_texts = UniqueTexts(limits.unique_for_ms * 1_000, most)
        self._intake = Intake(store, limits, self._producers, self._effects, self._rights, self.unique_texts)
        self._delaying = DelayedMessages(store, self._intake, self._effects, self._rights)
        self._delivery = Delivery(
            store,
            limits,
            self._effects,
            self._intake.visible,
            OnDiskWaits(self._intake.on_disk, self._intake.want_on_disk),
            self._rights,
        )
        self._log_reads = LogReads(store, self._effects, self._intake.visible)
        self._finds = Finds(
            store, self._effects, GetMessages(store, self._delaying.is_cancelled, self._rights), self._rights
        )
        self._traces = Traces(store, self._delivery.subscriptions.groups, self._delaying, self._effects, self._rights)
        self._hand_overs = Handovers(store, self._delivery, self._intake, self._effects, self._rights)
        self._restores = Restores(store, self._delivery, self._intake, self._effects)
        self._records = WriteGate(store, self._effects)
        self._changes = GroupReplay(store, self._delivery)
        order, times = NameOrder(store.subjects), TimeStarts(store)
        self._admin = AdminCommands(store, self._delivery, self._changes, self._delaying.counts, order, times)
        self._redriving = Redriving(
            self._delivery.tracker.ledgers, self._delivery.tracker.look, self._delivery.durable, self._effects
        )
        self._resends = Resends(store, self._delivery, self._effects, self._intake.visible, order)
        self._retention = Retention(store, limits, self._intake, self._delivery, self._effects)
        subscriptions = self._delivery.subscriptions
        #: The names whose messages nobody takes; the daemon looks now and then.
        self.untaken = UntakenNames(
            store, subscriptions.groups, lambda: subscriptions.by_number.values(), order, times
        )  # fmt: skip
        self._statistics = BrokerStatistics(
            store, subscriptions.groups, self._delivery.tracker.ended, order, times, self._delaying.counts,
            self._state_in_short,
        )  # fmt: skip
        self._idle_subjects = IdleSubjectsForgetting(
            store, subscriptions, self._intake, self._delaying.counts, order, self._statistics.families
        )
        self._work_queue = WorkQueue(store, self._effects)
        self._segment_roll = SegmentRoll(store, self._effects, self._intake.turn)
        self._dispatch = CommandDispatch(
            BrokerParts(
                store, self._effects, self._intake, self._delivery, self._delaying, self._records, self._hand_overs,
                self._restores, self._reports, self._log_reads, self._admin, self._redriving, self._resends,
                self._retention, self._segment_roll, self._damages, self._finds, self._traces, self._rights,
                self._statistics, SubjectLists(store, self._delaying.counts), self._work_queue,
            )
        )  # fmt: skip
        #: The short way for single messages; None where the store has several partitions.
        self.short_way: ShortWay | None = None
        if len(store.partitions) == 1:
            self.short_way = ShortWay(store, limits, self._intake, self._delivery, self._records, self._effects)
        self._remembered_us = max(self._ttl_us, limits.unique_for_ms * 1_000)
        self._producers_packed = self._unique_packed = b""
        self._producers_packed_us = now.monotonic_us - _PRODUCERS_EVERY_US
        self._producers_upto: list[int] = []
        self._broadcasts = Broadcasts(
            self._delivery.subscriptions.by_ledger, self._delivery.tracker.members, self._changes.delete, limits
        )
        self._producers_seen = 0  # up to here the checkpoint has the producers of the delay log
        with rejecting_bad_state(store.state_path):
            self._restore(now)
        self._delivery.tracker.now = now
        self._changes.replay()
        self._broadcasts.restore(now)
        self._resends.resume()
        for ledger in self._delivery.tracker.ledgers.values():
            ledger.counts.clear()  # of what the start has replayed
            ledger.setbacks.forget_failures()  # they go by these counts
        store.may_wait(False)

    # --- in ----------------------------------------------------------------------------------------------------------

    def handle(self, command: Command, now: Now) -> None:
        """Take one command. A client's mistake becomes a Refused, not an exception."""
        self._delivery.tracker.now = now
        if type(command) is Send:
            try:
                if self._dispatch.stopping is not None:
                    raise self._dispatch.stopping
                self._intake.send(command, now)
            except QmqError as error:
                self.counters.refused_sends[error.code] += 1
                self._effects.append(Refused(command.connection, command.request, error))
            return
        try:
            self._dispatch.take(command, now)
        except QmqError as error:
            assert not isinstance(command, _WITHOUT_ANSWER)
            self._effects.append(Refused(command.connection, command.request, error))

    def turn(self, now: Now) -> None:
        """End a loop turn: write batches and records, publish visible messages, serve waiting pulls."""
        self._delivery.tracker.now = now
        self._intake.turn()
        self._hand_overs.turn(now)
        self._restores.turn(now)
        self._delivery.turn()
        self._finds.turn()
        self._records.turn(now.monotonic_us)
        self._delivery.durable.turn()

    def tick(self, now: Now) -> int | None:
        """Do what is due by time; return the monotonic microsecond at which to call again, None for never."""
        self._delaying.tick(now)
        self._hand_overs.turn(now)
        self._restores.turn(now)
        self._delivery.turn()
        self._delivery.tracker.tick(now)
        self._delivery.tick(now.monotonic_us)
        self._broadcasts.tick(now)
        self._redriving.tick(now)
        self._work_queue.tick()
        self._resends.tick(now)
        self._traces.tick(now)
        self._segment_roll.tick(now)
        self._retention.tick(now)
        self._idle_subjects.tick(now)
        self._producers.expire(now.monotonic_us)
        self.unique_texts.expire(now.monotonic_us)
        self._records.turn(now.monotonic_us)
        self._delivery.durable.turn()
        is_unfinished = self._delivery.unfinished() or self._finds.is_unfinished
        if is_unfinished or self._redriving or self._work_queue or self._restores.is_looking:
            return now.monotonic_us
        deadlines = (
            self._intake.next_deadline_us(now.monotonic_us),
            self._delaying.next_deadline_us(now),
            self._delivery.next_deadline_us(),
            self._delivery.tracker.next_deadline_us(),
            self._broadcasts.next_deadline_us(now),
            self._records.next_deadline_us(now.monotonic_us),
            self._delivery.durable.next_deadline_us(now.monotonic_us),
            self._resends.next_deadline_us(),
            self._segment_roll.next_deadline_us(now),
            self._traces.next_deadline_us(),
            self._retention.next_deadline_us(now),
            self._idle_subjects.next_deadline_us(now),
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def hear_of_connected(self, now: Now) -> None:
        """Take all consumers that are connected for alive now, as if their clients' heartbeats had come."""
        for member in self._delivery.subscriptions.connected():
            member.seen_us = now.monotonic_us

    def has_settled(self) -> bool:
        """Return whether all messages that were stored are visible."""
        partitions = enumerate(self._store.partitions)
        return all(self._intake.visible(number) == part.message_log.end for number, part in partitions)

    def avoid(self, partitions: frozenset[int]) -> None:
        """Give these partitions no more batches until the next call, as long as there are others."""
        self._intake.avoid(partitions)

    def stop(self) -> None:
        """Refuse sends and pulls from now on, waiting pulls too."""
        stopping = BrokerStopping("the broker is shutting down; connect again in a moment, or to another broker")
        self._dispatch.stopping = stopping
        if self.short_way is not None:
            self.short_way.close()
        self._delivery.refuse_waiting_pulls(stopping)
        self._records.hurry()
        self._delivery.at_most_once.stop(self._delivery.subscriptions.groups.values())

    # --- out ---------------------------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call, and forget them."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def take_syncs(self) -> list[SyncWanted]:
        """Return the wanted syncs of the effects, and forget them: they need not wait for the end of a turn."""
        wanted = [effect for effect in self._effects if type(effect) is SyncWanted]
        if wanted:
            self._effects[:] = [effect for effect in self._effects if type(effect) is not SyncWanted]
        return wanted

    def damage_found(self, damage: PartitionDamage, by: FoundBy) -> None:
        """Report bad bytes on disk: they are counted and logged once, and not served any more."""
        self._damages.found(damage, by)

    def file_damaged(self, error: QmqError) -> None:
        """Report a bad file of a group that the scrub has found."""
        self._damages.refused(error, "scrub")

    def take_damaged(self) -> list[QmqError]:
        """Return the damage found since the last call, each place once."""
        damaged = self._delivery.take_damaged() + self._delaying.damaged + self._finds.damaged
        damaged += self._traces.damaged
        self._delaying.damaged, self._finds.damaged, self._traces.damaged = [], [], []
        for error in (*damaged, *self._store.groups.take_damaged()):
            self._damages.refused(error)
        return self._damages.take_news()

    def take_dropped(self) -> list[Dropped]:
        """Return the segments that retention has dropped since the last call."""
        dropped, self._retention.dropped = self._retention.dropped, []
        counters = self.counters
        counters.dropped_segments += len(dropped)
        for one in dropped:
            counters.dropped_messages += one.messages
            counters.carried_messages += one.carried
            counters.lost_messages += one.lost
            counters.skipped_messages += sum(one.skipped.values())
        return dropped

    def set_retention(self, age_ms: int, max_age_ms: int, size: int, *, needs_archive: bool) -> None:
        """Set by age and size how much retention keeps from now on."""
        self._retention.configure(age_ms, max_age_ms, size, needs_archive=needs_archive)

    def retention_holders(self) -> list[str]:
        """Return the groups whose messages keep a segment that is old enough to go."""
        return self._retention.holders()

    def unaccounted(self) -> list[UnaccountedMessages]:
        """Return the groups that have messages for which records do not account, as of the last checkpoint."""
        return self._delivery.subscriptions.accounts.problems()

    def take_unreceipted(self) -> list[UnreceiptedSegment]:
        """Return the segments that retention has long kept for want of an archive receipt, once each."""
        unreceipted, self._retention.unreceipted = self._retention.unreceipted, []
        return unreceipted

    def waiting_for_sync(self) -> int:
        """Return how many answers wait for an fdatasync."""
        return self._intake.replies.waiting_for_sync()

    @property
    def groups(self) -> Mapping[str, Group]:
        """All groups by name, as they are now."""
        return self._delivery.subscriptions.groups

    def delayed(self) -> dict[str, int]:
        """Return how many delayed messages wait, by subject."""
        return dict(self._delaying.counts)

    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is of use although no message came since the last one."""
        wanted = self._delaying.wants_checkpoint() or self._retention.wants_checkpoint()
        return wanted or bool(self._segment_roll) or self._resends.wants_checkpoint

    def _state_in_short(self) -> dict[str, Any]:
        """Return what the action stats says of the whole broker beside its groups and subjects."""
        counters = self.counters
        return {
            "waiting_pulls": self._delivery.waiting_pulls(),
            "waiting_syncs": self._intake.replies.waiting_for_sync(),
            "damage": sum(counters.damaged.values()) + counters.holes_in_recovery,
            "failed_checkpoints": counters.failed_checkpoints,
            "failed_syncs": counters.failed_syncs,
            "scrubbed_bytes": counters.scrubbed_bytes,
            "scrub_rounds": counters.scrub_rounds,
            "dropped_segments": counters.dropped_segments,
            "dropped_messages": counters.dropped_messages,
            "lost_messages": counters.lost_messages,
            "skipped_messages": counters.skipped_messages,
            "unique_texts": len(self.unique_texts),
            "forgotten_texts": self.unique_texts.forgotten,
            "duplicate_messages": self.unique_texts.duplicates,
        }

    @property
    def producer_count(self) -> int:
        """How many producers are remembered."""
        return len(self._producers)

    def waiting_pulls(self) -> int:
        """Return how many pulls wait for messages."""
        return self._delivery.waiting_pulls()

    # --- checkpoint --------------------------------------------------------------------------------------------------

    def _visible(self) -> list[int]:
        """Return by partition the position before which messages may be pulled."""
        return [self._intake.visible(partition) for partition in range(len(self._store.partitions))]

    def prepare_checkpoint(self) -> Work[None]:
        """Do in pieces most of what ``checkpoint_state`` does at one moment: it packs the groups that have changed."""
        yield from self._delivery.subscriptions.pack_changed(self._visible)
        yield from self.unique_texts.prepare()

    def checkpoint_state(self, now: Now) -> dict[str, bytes]:
        """Return the broker's part of a checkpoint: groups with their cursors, producers, and unique texts.

        Staged batches and records are written first, so that a checkpoint includes no batch that may yet fail, and no
        record that a start would read again. Raises StorageFull or StorageFailed.
        """
        self._intake.turn()
        self._records.write_all()
        groups = self._delivery.subscriptions.packed(self._visible())  # while all messages that they passed are there
        self._retention.drop_ready(now)
        upto = [part.claimable for part in self._store.partitions]
        remembered_bytes = self._producers.bytes_remembered() + self.unique_texts.bytes_remembered()
        small = remembered_bytes <= _PRODUCERS_AT_ONCE_BYTES
        ahead = any(packed > most for packed, most in zip(self._producers_upto, upto, strict=False))
        if small or ahead or now.monotonic_us - self._producers_packed_us >= _PRODUCERS_EVERY_US:
            unclaimed = {
                number: end
                for number, end in enumerate(upto)
                if end < self._store.partitions[number].message_log.end
                or self._store.partitions[number].broken() is not None
            }
            unclaimed[DELAY_PARTITION] = self._delaying.seen()
            self._producers_packed = msgpack.packb(self._producers.packed(unclaimed, now.monotonic_us))
            self._unique_packed = self.unique_texts.packed(unclaimed, now.monotonic_us)
            self._producers_packed_us = now.monotonic_us
            self._producers_upto = upto
            self._producers_seen = self._delaying.seen()
        state = {
            "groups": groups,
            "producers": self._producers_packed,
            "unique": self._unique_packed,
            "has_unique": b"",
            "producers_upto": msgpack.packb([self._producers_upto, self._producers_seen]),
        }
        delayed = self._delaying.packed()
        return state if delayed is None else {**state, "delayed": delayed}

    def _restore(self, now: Now) -> None:
        state, now_us, seen = self._store.state, now.monotonic_us, 0
        are_lost = "has_unique" in state and "unique" not in state
        if "producers" in state and "producers_upto" in state and not are_lost:
            self._producers.restore(msgpack.unpackb(state["producers"]), now_us)
            upto: list[int]
            upto, seen = msgpack.unpackb(state["producers_upto"])
            upto += [0] * (len(self._store.partitions) - len(upto))
            if "unique" in state:
                self.unique_texts.restore(state["unique"], now_us)
        else:  # there is no checkpoint, or the file of a part of it is lost
            upto = [self._remembered_from(partition) for partition in range(len(self._store.partitions))]
        sent = self._store.headers_since(upto), self._delaying.headers_since(seen)
        for partition, header in heapq.merge(*sent, key=lambda found: found[1].stored_at_us):
            if header.producer_id == DUE_PRODUCER or is_copy(header.producer_id):
                continue
            self._remember(partition, header, now_us)
        self._delaying.restore(state.get("delayed"))
        if "groups" in state:
            self._delivery.subscriptions.restore(msgpack.unpackb(state["groups"], strict_map_key=False))

    def _remember(self, partition: int, header: Header, now_us: int) -> None:
        """Remember the producer of a batch that a client sent, and the unique texts that it has."""
        store = self._store if partition < DELAY_PARTITION else self._store.delay_log
        assert store is not None
        view = store.partitions[partition if store is self._store else 0].page_cache.peek
        sent = header.messages, header.data_crc
        try:
            if not is_plain_table(view(header.position + BATCH_HEADER_SIZE + RUN_SIZE * header.runs, 1)):
                batch = view(header.position, header.size)
                as_sent = sent_as(stored_table(batch, header))
                if as_sent is not None:
                    sent = as_sent
                    self.unique_texts.replay(partition, batch, header, now_us)
        except QmqError as error:  # its bytes went bad since, so its texts are not known any more
            self._damages.refused(error)
        self._producers.remember(
            header.producer_id, header.producer_sequence, *sent, partition, header.position, now_us
        )

    def _remembered_from(self, partition: int) -> int:
        """Return the position from which on the log is read for producers and unique texts: as far back as they are
        remembered.

        That goes by stamps, which are wrong after a jump of the clock, so the last rows are read in any case.
        """
        since_us = max(0, self._store.last_stored_at_us - self._remembered_us)
        part = self._store.partitions[partition]
        end = part.consumer_log.visible_row
        row = min(part.consumer_log.row_at_time(since_us), max(0, end - _ROWS_AT_ONCE))
        return part.consumer_log.read_entry(row)[1] if row < end else part.message_log.end
