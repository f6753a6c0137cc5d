"""The messages in flight of all groups: joins, pulls, acks and nacks of consumers, on their way to the ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from qmq.broker.delivery.ack_deadline import AckDeadlines
from qmq.broker.delivery.eligibility import Eligibility, eligibility_of
from qmq.broker.delivery.order.places import ordered_runs, use_order
from qmq.broker.delivery.redeliver import Redelivery, ledger_and_member
from qmq.broker.error_log.error_log import PASSED_AFTER_US, Retries
from qmq.broker.groups.counts import GroupCounts
from qmq.broker.groups.group import Group, SubjectFilter, Subscription
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import NOTHING_WAITS, DueRetries, Membership, MessageKind, Offer
from qmq.broker.groups.message_ranges import MessageParts, WholeRuns, lane_kind_of, parts_of, ranges_of
from qmq.broker.groups.priorities import NORMAL, rank_of
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.groups.totals import MessageTotals
from qmq.broker.journal.record_types import MOST_RANGES_A_RECORD, MessageRange, RecordKind, unflat
from qmq.broker.ports.commands import DispositionRange, Heartbeat, Now, Pull, Subscribe
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InternalError, InvalidOption
from qmq.format.layout import ENTRY_DTYPE, MAX_DELAY_SHOWN, MAX_DELAY_US
from qmq.net.protocol.types import BROADCAST, DISPOSITIONS, RELIABLE, ConsumerState
from qmq.storage.store import Store

#: Ranges of messages that were looked at, in one record of a pull.
_LOOKED_AT_RANGES: Final = 2_048


class LeftOut(NamedTuple):
    """The messages that a pull passed and that no consumer gets: how many have none of the group's tags, and how many
    have expired in a group without dead letters. *looked_at* are the messages among which these are: the others were
    handed out by the same pull.
    """

    filtered: int
    skipped: int
    looked_at: MessageParts


NOTHING_LEFT_OUT: Final = LeftOut(0, 0, [])


class DeliveryTracker:
    """Tracks which consumer of which group has which messages in flight.

    Joins, pulls, acks, nacks and leaves go through it to the ledger of the group, which writes them to the pull log.
    """

    def __init__(
        self, store: Store, limits: BrokerLimits, wake: Callable[[Ledger], None], visible: Callable[[int], int]
    ) -> None:
        """*wake* is called when a group has messages again; *visible* returns the position before which a partition's
        messages may be pulled.
        """
        self._store = store
        self._visible = visible
        self._most_count, self._most_bytes = limits.max_pull_count, limits.max_pull_bytes
        self.members = Membership(limits.session_timeout_ms * 1_000, wake, limits.reconnect_timeout_ms * 1_000)
        self.ledgers: dict[int, Ledger] = {}
        #: The events of groups that were deleted.
        self.ended = GroupCounts(MessageTotals())
        self._next_number = 1
        self._programs: dict[int, str] = {}  # the names that the programs of connections gave
        self.now = Now(0, 0)
        self.ack_deadlines = AckDeadlines()
        self.redelivery = Redelivery(store)
        store.groups.use_clock(lambda: self.now.wall_us or store.last_stored_at_us)

    # --- groups and consumers ----------------------------------------------------------------------------------------

    def ledger_of(self, group: Group) -> Ledger:
        """Return the group's ledger, made when it has none."""
        if group.ledger is None:
            group.ledger = self._make(self._next_number, group.mode)
            self._next_number += 1
        return group.ledger

    def _make(self, number: int, mode: str) -> Ledger:
        files = self._store.groups
        ledger = self.ledgers[number] = Ledger(
            number, files.retries(number), files.dead(number), files.record, keeps_absent=mode == BROADCAST,
            rank=self._rank if mode == RELIABLE else _normal_rank,
        )  # fmt: skip
        return ledger

    def _rank(self, messages: MessageRange) -> int:
        return rank_of(lane_kind_of(self._store, messages))

    def join(self, command: Subscribe, group: Group) -> Member:
        """Take a consumer into the group, new or known; return it."""
        ledger = self.ledger_of(group)
        known = command.known
        if known is not None and known.generation != self._store.groups.generation:
            known = known._replace(handled=())  # its delivery sequences may mean other messages now
        before = ledger.by_name.get(command.consumer)
        was_leaving = before is not None and before.leaving
        member = ledger.join(
            command.consumer,
            command.nonce,
            command.transient,
            self.now.wall_us,
            command.client,
            known,
            self._programs.get(command.connection, ""),
            command.session,
        )
        if before is not None and before.leaving and not was_leaving:
            self.members.leaves(ledger, before)
        self.members.joined(ledger, member, command.client, self.now)
        self.members.connected(command.connection, command.client)
        self.members.look(ledger)
        return member

    def consumer_state(self, member: Member) -> ConsumerState:
        """Return the state of a consumer, for its client."""
        in_flight = member.in_flight
        return ConsumerState(
            member.number, member.epoch, in_flight.ack_floor, in_flight.next_sequence, self._store.groups.generation,
            member.since_us,
        )  # fmt: skip

    def leave(self, subscription: Subscription) -> None:
        """Let a consumer leave by itself; others get its messages in flight at once."""
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None or member.epoch != subscription.epoch:
            return
        self.members.leave(ledger, member, self.now)

    def drop(self, ledger: Ledger, *, clear_retries: bool) -> None:
        """Drop all that is in flight, since the group seeks or is deleted."""
        members = [member for member in ledger.members.values() if not member.closed]
        ledger.drop_in_flight(self.now.wall_us, clear_retries=clear_retries)
        self.members.left(ledger, *members)

    def forget(self, ledger: Ledger) -> None:
        """Delete the ledger of a group."""
        self.drop(ledger, clear_retries=True)
        self.ended.add(ledger.counts)
        del self.ledgers[ledger.number]
        self._store.groups.forget(ledger.number)

    def look(self, number: int) -> None:
        """Wake the group with that number if messages have come back to it."""
        self.members.look(self.ledgers[number])

    def heartbeat(self, command: Heartbeat) -> None:
        """Note that a client's process lives."""
        self.members.heartbeat(command.connection, command.client, command.stalled_us, self.now)

    def connected(self, connection: int, program: str) -> None:
        """Note the name that the program of a connection gave."""
        if program:
            self._programs[connection] = program

    def disconnected(self, connection: int, *, by_client: bool) -> None:
        """Have the consumers of a client expire soon if its system closed its last connection."""
        self._programs.pop(connection, None)
        self.members.disconnected(connection, self.now, by_client=by_client)

    def lives(self, subscription: Subscription) -> None:
        """Note that a consumer lives, unless another one has taken over."""
        member = subscription.member
        if member is not None and member.epoch == subscription.epoch:
            member.seen_us = self.now.monotonic_us

    def ack(self, subscription: Subscription, intervals: tuple[int, ...]) -> int:
        """Ack delivery sequences; return how many were refused. Raises Fenced and InvalidOption."""
        ledger, member = self._caller(subscription)
        if not _are_pairs(intervals):
            raise InvalidOption("acks are pairs of a first delivery sequence and the one behind the last; send them so")
        refused = ledger.ack(member, list(intervals), self.now.wall_us)
        if not ledger.retries.is_empty and self.members.clears(ledger, member):
            self.members.look(ledger)
        return refused

    def hand_back(self, subscription: Subscription, backs: Sequence[DispositionRange]) -> list[int]:
        """Nack, release or reject ranges; return the indexes of the refused ones. Raises Fenced and InvalidOption."""
        ledger, member = self._caller(subscription)
        if len(backs) > MOST_RANGES_A_RECORD:
            raise InvalidOption(
                f"at most {MOST_RANGES_A_RECORD:,} ranges go into one request, not {len(backs):,}; send several"
            )
        for disposition in {back.disposition for back in backs}:
            if disposition not in DISPOSITIONS:
                raise InvalidOption(
                    f"there is no disposition {disposition}; use {', '.join(one.name.lower() for one in DISPOSITIONS)}"
                )
        if max(back.delay_us or 0 for back in backs) > MAX_DELAY_US:
            raise InvalidOption(f"the delay of a redelivery is at most {MAX_DELAY_SHOWN}; give a shorter one")
        refused = ledger.hand_back(member, backs, self.now.wall_us)
        self.members.look(ledger)
        return refused

    def _caller(self, subscription: Subscription) -> tuple[Ledger, Member]:
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None:
            raise InvalidOption("a solo consumer or one of an at_most_once group has nothing to ack or nack")
        ledger.member(member.number, subscription.epoch)
        if self._store.subjects.has_lanes:
            self.keep_order(subscription)
        member.seen_us = self.now.monotonic_us
        return ledger, member

    # --- pulls -------------------------------------------------------------------------------------------------------

    def offer(self, subscription: Subscription, pull: Pull) -> Offer:
        """Return what a pull may get. Raises Fenced and InvalidOption."""
        most, size = min(pull.max_count, self._most_count), min(pull.max_bytes, self._most_bytes)
        if subscription.member is None:
            return Offer(MessageKind.FRESH, most, size)
        kind, count, room, ranks = self._offer(subscription, pull)
        return Offer(kind, min(most, count), min(size, room), ranks)

    def _offer(self, subscription: Subscription, pull: Pull) -> Offer:
        ledger, member = self._caller(subscription)
        retries = ledger.retries
        expected = member.in_flight.next_sequence if pull.expected is None else pull.expected
        if expected > member.in_flight.next_sequence:
            raise InvalidOption(
                f"a pull of consumer {member.name!r} expects delivery sequence {expected}; the next one is "
                f"{member.in_flight.next_sequence}"
            )
        now_us = self.now.wall_us
        if not retries.load(now_us):
            if not retries.is_more_due(now_us):
                return self.members.offer(ledger, member, expected, NOTHING_WAITS)
            self.members.look_at(ledger, now_us)
        eligibility = eligibility_of(self._store, subscription)
        if eligibility is None:
            waiting = DueRetries(tuple(rank for rank, _ in retries.due_by_rank()), retries.is_quarantined_due)
        else:
            waiting = self._waits_for(ledger, eligibility)
        return self.members.offer(ledger, member, expected, waiting)

    def _waits_for(self, ledger: Ledger, eligibility: Eligibility) -> DueRetries:
        """Return which retries wait for a consumer that may have only some of its group's messages now."""
        retries, now_us = ledger.retries, self.now.wall_us
        waiting = _due_for(eligibility, retries)
        if waiting != NOTHING_WAITS or not retries.is_more_due(now_us):
            return waiting
        if retries.pass_over(now_us):
            self.members.look(ledger)
            return _due_for(eligibility, retries)
        self.members.look_at(ledger, now_us + PASSED_AFTER_US)
        return waiting

    def record_pull(
        self, subscription: Subscription, parts: MessageParts, size: int, passed: int, apply: Callable[[], object],
        left_out: LeftOut = NOTHING_LEFT_OUT,
    ) -> tuple[int, int]:  # fmt: skip
        """Record what becomes of all messages that the group's cursors pass in a pull, *passed* in number, and *apply*
        the choice, which moves the cursors: the consumer has *parts*, and others are left out. Return the interval of
        the delivery sequences.

        Raises InternalError, with nothing changed, where these are not all messages, or more.
        """
        group, member = subscription.group, subscription.member
        filters = subscription.every_lane() if self._store.subjects.has_lanes else subscription.filters
        ranges = ranges_of(self._store, parts, filters) if parts else []
        given = ranges[0].total if len(ranges) == 1 else sum([messages.total for messages in ranges])
        dropped = left_out.filtered + left_out.skipped
        if given + dropped != passed:
            raise _unaccounted(group, passed, given, left_out)
        apply()
        ledger = group.ledger
        group.skipped += left_out.skipped
        if ledger is None:
            return 0, 0
        start = 0 if member is None else member.in_flight.next_sequence
        if not dropped and member is None:  # of an at_most_once group no pull is recorded
            return 0, 0
        # Without a record of what was handed out, a start reads rows again, by cursors and blocks.
        where = self._positions_read(subscription) if member is not None else []
        while member is not None and len(ranges) > MOST_RANGES_A_RECORD:
            ledger.pulled(member, ranges[:MOST_RANGES_A_RECORD], 0, self.now.wall_us, [])
            del ranges[:MOST_RANGES_A_RECORD]
        if member is None or dropped:
            looked_at = ranges_of(self._store, left_out.looked_at, filters)
            self._record_passed(ledger, member, ranges, size, left_out, looked_at, where)
        else:
            ledger.pulled(member, ranges, size, self.now.wall_us, where)
        if member is None:
            return 0, 0
        if ledger.order is not None:
            ledger.order.given(member.number, ordered_runs(self._store, parts, start, may_be_copies=False))
        self.ack_deadlines.start(ledger, member, self.now)
        return start, member.in_flight.next_sequence

    def _record_passed(
        self, ledger: Ledger, member: Member | None, given: list[MessageRange], size: int, left_out: LeftOut,
        ranges: list[MessageRange], where: list[Any],
    ) -> None:  # fmt: skip
        """Record a pull that has left out some messages of *ranges*."""
        counts = left_out.filtered, left_out.skipped
        if member is None:
            given = []
        while ranges:
            some, ranges = ranges[:_LOOKED_AT_RANGES], ranges[_LOOKED_AT_RANGES:]
            ledger.passed(member, some, size, self.now.wall_us, given, *counts, [] if ranges else where)
            given, size, counts = [], 0, (0, 0)

    def keep_order(self, subscription: Subscription) -> None:
        """Keep the order of slots once a consumer follows a subject that has some."""
        group = subscription.group
        if group.ledger is None or not group.heeds_priority:
            return
        if group.ledger.order is None:
            subscription.find_lanes(self._store)
            if not any(base.has_slots for base in subscription.filters):
                return
            use_order(self._store, group)
        assert group.ledger.order is not None
        group.ledger.order.renew()

    def record_redelivery(self, subscription: Subscription) -> None:
        """Start the ack deadline of messages that were delivered again."""
        self.ack_deadlines.start(*ledger_and_member(subscription), self.now)

    def expire(self, subscription: Subscription, intervals: list[tuple[int, int]]) -> None:
        """Make dead letters of delivered messages that have expired."""
        ledger, member = ledger_and_member(subscription)
        ledger.expire(member, intervals, self.now.wall_us)

    def _positions_read(self, subscription: Subscription) -> list[Any]:
        """Return how far the subscription's prefixes have been read: [prefix, position by partition] each, with a third
        item for another kind of lanes than normal ones.
        """
        has_lanes = self._store.subjects.has_lanes
        filters = subscription.every_lane() if has_lanes else subscription.filters
        where, visible = list[Any](), list[int]()
        for subject_filter in filters:
            if subject_filter.exact:
                continue
            if not visible:
                visible = list(map(self._visible, range(len(self._store.partitions))))
            read = [subject_filter.prefix, subject_filter.positions_now(self._store, visible)]
            where.append(read if subject_filter.base is None else [*read, subject_filter.kind])
        return where

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Expire silent consumers and passed ack deadlines; wake pulls whose retries are due."""
        self.now = now
        self.members.tick(now)
        for ledger in self.ack_deadlines.tick(now):
            self.members.look(ledger)

    def next_deadline_us(self) -> int | None:
        """Return when ``tick`` has work next; None for never."""
        deadlines = self.members.next_deadline_us(self.now), self.ack_deadlines.next_deadline_us()
        return min((one for one in deadlines if one is not None), default=None)

    # --- start -------------------------------------------------------------------------------------------------------

    def restore(self, group: Group, number: int, fields: dict[str, Any]) -> Ledger:
        """Restore a group's ledger from a checkpoint; return it."""
        group.ledger = ledger = self._make(number, group.mode)
        ledger.restore(fields)
        self._next_number = max(self._next_number, number + 1)
        return ledger

    def recreate(self, group: Group, number: int) -> Ledger:
        """Make and return the ledger of a group whose record is read at the start."""
        group.ledger = ledger = self._make(number, group.mode)
        self._next_number = max(self._next_number, number + 1)
        return ledger

    def follows(self, group: Group, subject_filter: SubjectFilter, settings: ResolvedSettings | None = None) -> None:
        """Record that a group follows a prefix; *settings*: those of a group that is made by it, so that no loss of
        power leaves it without them.
        """
        if group.name is None:
            return
        ledger, followed = self.ledger_of(group), subject_filter
        fields = [
            ledger.number, group.name, group.mode, followed.prefix, followed.ordinal, followed.start,
            followed.positions,
        ]  # fmt: skip
        if settings is not None:
            ledger.begin_with(settings)
            fields.append(list(settings))
        self._store.groups.stage(RecordKind.GROUP, msgpack.packb(fields))

    def unfollows(self, group: Group, ended: Iterable[SubjectFilter]) -> None:
        """Record that a group no longer follows these prefixes."""
        fields = [self.ledger_of(group).number, [subject_filter.prefix for subject_filter in ended]]
        self._store.groups.stage(RecordKind.UNFOLLOW, msgpack.packb(fields))

    def replay(self, group: Group, kind: int, fields: list[Any]) -> None:
        """Apply a record of the pull log at the start. Records of unknown consumers change nothing."""
        ledger = group.ledger
        assert ledger is not None
        if not ledger.replay(kind, fields):
            return
        if kind == RecordKind.PULL:
            self._replay_cursors(group, fields[5], unflat(fields[4]))
        elif kind == RecordKind.PASSED:
            ranges, _, _, skipped, where = fields[4:]
            group.skipped += skipped
            self._replay_cursors(group, where, unflat(ranges))

    def _replay_cursors(self, group: Group, where: list[Any], ranges: list[MessageRange]) -> None:
        """Move a group's cursors behind the messages of a replayed pull. A pull itself moves them by the rows that it
        chose; a record has ranges, whose rows have to be looked up, and some may be gone.
        """
        for messages in ranges:
            for part in parts_of(self._store, group, messages):
                rows = part.rows if isinstance(part, WholeRuns) else np.array([part.entry], ENTRY_DTYPE)
                ends = rows["first_sequence"] + (rows["count"] if isinstance(part, WholeRuns) else part.stop)
                group.cursors.raise_to(rows["subject"], ends)
        for prefix, positions, *kinds in where:
            subject_filter = group.filters.get(prefix)
            if subject_filter is None:
                continue
            row_cursors = [
                self._store.partitions[number].consumer_log.row_at_position(position)
                for number, position in enumerate(positions)
            ]
            for kind in kinds:
                subject_filter = subject_filter.lanes.get(kind) or subject_filter.add_lane(kind, row_cursors, positions)
            subject_filter.row_cursors[:] = row_cursors
            subject_filter.positions[:] = positions
        group.dirty = True

    def restored(self) -> None:
        """Begin the session timeouts and ack deadlines after the start has read all records."""
        self.members.restore(self.ledgers.values(), self.now)
        self.ack_deadlines.restore(self.ledgers.values(), self.now)


