"""Names whose messages nobody takes: most often they are mistyped, or a consumer is not deployed.

- A prefix or subject that a group follows, which no connected consumer has taken for an hour, while messages wait.
- A subject whose messages no group follows and no consumer without a group has read for an hour.
- A subject ``shop`` that no group follows, where a group follows ``shop.``: that prefix does not take the subject.

The time without takers counts from the broker's start at the earliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from qmq.broker.groups.group import Group, SubjectFilter, Subscription
from qmq.broker.groups.lag import has_ready
from qmq.broker.groups.name_order import NameOrder
from qmq.errors import StorageError
from qmq.format.private import is_private
from qmq.names import takes
from qmq.storage.store import Store

#: A name that nobody takes for so long is reported.
UNTAKEN_US: Final = 3_600_000_000
#: The time between two looks.
LOOK_US: Final = 60_000_000
#: The most names that a report gives, and the most prefixes of groups that one look counts messages for.
NAMED: Final = 3
_MOST_COUNTED: Final = 100
#: With more different prefixes, subjects are not looked at.
_MOST_PREFIXES: Final = 1_000


class UntakenName(NamedTuple):
    """A finding: ``code`` is "no_consumer", "not_taken", "not_followed" or "beside_prefix", ``text`` the advice."""

    code: str
    text: str


class UntakenNames:
    """Looks for names whose messages nobody takes."""

    def __init__(
        self, store: Store, groups: Mapping[str, Group], subscriptions: Callable[[], Iterable[Subscription]],
        order: NameOrder,
    ) -> None:  # fmt: skip
        """*groups* are by name; *subscriptions* returns those of all connected consumers."""
        self._store = store
        self._groups = groups
        self._subscriptions = subscriptions
        self._order = order
        self._prefixes = dict[tuple[str, str], int]()  # since when nobody takes the prefix of a group
        self._subjects = np.zeros(0, np.int64)  # since when nobody takes a subject, by number; 0: somebody does
        self._known = set[tuple[str, str]]()
        #: The findings of the last look.
        self.found: tuple[UntakenName, ...] = ()

    def look(self, now_us: int) -> list[UntakenName]:
        """Look at all names; return the findings about names that the last look did not report. *now_us*: monotonic."""
        named = {
            (code, name): text
            for code, name, text in (*self._untaken_prefixes(now_us), *self._untaken_subjects(now_us))
        }
        new, self._known = named.keys() - self._known, set(named)
        self.found = _reported(named, named)
        return list(_reported(named, new))

    def _untaken_prefixes(self, now_us: int) -> Iterable[tuple[str, str, str]]:
        asked = dict[str, set[str]]()
        for one in self._subscriptions():
            asked.setdefault(one.group.name or "", set()).update(one.asked)
        before, self._prefixes = self._prefixes, {}
        counted = 0
        for name, group in self._groups.items():
            for prefix in group.outermost():
                if takes(mine := asked.get(name, set()), prefix) or any(takes({prefix}, other) for other in mine):
                    continue
                since_us = self._prefixes[name, prefix] = before.get((name, prefix), now_us)
                if now_us - since_us < UNTAKEN_US or counted == _MOST_COUNTED:
                    continue
                counted += 1
                if has_ready(self._store, group, group.filters[prefix], self._order):
                    code = "not_taken" if mine else "no_consumer"
                    yield code, f"{name} {prefix}", _not_taken(name, prefix, bool(mine))

    def _untaken_subjects(self, now_us: int) -> Iterable[tuple[str, str, str]]:
        filters = dict[str, SubjectFilter]()
        for group in self._groups.values():
            filters |= group.filters
        filters |= {one.prefix: one for subscription in self._subscriptions() for one in subscription.filters}
        if not self._groups or "" in filters or len(filters) > _MOST_PREFIXES:
            self._subjects = np.zeros(0, np.int64)
            return
        subjects = self._store.subjects
        count = subjects.count
        untaken = subjects.ends[:count] > subjects.firsts[:count]
        for base in filters.values():
            base.find_lanes(self._store)
            for one in base.with_lanes():
                if one.exact:
                    untaken[subjects.numbers_of(one.prefix)] = False
                elif (matches := one.matches(self._store)) is not None:
                    untaken &= ~matches[:count]
        since_us = np.zeros(count, np.int64)
        since_us[: len(self._subjects)] = self._subjects
        since_us[~untaken] = 0
        since_us[untaken & (since_us == 0)] = now_us
        self._subjects = since_us
        for number in np.flatnonzero(untaken).tolist():
            try:
                name = subjects.name(number)
            except StorageError:
                continue
            if is_private(name):
                continue
            if f"{name}." in filters:
                yield "beside_prefix", name, name
            elif now_us - int(since_us[number]) >= UNTAKEN_US:
                yield "not_followed", name, name


def _not_taken(group: str, prefix: str, has_consumers: bool) -> str:
    who = f"none of the consumers of group {group} takes" if has_consumers else f"group {group} has no consumer for"
    return (
        f"{who} {prefix or 'everything'!r}, which the group follows, and has not for an hour or more, while messages "
        f"wait there: start a consumer that subscribes to it, or let the group follow other names with `qmq groups set "
        f"{group} follows=...`"
    )


def _reported(named: Mapping[tuple[str, str], str], chosen: Iterable[tuple[str, str]]) -> tuple[UntakenName, ...]:
    """Return the findings about the chosen names: one for each prefix of a group, one for all subjects of a kind."""
    several, found = dict[str, list[str]](), list[UntakenName]()
    for code, name in sorted(chosen):
        if code in ("not_taken", "no_consumer"):
            found.append(UntakenName(code, named[code, name]))
        else:
            several.setdefault(code, []).append(name)
    for code, names in several.items():
        some = ", ".join(map(repr, names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        is_one = len(names) == 1
        if code == "beside_prefix":
            text = (
                f"no group follows the {'subject' if is_one else 'subjects'} {some}, though one follows "
                f"{names[0] + '.'!r}: a prefix with a dot takes only what comes behind the dot; send to a subject "
                "below it, or subscribe to both names"
            )
        else:
            text = (
                f"no group follows the {'subject' if is_one else 'subjects'} {some}, and messages have lain there for "
                "an hour or more: look for a mistyped name; if programs read them without a group, all is well"
            )
        found.append(UntakenName(code, text))
    return tuple(found)
