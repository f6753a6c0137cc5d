"""Messages that are in two hands after a start, as the record that took them from the first one is lost."""

from __future__ import annotations

from collections.abc import Iterator

from qmq.broker.groups.group import Group
from qmq.broker.groups.in_flight import HeldPull, MessageRange
from qmq.broker.groups.member import Member
from qmq.broker.groups.message_ranges import stretches_of
from qmq.intervals import Intervals
from qmq.storage.store import Store


def doubled(store: Store, group: Group) -> Iterator[tuple[Member, int]]:
    """Consumers, and pull sequences of theirs, of messages that were handed out to another one since, or wait to be
    handed out again. May wait.
    """
    assert group.ledger is not None
    pulls = [(member, pull) for member in group.ledger.members.values() for pull in member.held.pulls]
    pulls.sort(key=lambda one: one[1].taken_us, reverse=True)
    taken: dict[int, Intervals] = {}
    for subject, start, end in stretches_of(store, group, group.ledger.retries.all()) if pulls else ():
        taken.setdefault(subject, Intervals()).add(start, end)
    for member, pull in pulls:
        for sequence, messages in list(_held(member, pull)):
            if not _is_taken(store, group, taken, messages):
                continue
            for at in range(messages.total):
                if _is_taken(store, group, taken, messages.part(at, at + 1)):
                    yield member, sequence + at
        for _, messages in _held(member, pull):
            for subject, start, end in stretches_of(store, group, [messages]):
                taken.setdefault(subject, Intervals()).add(start, end)


def _held(member: Member, pull: HeldPull) -> Iterator[tuple[int, MessageRange]]:
    """What of a pull is not handled, with the pull sequence at which it begins."""
    for start, end in member.held.unhandled(pull.first):
        for held in pull.between(start, min(end, pull.first + pull.total)):
            yield start, held.messages
            start += held.messages.total


def _is_taken(store: Store, group: Group, taken: dict[int, Intervals], messages: MessageRange) -> bool:
    return any(
        subject in taken and taken[subject].overlaps(start, end)
        for subject, start, end in stretches_of(store, group, [messages])
    )