def _normal_rank(messages: MessageRange) -> int:
    """Return the rank of all messages of a group that heeds no priorities."""
    return NORMAL


def _unaccounted(group: Group, passed: int, given: int, left_out: LeftOut) -> InternalError:
    """Return the error for a pull that does not say what becomes of all messages that it passes."""
    whose = "a solo consumer" if group.name is None else f"group {group.name}"
    return InternalError(
        f"a pull of {whose} would pass {passed:,} messages, but hand out {given:,}, filter {left_out.filtered:,} and "
        f"skip {left_out.skipped:,}; nothing was changed, so that none is lost: this is a bug of the broker, report it"
    )


def _are_pairs(intervals: tuple[int, ...]) -> bool:
    """Return whether *intervals* are starts and ends in turn, each end behind its start."""
    if len(intervals) == 2:
        return intervals[0] < intervals[1]
    starts, ends = intervals[::2], intervals[1::2]
    return len(starts) == len(ends) and all(map(int.__lt__, starts, ends))


def _due_for(eligibility: Eligibility, retries: Retries) -> DueRetries:
    """Return the retries in memory that wait for a consumer."""
    ranks = tuple(rank for rank, several in retries.due_by_rank() if eligibility.first(several) is not None)
    return DueRetries(ranks, eligibility.first(retries.due_quarantined) is not None)
