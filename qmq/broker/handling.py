"""What each command is: which part of the broker takes it. Pulls, acknowledgements and all else but sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from qmq.broker.admin import LETTERS, LOOKS, Admin
from qmq.broker.damage import Damages
from qmq.broker.delay.delay import Delaying
from qmq.broker.delivery.pull import Delivery
from qmq.broker.delivery.read_numbers import Asker, asker_of
from qmq.broker.delivery.read_waits import Postponed
from qmq.broker.delivery.serve import waits
from qmq.broker.error_log.reviving import Reviving
from qmq.broker.journal.write_gate import Records
from qmq.broker.log_reads import LogReads
from qmq.broker.ports.commands import (
    Ack,
    Administer,
    Checked,
    Claim,
    Command,
    Disconnected,
    Fetched,
    HandBack,
    HandOver,
    Heartbeat,
    LastSequence,
    ListBatches,
    ListSegments,
    ListSubjects,
    Now,
    Pull,
    ReadDone,
    ReadLog,
    Report,
    Restore,
    Subscribe,
    SyncBroken,
    Synced,
    Unsubscribe,
    Withdraw,
)
from qmq.broker.ports.effects import Administered, Claimed, Effect, HeartbeatSeen, Refused, SubjectList, Unsubscribed
from qmq.broker.publish.claims import Claims
from qmq.broker.publish.publish import Intake
from qmq.broker.publish.roll import Sealing
from qmq.broker.reports import Reports
from qmq.broker.retention.retention import Retention
from qmq.broker.transfer.handover import HandOvers
from qmq.broker.transfer.restore import Restores
from qmq.errors import BrokerStopping, QmqError
from qmq.format.private import is_private
from qmq.names import check_prefix
from qmq.storage.store import NotAtHand, Store

#: Rows of one list of subjects.
_MAX_LIST: Final = 10_000
#: Subjects whose names are looked at for one answer: a prefix may take none of a million.
_MOST_LOOKED_AT: Final = 20_000
#: What a broker that stops refuses, beside sends.
_REFUSED_AT_STOP: Final = frozenset((Pull, HandOver, Restore, ReadLog))


class Parts(NamedTuple):
    """What a broker is made of."""

    store: Store
    effects: list[Effect]
    intake: Intake
    delivery: Delivery
    delaying: Delaying
    records: Records
    hand_overs: HandOvers
    restores: Restores
    reports: Reports
    log_reads: LogReads
    admin: Admin
    reviving: Reviving
    retention: Retention
    sealing: Sealing
    damages: Damages


class Handling:
    """Of one broker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._effects = parts.effects
        self._claims = Claims()
        #: Why nothing more is begun.
        self.stopping: BrokerStopping | None = None
        delivery, log_reads, reports = parts.delivery, parts.log_reads, parts.reports
        say = parts.effects.append
        self._take: dict[type, Callable[[Any, Now], object]] = {
            Pull: lambda command, now: delivery.pull(command, now.monotonic_us),
            Ack: self._ack,
            Synced: self._synced,
            SyncBroken: self._sync_broken,
            ReadDone: lambda command, now: self._read_done[asker_of(command.number)](command, now),
            Withdraw: lambda command, now: delivery.withdraw(command),
            Subscribe: lambda command, now: delivery.subscribe(command),
            Unsubscribe: self._unsubscribe,
            HandBack: lambda command, now: say(delivery.hand_back(command)),
            HandOver: parts.hand_overs.take,
            Restore: parts.restores.take,
            Heartbeat: self._heartbeat,
            Administer: self._administer,
            LastSequence: self._last_sequence,
            Claim: self._claim,
            ListSubjects: lambda command, now: say(self._list_subjects(command)),
            Report: lambda command, now: reports.report(command),
            Checked: lambda command, now: reports.checked(command),
            ListSegments: lambda command, now: log_reads.list_segments(command),
            ListBatches: lambda command, now: log_reads.list_batches(command),
            ReadLog: lambda command, now: log_reads.read(command),
            Fetched: lambda command, now: log_reads.fetched(command),
            Disconnected: self._disconnected,
        }
        self._read_done: dict[Asker, Callable[[ReadDone, Now], object]] = {
            Asker.PULL_LOG: lambda done, now: delivery.durable.synced(done.error),
            Asker.PULLS: lambda done, now: self._go_on(delivery.read_done(done), done.error, now),
            Asker.REPORTS: lambda done, now: reports.read_done(done),
            Asker.HISTORY: lambda done, now: log_reads.read_done(done),
            Asker.DUE: parts.delaying.read_done,
            Asker.CANCEL: parts.delaying.looked,
            Asker.RESTORE: lambda done, now: parts.restores.read_done(done.error),
            Asker.RETENTION: lambda done, now: self._looked(done, now, parts.retention.read_done),
            Asker.FORWARDING: lambda done, now: self._looked(done, now, parts.retention.copied),
        }

    def take(self, command: Command, now: Now) -> None:
        """Do what it says. Raises QmqError where the client is to be told so."""
        kind = type(command)
        if self.stopping is not None and kind in _REFUSED_AT_STOP:
            raise self.stopping
        self._take[kind](command, now)

    # --- one kind each -----------------------------------------------------------------------------------------------

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
        self._parts.delivery.handing.heartbeat(command)
        self._effects.append(HeartbeatSeen(command.connection, command.request))

    def _last_sequence(self, command: LastSequence, now: Now) -> None:
        self._parts.intake.turn()
        self._parts.intake.acknowledging.last_sequence(*command)

    def _claim(self, command: Claim, now: Now) -> None:
        self._claims.claim(command.connection, command.producer_id, command.client)
        self._effects.append(Claimed(command.connection, command.request))

    def _disconnected(self, command: Disconnected, now: Now) -> None:
        parts, connection = self._parts, command.connection
        parts.log_reads.disconnected(connection)
        parts.delivery.disconnected(connection)
        parts.records.disconnected(connection)
        parts.intake.acknowledging.disconnected(connection)
        parts.hand_overs.disconnected(connection)
        parts.sealing.disconnected(connection)
        parts.restores.disconnected(connection)
        self._claims.disconnected(connection)

    def _list_subjects(self, command: ListSubjects) -> SubjectList:
        prefix, store = check_prefix(command.prefix), self._parts.store
        end = min(store.subject_count, command.after + _MOST_LOOKED_AT)
        if prefix == "" or prefix.endswith("."):
            numbers = store.subjects_under(prefix, command.after, end)
        else:
            number, end = store.subject_number(prefix), store.subject_count
            numbers = [number] if number is not None and number >= command.after else []
        rows: list[tuple[str, int, int, int, int]] = []
        most = max(1, min(command.limit, _MAX_LIST))
        for number in numbers:
            if len(rows) == most:
                end = number
                break
            name = store.subject_name(number)
            if not is_private(name):
                first, following = int(store.firsts[number]), int(store.ends[number])
                count = store.message_count(number, first, following)
                rows.append((name, first, following, count, self._parts.delaying.counts[name]))
        after = end if end < store.subject_count else None
        return SubjectList(command.connection, command.request, rows, after)

    # --- administration, and what waits for reads --------------------------------------------------------------------

    def _administer(self, command: Administer, now: Now, postponed: Postponed | None = None) -> None:
        connection, request, action, fields = command
        parts = self._parts
        if action == "restore":
            parts.restores.begin(command)
        elif action == "seal":
            parts.sealing.begin(command, now)
        elif action == "cancel":
            parts.delaying.cancel(command, now)
        elif action in LETTERS:
            parts.reviving.begin(command, *parts.admin.dead_of(fields), now)
        else:
            try:
                answer = Administered(connection, request, parts.admin.do(action, fields, now))
            except NotAtHand as missing:
                wanted = postponed or Postponed(command)
                if parts.delivery.begin_read(missing, wanted):
                    return
                with waits(parts.store):
                    answer = Administered(connection, request, parts.admin.do(action, fields, now))
            if action in LOOKS:
                self._effects.append(answer)
            else:
                parts.delivery.durable.answer(answer)

    def _go_on(self, postponed: Postponed | None, failed: QmqError | None, now: Now) -> None:
        """What a command waited for is in memory, or cannot be read."""
        if postponed is None:
            return
        command = postponed.command
        try:
            if failed is not None:
                raise failed
            if isinstance(command, Subscribe):
                self._parts.delivery.subscribe(command, postponed)
            else:
                self._administer(command, now, postponed)
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))

    def _looked(self, done: ReadDone, now: Now, tell: Callable[[ReadDone, Now], None]) -> None:
        """Of a segment that may go."""
        if done.error is not None:
            self._parts.damages.refused(done.error)
        tell(done, now)
