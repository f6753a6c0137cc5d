"""What the broker keeps of the group "g", in the terms of the model (``tests.broker.model``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from qmq.broker.error_log.error_log import unpacked, without
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import Some, parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.format.layout import RETRY_DTYPE
from tests.broker.harness import Driven
from tests.broker.model import GroupContent, Letter, Message, Place, Waiting, undated


def content(driven: Driven, row: dict[str, Any], letters: list[Letter]) -> GroupContent:
    """All of it. *row* is what ``groups`` says of the group, and it must add up; *letters* are its dead ones."""
    ledger = ledger_of(driven)
    places, waiting = places_of(driven, ledger), waiting_of(driven, ledger)
    assert row["in_flight"] == sum(len(place.in_flight) for place in places.values())
    assert row["in_retry"] == sum(len(one.messages) for one in waiting)
    assert row["dead"] == len(letters)
    now_us = driven.now.wall_us
    return GroupContent(row["ready"], places, sorted(undated(one, now_us) for one in waiting), sorted(letters))


def ledger_of(driven: Driven) -> Ledger:
    """The group's ledger."""
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    return ledger


def places_of(driven: Driven, ledger: Ledger) -> dict[str, Place]:
    """Its consumers, and what each holds."""
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
    """What is to be handed out again, in memory or on disk."""
    retries = ledger.retries
    later = unpacked(np.frombuffer(retries._schedule.claim().kept, RETRY_DTYPE))
    found = []
    for retry in [*retries._due, *retries._quarantined, *later]:
        left = [retry.messages]
        for taken in retries._taken.get(retry.number, ()):
            left = [part for messages in left for part in without(messages, taken)]
        rest = retry.due_us, retry.attempt, retry.session_expiries, retry.quarantined
        found += [Waiting(_named(driven, messages), *rest) for messages in left]
    return found


def letter_of(row: dict[str, Any]) -> Letter:
    """A row of ``dead_letters``."""
    return Letter((row["subject"], row["sequence"]), row["attempts"], row["session_expiries"], row["reason"])


def _named(driven: Driven, messages: MessageRange) -> tuple[Message, ...]:
    store, group = driven.store, driven.broker.groups["g"]
    found = [part for at in range(messages.total) for part in parts_of(store, group, messages.part(at, at + 1))]
    return tuple(
        (store.subject_name(part.entry[3]), part.entry[0] + part.start) for part in found if isinstance(part, Some)
    )
