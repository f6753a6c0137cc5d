"""The safeguards of retention: what goes, what stays, and what is carried forward."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_LEAVING: Final = ("tests/broker/retention/test_leaving.py",)
_RETENTION: Final = ("tests/broker/retention/test_retention.py",)
_FORWARDING: Final = ("tests/broker/retention/test_carry_forward.py",)
_IDLE: Final = ("tests/broker/retention/test_idle_subjects.py",)
_TURNS: Final = ("tests/broker/test_retention_turns.py",)

OF_RETENTION: Final = (
    Mutant(
        "begin new subjects above all sequences that were forgotten",
        "SubjectTable.new_begin",
        instead("max(self.sequence_base, self.forgotten_end)", "self.sequence_base"),
        _IDLE,
    ),
    Mutant(
        "keep a subject that is followed by its name",
        "IdleSubjectsForgetting._forget",
        always("name not in followed"),
        _IDLE,
    ),
    Mutant(
        "keep a subject of which delayed messages wait",
        "IdleSubjectsForgetting._forget",
        always("name not in self._delayed"),
        _IDLE,
    ),
    Mutant(
        "keep a subject that a group has copies of",
        "IdleSubjectsForgetting._forget",
        always("not subjects.has_copies(name)"),
        _IDLE,
    ),
    Mutant(
        "remember no number of a subject that is forgotten",
        "IdleSubjectsForgetting._forget",
        skip("self._intake.forget_numbers(found)"),
        _IDLE,
    ),
    Mutant(
        "name a subject that came back by its number once two checkpoints have it",
        "CheckpointTaker._claim_numbers",
        always("before[1] == self._last_claimed[1]"),
        _IDLE,
    ),
    Mutant(
        "forget no subject while bytes are bad",
        "Store.idle_subjects",
        never("any((part.given_up or part.has_holes for part in self.partitions))"),
        _IDLE,
    ),
    Mutant(
        "let a group have what it is not moved behind yet",
        "Group.cursor",
        instead("first is None or subject_filter.begun_behind is not store.leaving", "first is None"),
        _LEAVING,
    ),
    Mutant(
        "have a group that begins behind a leaving segment begin in it should it stay",
        "Retention._begin_within",
        skip("subject_filter.begin_within(self._store, partition)"),
        _LEAVING,
    ),
    Mutant(
        "look for order keys in a segment that stays",
        "SubjectFilter.begin_within",
        skip("self.group.scan = None"),
        _LEAVING,
    ),
    Mutant(
        "serve the pulls of a group whose segment stays",
        "Retention._begin_within",
        skip("self._delivery.arrivals.make_ready([subject_filter])"),
        _LEAVING,
    ),
    Mutant(
        "keep over a start where a group would begin if a leaving segment stayed",
        "group:_filter_positions",
        never("subject_filter.begun_behind is not None and subject_filter.begun_behind is store.leaving"),
        _LEAVING,
    ),
    Mutant(
        "keep a leaving segment for a group that follows its messages again",
        "Subscriptions._follow",
        skip("self.gone_back.append(group)"),
        _LEAVING,
    ),
    Mutant(
        "carry forward what a group has given out of a segment that was ready to go",
        "Retention._go_on",
        skip("dropping.carry_forward.look_again(gone_back)"),
        _LEAVING,
    ),
    Mutant(
        "wait with a segment that is ready to go for a group that follows its messages again",
        "Retention.drop_ready",
        instead(
            "dropping is None or not dropping.is_ready or self._delivery.subscriptions.gone_back",
            "dropping is None or not dropping.is_ready",
        ),
        _LEAVING,
    ),
    Mutant(
        "let nothing go that no archive has",
        "_SegmentRead.step",
        always("not self._needs_archive or self.old.is_archived()"),
        _RETENTION,
    ),
    Mutant(
        "keep a segment that a group has not taken all of",
        "Retention._take_piece",
        instead("dropping.must_go or group.name is None", "True"),
        _RETENTION,
    ),
    Mutant(
        "take a receipt only for all of a segment",
        "OldSegment.is_archived",
        always("receipt.covers(self._owner, *self.span)"),
        _RETENTION,
    ),
    Mutant(
        "count what a group that is moved misses",
        "GroupAdvance._apply",
        skip("group.skipped += skipped"),
        _RETENTION,
    ),
    Mutant(
        "record that a group was moved",
        "GroupAdvance._apply",
        skip("self._store.groups.stage(RecordKind.MOVED, msgpack.packb(fields))"),
        _RETENTION,
    ),
    Mutant(
        "move nobody back who begins behind a segment",
        "GroupAdvance._behind",
        always("number is not None and self._next(subject_filter, number) < self._end_of(number)"),
        _RETENTION,
    ),
    Mutant(
        "wait until copies are on disk",
        "CarryForward._finish",
        never("any((self._intake.visible(one.partition) <= one.position for one in stored))"),
        _FORWARDING,
    ),
    Mutant(
        "leave what has changed while it was copied",
        "CarryForward._record",
        never("not self._references.is_there(found)"),
        _FORWARDING,
    ),
    Mutant(
        "look at what has come while a group was looked at",
        "GroupReferences.pieces",
        instead("self._in_memory()", "iter(())"),
        _FORWARDING,
    ),
    Mutant(
        "carry nothing round and round",
        "Retention.drop_ready",
        never("2 * copies.carried_bytes > end - base"),
        _FORWARDING,
    ),
    Mutant(
        "count no place from what is gone",
        "_by_position",
        never("part.message_log.segment_at(messages.first) is None"),
        _RETENTION,
    ),
    Mutant(
        "leave copies that nobody names",
        "rewind:_stored",
        always("not is_copy(header.producer_id)"),
        ("tests/broker/test_rotten_records.py",),
    ),
    Mutant(
        "give retries that wait in memory no second place",
        "Retries.look",
        instead("{retry.number for retry in self.waiting()}", "set()"),
        ("tests/sim/test_retaining.py",),
    ),
    Mutant(
        "give no sequence again that was dropped",
        "_Opening._replay_sequences",
        instead("raised + identity.dropped_end if claims is None else raised", "raised"),
        ("tests/storage/message_log/test_drop.py",),
    ),
    Mutant(
        "move groups past a segment without waiting for the disk",
        "Retention._take_groups",
        never("missing.read.key not in dropping.reads and len(dropping.reads) < _MOST_READS"),
        _RETENTION,
    ),
    Mutant(
        "say that the sequences of what has gone are not known",
        "_sent_long_ago",
        instead(
            "NO_SEQUENCE if header.runs == 1 else np.full(header.runs, NO_SEQUENCE, np.uint64)",
            "0 if header.runs == 1 else np.zeros(header.runs, np.uint64)",
        ),
        _RETENTION,
    ),
    Mutant(
        "leave the rows of a subject to the filter of that subject",
        "GroupAdvance._missed",
        skip('starts = np.where(np.isin(rows["subject"], numbers), ends, starts)'),
        ("tests/broker/retention/test_advance_groups.py",),
    ),
    Mutant(
        "hold a segment that a group would miss messages of",
        "GroupAdvance.move",
        never("skipped and not may_skip"),
        _RETENTION,
    ),
    Mutant(
        "move so many groups in a turn",
        "Retention._take_groups",
        skip("work += done"),
        _TURNS,
    ),
    Mutant(
        "carry so much in a turn",
        "CopyRead.step",
        never("self._size >= _MOST_BYTES"),
        _TURNS,
    ),
    Mutant(
        "look at what consumers hold once, and not for each part of it",
        "GroupReferences.pieces",
        instead("list(islice(memory, MOST_FOUND))", "[]"),
        _TURNS,
    ),
)
