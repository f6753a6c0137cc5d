"""Drop the oldest sealed segments, by age and by size.

A segment that is old enough goes once every group has taken its messages; one beyond a hard limit goes in any case. One
segment goes at a time. Once it is chosen, no group or consumer begins in it, unless it stays; a group that follows
again what it has followed before goes on in it, and may have it stay. Groups that are behind are moved past it, and the
messages that they miss are counted. Messages that a group still refers to are carried forward. Then a
checkpoint leaves the segment out of the log, and its files go once no checkpoint names it. Files are read in a thread,
and everything else is done in small steps.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from qmq.broker.delivery.pull import Delivery
from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.groups.group import Group
from qmq.broker.ports.commands import Now, ReadDone
from qmq.broker.ports.effects import Asker, Effect, ReadWanted, first_number
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.work import TURN_WORK, Work
from qmq.broker.publish.publish import Intake
from qmq.broker.retention.advance_groups import GroupAdvance
from qmq.broker.retention.carry_forward import CarryForward
from qmq.broker.retention.references import SegmentTarget
from qmq.errors import StorageError
from qmq.storage.store import ColdRead, NotInMemory, OldSegment, Store, SubjectRanges, subject_ranges_of

#: The number of retention's reads.
LOOK_NUMBER: Final = first_number(Asker.RETENTION)
#: How often to look for a segment that is old enough, and when to look again at one that cannot go yet (no archive has
#: it, or its files cannot be read).
_LOOK_US: Final = 1_000_000
_AGAIN_US: Final = 10_000_000
#: When to look again at a segment with messages that a group has not taken: each look reads all of its rows.
_HELD_US: Final = 600_000_000
#: After most of a segment was carried forward, dropping it has freed little: drop none by size for so long.
_NO_SIZE_LIMIT_US: Final = 600_000_000
#: Report a segment that waits for its receipt after so long, and again after as long.
_REPORT_US: Final = 4_000_000_000
#: Reads for one group; after them, the loop waits for what is not in memory.
_MOST_READS: Final = 64
#: The most groups that a report names.
_NAMED: Final = 10


class _StoredUntilRead:
    """A read of the time until which the first segment of each partition was stored; *wall_us* is the clock."""

    def __init__(self, segments: list[OldSegment], wall_us: int) -> None:
        self.partition = segments[0].partition
        self._segments = segments
        self._wall_us = wall_us
        self.found: dict[tuple[int, int], int] = {}

    def step(self) -> bool:
        """[thread] Do the whole read. Raises StorageError."""
        for old in self._segments:
            self.found[old.partition, old.span.base] = old.stored_before_us(self._wall_us)
        return False


class _SegmentRead:
    """A read of the receipt and all rows of a segment that is to go."""

    def __init__(self, old: OldSegment, *, needs_archive: bool, must_go: bool) -> None:
        self.old = old
        self.must_go = must_go
        self.partition = old.partition
        self._needs_archive = needs_archive
        self.may_go = False
        self.rows: Any = None
        self.had: SubjectRanges | None = None

    def step(self) -> bool:
        """[thread] Do the whole read. Raises StorageError."""
        self.may_go = not self._needs_archive or self.old.is_archived()
        if self.may_go:
            self.rows = self.old.rows()
            self.had = subject_ranges_of(self.rows)
        return False


class _SegmentDrop:
    """The segment that is about to go; *must_go*: whether groups have taken its messages or not."""

    def __init__(
        self, old: OldSegment, target: SegmentTarget, advance: GroupAdvance, groups: list[Group], *, must_go: bool
    ) -> None:
        self.must_go = must_go
        self.is_chosen = False
        self.old = old
        self.target = target
        self.advance = advance
        self.groups = groups  # to be looked at, then to be moved
        self.reads = set[object]()  # made for the next group
        self.carry_forward: CarryForward | None = None
        self.work: Work[bool] | None = None  # of the next group
        self.is_ready = False


class Dropped(NamedTuple):
    """A segment that has gone: positions [base, end) of a partition."""

    partition: int
    base: int
    end: int
    messages: int
    stored_until_us: int
    #: Messages that were carried forward, and those that could not be read.
    carried: int
    lost: int
    #: Messages that each group that was behind has missed.
    skipped: dict[str, int]

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.stored_until_us / 1_000_000, UTC)
        text = (
            f"messages stored until {when:%Y-%m-%d %H:%M:%S} UTC have gone from partition {self.partition}: "
            f"{self.messages} in {self.end - self.base} bytes, of which {self.carried} were carried forward"
        )
        if self.lost:
            text += f" and {self.lost} could not be read"
        if self.skipped:
            named = [f"{name} ({count} messages)" for name, count in list(self.skipped.items())[:_NAMED]]
            more = f" and {len(self.skipped) - _NAMED} others" if len(self.skipped) > _NAMED else ""
            text += f"; groups that were behind missed some of them: {', '.join(named)}{more}"
        return text


class UnreceiptedSegment(NamedTuple):
    """A segment that is to go and waits for its receipt: positions [base, end) of a partition."""

    partition: int
    base: int
    end: int
    stored_until_us: int

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.stored_until_us / 1_000_000, UTC)
        return (
            f"messages stored until {when:%Y-%m-%d %H:%M:%S} UTC are kept in partition {self.partition}, though "
            f"retention would drop them: segment {self.base:016x} has no receipt that says that an archive has all of "
            "it; run qmq archive, and see how it ends"
        )


class Retention:
    """The retention of the message log."""

    def __init__(
        self, store: Store, limits: BrokerLimits, intake: Intake, delivery: Delivery, effects: list[Effect]
    ) -> None:
        self._store = store
        self._age_us = self._max_age_us = self._bytes = 0
        self._needs_archive = False
        self._intake = intake
        self._delivery = delivery
        self._effects = effects
        self._stored_until: dict[tuple[int, int], int] = {}  # by partition and base
        self._reading: _StoredUntilRead | _SegmentRead | ColdRead | None = None
        self._put_off: dict[tuple[int, int], int] = {}  # look again then, by the monotonic clock
        self._dropping: _SegmentDrop | None = None
        #: By partition and base: a group that has not taken all messages of a segment that is old enough.
        self._holders: dict[tuple[int, int], str] = {}
        self._look_us = 0
        self._any_size_until_us = 0
        #: When to report that a segment waits for its receipt.
        self._report_us: dict[tuple[int, int], int] = {}
        #: Segments that have gone, and segments that wait for a receipt, not reported yet.
        self.dropped: list[Dropped] = []
        self.unreceipted: list[UnreceiptedSegment] = []
        self.configure(
            limits.retention_ms, limits.retention_max_ms, limits.retention_bytes,
            needs_archive=limits.retention_needs_archive,
        )  # fmt: skip

    def configure(self, age_ms: int, max_age_ms: int, size: int, *, needs_archive: bool) -> None:
        """Set for how long messages are stored that every group has taken, for how long at most, and how many bytes of
        them; 0 means without limit. The next tick applies it.
        """
        self._age_us, self._max_age_us, self._bytes = age_ms * 1_000, max_age_ms * 1_000, size
        self._needs_archive = needs_archive
        self._put_off.clear()
        self._holders.clear()
        self._look_us = self._any_size_until_us = 0

    # --- steps --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Take the next step."""
        if self._dropping is not None:
            self._go_on(self._dropping, now)
        elif self._reading is None and self._has_limit() and now.monotonic_us >= self._look_us:
            self._look_us = now.monotonic_us + _LOOK_US
            self._look(now)

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when ``tick`` has something to do."""
        dropping = self._dropping
        if dropping is None:
            waits = self._reading is not None or not self._has_limit()
            return None if waits else max(now.monotonic_us, self._look_us)
        if self._reading is not None or (dropping.is_ready and not self._delivery.subscriptions.gone_back):
            return None
        return now.monotonic_us if dropping.carry_forward is None else dropping.carry_forward.next_deadline_us(now)

    def _has_limit(self) -> bool:
        return bool(self._age_us or self._max_age_us or self._bytes)

    def holders(self) -> list[str]:
        """Return the groups for which a segment is kept that is old enough to go."""
        return sorted(set(self._holders.values()))

    def _heads(self) -> list[tuple[int, int]]:
        """Return partition and base of each partition's first segment, where it may go."""
        store, found = self._store, list[tuple[int, int]]()
        for partition, part in enumerate(store.partitions):
            removable, sealed = part.removable(), list(part.message_log.sealed)
            if removable and removable[0] == sealed[0] and sealed[0].end <= self._intake.visible(partition):
                found.append((partition, sealed[0].base))
        return found

    def _look(self, now: Now) -> None:
        heads = self._heads()
        # A time that is ahead was read while the clock was: it is read anew.
        known = {head: self._stored_until.get(head, now.wall_us + 1) for head in heads}
        self._stored_until = {head: until_us for head, until_us in known.items() if until_us <= now.wall_us}
        self._put_off = {head: until for head, until in self._put_off.items() if head in heads}
        self._report_us = {head: at for head, at in self._report_us.items() if head in heads}
        self._holders = {head: group for head, group in self._holders.items() if head in heads}
        unknown = [head for head in heads if head not in self._stored_until]
        if unknown:
            self._read(
                _StoredUntilRead(
                    [self._store.partitions[partition].old_segment(base) for partition, base in unknown], now.wall_us
                )
            )
            return
        excess = self._size() - self._bytes if self._bytes and now.monotonic_us >= self._any_size_until_us else 0
        ordered = sorted(self._stored_until, key=self._stored_until.__getitem__)
        for head in ordered:
            age_us = now.wall_us - self._stored_until[head]
            must_go = excess > 0 or 0 < self._max_age_us <= age_us
            may_go = must_go or 0 < self._age_us <= age_us
            if must_go and self._holders.pop(head, None) is not None:
                del self._put_off[head]  # it does not wait for its groups any more
            if may_go and now.monotonic_us >= self._put_off.get(head, 0):
                partition, base = head
                old = self._store.partitions[partition].old_segment(base)
                self._read(_SegmentRead(old, needs_archive=self._needs_archive, must_go=must_go))
                return

    def _size(self) -> int:
        """Return the bytes of the message log."""
        return sum(part.log_bytes() for part in self._store.partitions)

    def _read(self, reading: _StoredUntilRead | _SegmentRead | ColdRead) -> None:
        self._reading = reading
        self._effects.append(ReadWanted(LOOK_NUMBER, reading))

    def read_done(self, done: ReadDone, now: Now) -> None:
        """Take the result of a read, or try again later when it failed."""
        reading, self._reading = self._reading, None
        if isinstance(reading, _StoredUntilRead):
            self._stored_until |= reading.found
            self._look_us = now.monotonic_us + (_AGAIN_US if done.error is not None else 0)
        elif isinstance(reading, ColdRead):
            self._delivery.finish_read(reading)
            if done.error is not None:
                self._give_up(now)
        elif reading is not None:
            if done.error is not None or not reading.may_go:
                self._put_off[reading.partition, reading.old.span.base] = now.monotonic_us + _AGAIN_US
                self._look_us = now.monotonic_us
                if done.error is None:
                    self._wait_for_receipt(reading.old, now)
            else:
                self._begin(reading)

    def _wait_for_receipt(self, old: OldSegment, now: Now) -> None:
        """Report a segment that waits long for its receipt; an archive job may run only once an hour."""
        head = old.partition, old.span.base
        if now.monotonic_us >= self._report_us.setdefault(head, now.monotonic_us + _REPORT_US):
            self._report_us[head] = now.monotonic_us + _REPORT_US
            self.unreceipted.append(UnreceiptedSegment(old.partition, *old.span, self._stored_until.get(head, 0)))

    def copied(self, done: ReadDone, now: Now) -> None:
        """Take the copies that were read, or try again later when the read failed."""
        assert self._dropping is not None
        assert self._dropping.carry_forward is not None
        self._dropping.carry_forward.read_done(done, now)

    # --- a segment that goes ------------------------------------------------------------------------------------------

    def _begin(self, found: _SegmentRead) -> None:
        """Begin to look whether all groups have taken its messages, unless it goes in any case."""
        old, had = found.old, found.had
        assert had is not None
        target = SegmentTarget(old.partition, *old.span, had)
        groups = [] if found.must_go else list(self._delivery.subscriptions.groups.values())
        advance = GroupAdvance(self._store, target, found.rows)
        self._dropping = _SegmentDrop(old, target, advance, groups, must_go=found.must_go)
        if found.must_go:
            self._choose(self._dropping)

    def _choose(self, dropping: _SegmentDrop) -> None:
        """Choose the segment: no group or consumer begins in it from now on."""
        partition, base, _, had = dropping.target
        self._store.partitions[partition].leave(base, had)
        dropping.is_chosen = True
        self._delivery.subscriptions.gone_back.clear()
        dropping.groups = [*self._delivery.subscriptions.groups.values(), *self._delivery.subscriptions.solo()]

    def _go_on(self, dropping: _SegmentDrop, now: Now) -> None:
        if self._reading is not None:
            return
        if not dropping.groups and not dropping.is_chosen:
            self._choose(dropping)
        if gone_back := self._delivery.subscriptions.gone_back:
            dropping.groups[:0] = gone_back  # the last one is being moved
            if dropping.carry_forward is not None:
                dropping.carry_forward.look_again(gone_back)
                dropping.is_ready = False
            gone_back.clear()
        if dropping.groups:
            try:
                holder = self._take_groups(dropping)
            except StorageError:
                self._give_up(now)
                return
            if holder is not None:
                self._hold(dropping, holder, now)
            return
        if dropping.carry_forward is None:
            target, store = dropping.target, self._store
            groups = list(self._delivery.subscriptions.groups.values())
            part = store.partitions[target.partition]
            spans = [*part.message_log.sealed, part.message_log.segment_at(part.message_log.end)]
            next_base = next(span.base for span in spans if span is not None and span.base >= target.end)
            dropping.carry_forward = CarryForward(
                store, self._intake, self._delivery.tracker, self._effects, dropping.old, target, next_base, groups
            )
        dropping.is_ready = dropping.is_ready or dropping.carry_forward.tick(now)

    def _take_groups(self, dropping: _SegmentDrop) -> Group | None:
        """Look at the next groups, or move them past the segment once it is chosen, until a read is needed. Return a
        group that has not taken all messages, if the segment stays because of it. Raises StorageError.
        """
        work = 0
        while dropping.groups and work < TURN_WORK:
            group = dropping.groups[-1]
            try:
                may_go, done = self._take_piece(dropping, group)
            except NotInMemory as missing:
                dropping.work = None
                if missing.read.key not in dropping.reads and len(dropping.reads) < _MOST_READS:
                    dropping.reads.add(missing.read.key)
                    self._read(missing.read)
                    return None
                with blocking_reads(self._store):
                    may_go, done = self._take_piece(dropping, group)
            work += done
            if may_go is not None:
                dropping.work = None
                if not may_go:
                    return group
                dropping.groups.pop()
                dropping.reads.clear()
        return None

    def _take_piece(self, dropping: _SegmentDrop, group: Group) -> tuple[bool | None, int]:
        """Look at a piece of the segment for a group, or move it past that. Return whether the segment may go as far as
        the group is concerned, None while that is not known, and how much work it was. Raises NotInMemory and
        StorageError.
        """
        if dropping.work is None:
            if dropping.is_chosen:  # also a group may have begun in it, or was moved back, since it was looked at
                may_skip = dropping.must_go or group.name is None
                dropping.work = dropping.advance.move(group, may_skip=may_skip)
            else:
                dropping.work = dropping.advance.look(group)
        try:
            return None, next(dropping.work)
        except StopIteration as done:
            return bool(done.value), 0

    def _hold(self, dropping: _SegmentDrop, holder: Group, now: Now) -> None:
        """Keep the segment, as a group has not taken all of its messages."""
        head = dropping.target.partition, dropping.target.base
        self._give_up(now)
        self._holders[head], self._put_off[head] = str(holder.name), now.monotonic_us + _HELD_US

    def _give_up(self, now: Now) -> None:
        """Put the segment off: it cannot go now."""
        assert self._dropping is not None
        partition, base, _, _ = self._dropping.target
        self._put_off[partition, base] = now.monotonic_us + _AGAIN_US
        if self._dropping.is_chosen:
            self._begin_within(partition)
        self._dropping = None
        self._store.stay()

    def _begin_within(self, partition: int) -> None:
        """Have the groups that began behind the segment begin in it after all, as it stays."""
        subscriptions = self._delivery.subscriptions
        for group in [*subscriptions.groups.values(), *subscriptions.solo()]:
            group.compare_anew()
            for subject_filter in group.all_filters():
                if subject_filter.begun_behind is self._store.leaving:
                    with suppress(StorageError), blocking_reads(self._store):
                        subject_filter.begin_within(self._store, partition)
                    self._delivery.arrivals.make_ready([subject_filter])

    def drop_ready(self, now: Now) -> None:
        """Drop the segment if it is ready; called just before a checkpoint, which then leaves it out."""
        dropping = self._dropping
        if dropping is None or not dropping.is_ready or self._delivery.subscriptions.gone_back:
            return
        assert dropping.carry_forward is not None
        partition, base, end, had = dropping.target
        if dropping.old.span not in self._store.partitions[partition].removable():  # a sync has failed since
            self._give_up(now)
            return
        self._dropping = None
        self._holders.pop((partition, base), None)
        self._store.drop_segment(partition, base, had)
        for group in [*self._delivery.subscriptions.groups.values(), *self._delivery.subscriptions.solo()]:
            if group.reads_leaving:
                group.leave_rows(self._store)
        messages = int((had.ends - had.starts).sum())
        until_us = self._stored_until.pop((partition, base), 0)
        copies = dropping.carry_forward
        self.dropped.append(
            Dropped(
                partition, base, end, messages, until_us, copies.carried, copies.lost, dict(dropping.advance.skipped)
            )
        )
        self._look_us = now.monotonic_us
        if 2 * copies.carried_bytes > end - base:
            self._any_size_until_us = now.monotonic_us + _NO_SIZE_LIMIT_US

    def wants_checkpoint(self) -> bool:
        """Return whether another checkpoint would remove something, though nothing has changed."""
        is_ready = self._dropping is not None and self._dropping.is_ready
        return is_ready or any(part.removals.are_pending for part in self._store.partitions)
