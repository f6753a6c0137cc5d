"""The state of the broker's group "g", in the terms of the model (``tests.broker.model``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

from qmq.broker.error_log.error_log import unpacked, without
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import RunPart, parts_of
from qmq.broker.journal.record_bytes import unpack
from qmq.broker.journal.record_types import InFlightRange, MessageRange, RecordKind, unflat
from qmq.format.layout import PULL_FILE_HEADER_SIZE, RETRY_DTYPE
from qmq.storage.disk.disk import read_around
from qmq.storage.error_log.items import unpack_items
from qmq.storage.pull_log.records import PULL_LOG_NAME, PullRecord, list_pull_files, pull_file_path, record_at
from tests.broker.harness import Driven
from tests.broker.model import Given, GroupContent, Handed, Letter, Place, Waiting, shown
from tests.broker.model_log import Log, Message

#: As much of the pull log as is read at once.
WINDOW_BYTES: Final = 1 << 18


class WrittenRecords:
    """Reads from disk the records that a broker writes to its pull log, from now on."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven
        self._directory = driven.directory / PULL_LOG_NAME
        self._position = list_pull_files(driven.disk, self._directory)[-1]
        self.take()

    def take(self) -> list[PullRecord]:
        """Return the records that were written since the last call."""
        found, disk = list[PullRecord](), self._driven.disk
        bases = list_pull_files(disk, self._directory)
        for base, following in zip_longest(bases, bases[1:]):
            if following is not None and following <= self._position:
                continue
            start = self._position = max(self._position, base + PULL_FILE_HEADER_SIZE)
            fd = disk.open(pull_file_path(self._directory, base), os.O_RDONLY)
            data, _ = read_around(disk, fd, WINDOW_BYTES, start - base)
            disk.close(fd)
            while record := record_at(memoryview(data), self._position - start, start, self._driven.store.secret):
                found.append(record)
                self._position = record.end
            assert self._position - start < WINDOW_BYTES // 2, "records of one call may be longer than what is read"
        return found


def content(driven: Driven, row: dict[str, Any], letters: list[Letter]) -> GroupContent:
    """Return the whole state. *row* is the row of ``groups``, which must add up; *letters* are the dead letters."""
    ledger = ledger_of(driven)
    places, waiting = places_of(driven, ledger), waiting_of(driven, ledger)
    assert row["in_flight"] == sum(len(place.in_flight) for place in places.values())
    assert row["in_retry"] == sum(len(one.messages) for one in waiting)
    assert row["dead"] == len(letters)
    return GroupContent(row["ready"], places, shown(waiting, driven.now.wall_us), sorted(letters))


def ledger_of(driven: Driven) -> Ledger:
    """Return the group's ledger."""
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    return ledger


def places_of(driven: Driven, ledger: Ledger) -> dict[str, Place]:
    """Return its consumers with their messages in flight."""
    found = {}
    for member in ledger.members.values():
        in_flight = {}
        for start, end in member.in_flight.unhandled():
            for part in member.in_flight.between(start, end):
                for message in _named(driven, part.messages):
                    in_flight[start] = message, part.attempt, part.session_expiries
                    start += 1
        numbers = member.epoch, member.in_flight.ack_floor, member.in_flight.next_sequence
        found[member.name] = Place(not member.closed, *numbers, member.quarantined, in_flight)
    return found


def waiting_of(driven: Driven, ledger: Ledger) -> list[Waiting]:
    """Return its retries, in memory or on disk."""
    retries = ledger.retries
    later = unpacked(unpack_items(retries._schedule.claim().kept, RETRY_DTYPE))
    found = []
    for retry in [*retries._due, *retries._quarantined, *later]:
        left = [retry.messages]
        for taken in retries._taken.get(retry.number, ()):
            left = [part for messages in left for part in without(messages, taken)]
        rest = retry.due_us, retry.attempt, retry.session_expiries, retry.quarantined
        found += [Waiting(_named(driven, messages), *rest) for messages in left]
    return found


def handed_of(driven: Driven, records: Iterable[PullRecord]) -> list[Handed]:
    """Return what records say that pulls have handed out, each with its number among the ranges of its record."""
    found = []
    for record in records:
        if record.kind not in (RecordKind.PULL, RecordKind.AGAIN, RecordKind.PASSED):
            continue
        _, (_, _, first, _, _, *fields) = unpack(record.kind, record.payload)
        several, passed = list[InFlightRange](), list[Message]()
        if record.kind == RecordKind.AGAIN:
            several = [InFlightRange.of(one[1:]) for one in fields[1]]
        else:
            ranges = unflat(fields[0 if record.kind == RecordKind.PULL else 1])
            several = [InFlightRange(messages, 1, 0) for messages in ranges]
        given = list[Given]()
        for part, (messages, attempt, session_expiries) in enumerate(several):
            for message in _named(driven, messages):
                given.append(Given(first + len(given), message, attempt, session_expiries, part))
        if record.kind == RecordKind.PASSED:
            mine = {one.message for one in given}
            passed = [one for messages in unflat(fields[0]) for one in _named(driven, messages) if one not in mine]
            assert (len(passed), 0) == (fields[2], fields[3]), "it counts what it filtered, and skips nothing"
        found.append(Handed(tuple(given), tuple(passed), record.kind == RecordKind.AGAIN))
    return found


def letter_of(row: dict[str, Any], log: Log) -> Letter:
    """Return a row of ``dead_letters`` as a letter."""
    message = log.named[row["id"]]
    assert (message.subject, message.sequence) == (row["subject"], row["sequence"])
    return Letter(message, row["attempts"], row["session_expiries"], row["reason"])


def _named(driven: Driven, messages: MessageRange) -> tuple[Message, ...]:
    """Return those messages of a range that still exist."""
    found = _messages_of(driven, messages)
    if len(found) != messages.total:  # rows are missing, so the others are not counted right
        found = [one for at in range(messages.total) for one in _messages_of(driven, messages.part(at, at + 1))]
    return tuple(found)


def _messages_of(driven: Driven, messages: MessageRange) -> list[Message]:
    subjects, found = driven.store.subjects, list[Message]()
    for part in parts_of(driven.store, driven.broker.groups["g"], messages):
        for entry in [part.entry] if isinstance(part, RunPart) else part.rows.tolist():
            start, stop = (part.start, part.stop) if isinstance(part, RunPart) else (0, entry[4])
            found += [Message(subjects.name(entry[3]), entry[6], entry[0] + at) for at in range(start, stop)]
    return found
