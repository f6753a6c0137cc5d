"""Compares before each checkpoint what became of the messages of groups with what records say, and reports differences.

A difference is a bug of the broker, or the work of damaged files. It is logged at once, and stays a problem of the
broker: for the cursors of a group until it is sought elsewhere, for what it holds until its retries are cleared by
that, and for both until it is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from qmq.broker.groups.group import Group
from qmq.broker.groups.passed import Unaccounted, wrongly_held, wrongly_passed
from qmq.storage.store import Store

log = logging.getLogger("qmq.broker")

_ADVICE: Final = (
    "keep a copy of the data directory and of the log, and report it; `qmq trace ID` says what became of a message"
)


class UnaccountedMessages(NamedTuple):
    """Messages of a group that the records do not account for, and a text about them."""

    group: str
    messages: int
    text: str


class Accounts:
    """The check of all groups of one broker."""

    def __init__(self, store: Store, groups: Mapping[str, Group]) -> None:
        self._store = store
        self._groups = groups
        self._held: dict[str, Unaccounted] = {}  # by group, as reported last

    def look(self, group: Group) -> None:
        """Check a group that has changed, just before it is packed for a checkpoint."""
        if group.dirty and (passed := wrongly_passed(self._store, group)) is not None:
            group.unaccounted += abs(passed.found - passed.counted)
            log.error("%s: %s", passed, _ADVICE)
        name, held = str(group.name), wrongly_held(group)
        if held is None:
            self._held.pop(name, None)
            return
        before = self._held.get(name)
        if before is None or before.found - before.counted != held.found - held.counted:
            log.error("%s: %s", held, _ADVICE)
        self._held[name] = held

    def problems(self) -> list[UnaccountedMessages]:
        """Return the groups whose messages do not add up, as far as checkpoints have looked."""
        found = list[UnaccountedMessages]()
        for name, group in self._groups.items():
            held = self._held.get(name)
            messages = group.unaccounted + (0 if held is None else abs(held.found - held.counted))
            if messages:
                found.append(UnaccountedMessages(name, messages, _text(group, held)))
        return found


def _text(group: Group, held: Unaccounted | None) -> str:
    texts = [] if held is None else [str(held)]
    if group.unaccounted:
        texts.append(
            f"the cursors of group {group.name} have passed {group.unaccounted:,} messages more or fewer than records "
            "count"
        )
    return f"{' and '.join(texts)}: {_ADVICE}"
