"""Seek and delete groups, and replay the records of the pull log since the last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from qmq.broker.delivery.at_most_once import may_lack_reserves
from qmq.broker.delivery.pull import Delivery
from qmq.broker.delivery.wakeups import Arrivals
from qmq.broker.groups.group import Group, GroupStart, StartRule, SubjectFilter
from qmq.broker.journal.record_bytes import unpack
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.retention import advance_groups as moving
from qmq.broker.startup.rewind import Rewind, hand_out_unrecorded
from qmq.errors import UnknownGroup
from qmq.storage.store import Store

log = logging.getLogger("qmq.broker")

#: Behind all positions.
_END: Final = 1 << 64
#: More messages than a consumer pulls within the time that can be lost.
_UNSEEN: Final = 1 << 26


class GroupReplay:
    """Changes of whole groups, now or by replayed records."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery
        self._tracker = delivery.tracker
        self._subscriptions = delivery.subscriptions
        self._arrivals: Arrivals = delivery.arrivals

    def seek(self, group: Group, begin: GroupStart, now_us: int, *, clear_retries: bool) -> None:
        """Move a group's cursors; messages in flight are dropped, and late dispositions of them are refused."""
        assert group.ledger is not None
        fields = [group.ledger.number, tuple(begin.start), begin.positions, clear_retries, now_us]
        self._store.groups.stage(RecordKind.SEEK, msgpack.packb(fields))
        self._seek(group, begin, clear_retries)

    def _seek(self, group: Group, begin: GroupStart, clear_retries: bool) -> None:
        assert group.ledger is not None
        group.seek(begin)
        self._tracker.drop(group.ledger, clear_retries=clear_retries)
        self._arrivals.make_ready(group.filters.values())

    def delete(self, group: Group) -> None:
        """Delete a group, and refuse its waiting pulls."""
        assert group.ledger is not None
        self._store.groups.stage(RecordKind.DELETE, msgpack.packb([group.ledger.number]))
        self._delete(group)

    def _delete(self, group: Group) -> None:
        assert group.ledger is not None
        for subscription in self._subscriptions.of(group):
            self._delivery.refuse_pulls(subscription, UnknownGroup(f"group {group.name!r} was deleted"))
        self._tracker.forget(group.ledger)
        self._subscriptions.forget(group)

    def replay(self) -> None:
        """Apply the records of the pull log since the checkpoint; rewind groups to its first bad bytes."""
        files, groups = self._store.groups, self._subscriptions.groups
        rewind, records = Rewind(files.holes), files.take_records()
        for record in records:
            rewind.pass_holes(record.position, groups.values())
            kind, (number, *fields) = unpack(record.kind, record.payload)
            if not record.counts and kind != RecordKind.RESERVE:
                continue  # a RESERVE counts always: its messages must not be handed out again
            if kind == RecordKind.GROUP:
                self._replay_group(number, *fields)
                continue
            known = self._subscriptions.by_ledger.get(number)
            if known is None:
                continue
            if kind == RecordKind.REWOUND:
                rewind.finish(known, *fields)
            elif rewind.counts(known, kind):
                self._replay_record(known, kind, fields)
        rewind.pass_holes(_END, groups.values())
        for group in groups.values():
            if group in rewind.groups:
                assert group.ledger is not None
                self._store.groups.stage(RecordKind.REWOUND, msgpack.packb([group.ledger.number, rewind.lost_bytes]))
        if files.torn or files.holes:
            hand_out_unrecorded(self._store, groups.values(), self._tracker.now.wall_us)
        if files.generations_since:
            for ledger in self._tracker.ledgers.values():
                ledger.skip_sequences(files.generations_since * _UNSEEN)
        if files.generations_since or self._store.recovery.may_lack_messages:
            self._compare_anew()
        lost = files.is_rotten and may_lack_reserves(files.holes, files.torn, records)
        self._delivery.at_most_once.resume(groups.values(), lost=lost)
        self._tracker.restored()

    def _compare_anew(self) -> None:
        """Leave the cursors of groups uncompared with what records count up to the next checkpoint."""
        groups = self._subscriptions.groups.values()
        for group in groups:
            group.compare_anew()
        if groups:
            log.info(
                "messages or records may be gone, so what the cursors of groups pass is compared with their records "
                "from the next checkpoint on"
            )

    def _replay_record(self, group: Group, kind: int, fields: list[Any]) -> None:
        if kind == RecordKind.SEEK:
            start, positions, clear_retries, _ = fields
            self._seek(group, self._begin(start, positions), clear_retries)
            self._begin_renumbered(group, StartRule(*start), list(group.all_filters()))
            self._begin_beside_leaving(group)
        elif kind == RecordKind.DELETE:
            self._delete(group)
        elif kind == RecordKind.RESERVE:
            self._delivery.at_most_once.replay(group, *fields)
        elif kind == RecordKind.UNFOLLOW:
            for subject_filter in group.unfollow(*fields):
                self._arrivals.unwatch(subject_filter)
        elif kind == RecordKind.MOVED:
            moving.replay(self._store, group, *fields)
        else:
            self._tracker.replay(group, kind, fields)

    def _replay_group(
        self, number: int, name: str, mode: str, prefix: str, ordinal: int, start: list[Any], positions: list[int],
        settings: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Apply the record that a group was created, maybe with *settings*, or began to follow a prefix."""
        group = self._subscriptions.groups.get(name)
        if group is not None and group.ledger is not None and group.ledger.number != number:
            self._delete(group)  # the record of its deletion is lost
            group = None
        if group is None:
            group = self._subscriptions.add(name, mode)
            ledger = self._tracker.recreate(group, number)
            self._subscriptions.by_ledger[number] = group
            if settings:
                ledger.begin_with(settings)
        if prefix not in group.filters:
            subject_filter = group.follow(prefix, self._begin(start, positions), ordinal)
            self._arrivals.watch(subject_filter)
            self._begin_renumbered(group, StartRule(*start), [subject_filter])
            self._begin_beside_leaving(group)

    def _begin(self, start: list[Any], positions: list[int]) -> GroupStart:
        row_cursors = [
            self._store.partitions[partition].consumer_log.row_at_position(position)
            for partition, position in enumerate(positions)
        ]
        rule, subjects = StartRule(*start), self._store.subjects
        if rule.kind == "time":  # subjects that no checkpoint has may have other numbers now: look all of them up
            rule = rule._replace(subjects=subjects.count)
        elif rule.until_us:  # their cursors are set
            rule = rule._replace(subjects=min(rule.subjects, subjects.checkpointed))
        return GroupStart(rule, row_cursors, positions)

    def _begin_beside_leaving(self, group: Group) -> None:
        """Compare no cursors of a group that may have begun behind a segment that was leaving: it may be there still,
        and no record says so.
        """
        if any(part.message_log.sealed for part in self._store.partitions):
            group.compare_anew()

    def _begin_renumbered(self, group: Group, rule: StartRule, filters: list[SubjectFilter]) -> None:
        """Set the cursors of a start at a sequence in subjects that no checkpoint has and that were there then."""
        store, subjects = self._store, self._store.subjects
        if not rule.until_us:
            return
        for subject_filter in filters:
            for number in subject_filter.numbers_between(store, subjects.checkpointed, subjects.count).tolist():
                first = next(iter(store.subject_rows(number, 0, 1)), None)
                was_there = first is not None and first[1]["stored_at_us"][0] <= rule.until_us
                if was_there and not group.cursors.get(number):
                    group.cursors.set(number, rule.value)
                    subject_filter.begun[number] = rule.value
                # Of one that had its number, and its first message later, nobody knows where the group began.
                group.compare_anew()
