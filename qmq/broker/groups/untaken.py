"""Names whose messages nobody takes: most often they are mistyped, or a consumer is not deployed.

- A prefix or subject that a group follows, which no connected consumer has taken for an hour, while messages wait.
- A subject whose messages no group follows and no consumer without a group has read for an hour.
- A subject ``shop`` that no group follows, where a group follows ``shop.``: that prefix does not take the subject.

The time without takers counts from the broker's start at the earliest.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from qmq.broker.groups.group import Group, Subscription, is_exact
from qmq.broker.groups.lag import has_ready
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.ports.work import NUMBERS_A_UNIT, Work
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
#: Names and consumers of one piece, and the work of these; the work of a group.
_NAMES: Final = 1_024
_NAMES_WORK: Final = 1_500
_GROUP_WORK: Final = 4


class UntakenName(NamedTuple):
    """A finding: ``code`` is "no_consumer", "not_taken", "not_followed" or "beside_prefix", ``text`` the advice."""

    code: str
    text: str


class UntakenNames:
    """Looks for names whose messages nobody takes."""

    def __init__(
        self, store: Store, groups: Mapping[str, Group], subscriptions: Callable[[], Iterable[Subscription]],
        order: NameOrder, times: TimeStarts,
    ) -> None:  # fmt: skip
        """*groups* are by name; *subscriptions* returns those of all connected consumers."""
        self._store = store
        self._groups = groups
        self._subscriptions = subscriptions
        self._order = order
        self._times = times
        self._prefixes = dict[tuple[str, str], int]()  # since when nobody takes the prefix of a group
        self._subjects = np.zeros(0, np.int64)  # since when nobody takes a subject, by number; 0: somebody does
        self._known = set[tuple[str, str]]()
        #: The findings of the last look.
        self.found: tuple[UntakenName, ...] = ()

    def look(self, now_us: int) -> Work[list[UntakenName]]:
        """Look at all names; return the findings about names that the last look did not report. *now_us*: monotonic."""
        every, new = _Findings(), _Findings()
        for walk in (self._untaken_prefixes(now_us, every), self._untaken_subjects(now_us, every)):
            yield from walk
        for looked, (code, name) in enumerate(every.known, 1):
            if (code, name) not in self._known:
                new.add(code, name, every.texts.get((code, name), ""))
            if looked % _NAMES == 0:
                yield _NAMES_WORK
        self._known = every.known
        self.found = every.told()
        return list(new.told())

    def _asked(self) -> Work[dict[str, set[str]]]:
        """Return what connected consumers ask for, by group; "" for those without a group."""
        asked = dict[str, set[str]]()
        for looked, one in enumerate(list(self._subscriptions()), 1):
            asked.setdefault(one.group.name or "", set()).update(one.asked)
            if looked % _NAMES == 0:
                yield _NAMES_WORK
        return asked

    def _untaken_prefixes(self, now_us: int, found: _Findings) -> Work[None]:
        asked = yield from self._asked()
        yield from self._order.caught_up()
        before, self._prefixes = self._prefixes, {}
        counted = 0
        for name, group in list(self._groups.items()):
            mine = asked.get(name, set())
            yield _GROUP_WORK + (len(group.filters) + len(mine)) // 2
            for prefix in group.outermost():
                if takes(mine, prefix) or any(takes({prefix}, other) for other in mine):
                    continue
                since_us = self._prefixes[name, prefix] = before.get((name, prefix), now_us)
                if now_us - since_us < UNTAKEN_US or counted == _MOST_COUNTED:
                    continue
                counted += 1
                subject_filter = group.filters.get(prefix)
                if subject_filter is None:
                    continue  # it follows that no more
                if (yield from has_ready(self._store, group, subject_filter, self._order, self._times)):
                    code = "not_taken" if mine else "no_consumer"
                    found.add(code, f"{name} {prefix}", _not_taken(name, prefix, bool(mine)))

    def _followed(self) -> Work[set[str] | None]:
        """Return what anybody follows; None where subjects are not looked at."""
        prefixes = set[str]()
        for group in list(self._groups.values()):
            prefixes.update(group.filters)
            if "" in prefixes or len(prefixes) > _MOST_PREFIXES:
                return None
            yield 1 + len(group.filters) // NUMBERS_A_UNIT
        for looked, one in enumerate(list(self._subscriptions()), 1):
            prefixes.update(subject_filter.prefix for subject_filter in one.filters)
            if looked % _NAMES == 0:
                yield _NAMES_WORK
        return prefixes if prefixes and "" not in prefixes and len(prefixes) <= _MOST_PREFIXES else None

    def _untaken_subjects(self, now_us: int, found: _Findings) -> Work[None]:
        prefixes = yield from self._followed()
        if not self._groups or prefixes is None:
            self._subjects = np.zeros(0, np.int64)
            return
        subjects = self._store.subjects
        count = subjects.count
        untaken = subjects.ends[:count] > subjects.firsts[:count]
        yield 1 + count // (16 * NUMBERS_A_UNIT)
        for prefix in prefixes:
            if is_exact(prefix):
                numbers = np.array(subjects.numbers_of(prefix), np.int64)
                untaken[numbers[numbers < count]] = False
                yield 2 + len(numbers) // NUMBERS_A_UNIT
                continue
            for numbers in self._order.pieces(prefix):
                untaken[numbers[numbers < count]] = False
                yield 2 + len(numbers) // NUMBERS_A_UNIT
        since_us = np.zeros(count, np.int64)
        since_us[: len(self._subjects)] = self._subjects
        since_us[~untaken] = 0
        since_us[untaken & (since_us == 0)] = now_us
        self._subjects = since_us
        yield 1 + count // (4 * NUMBERS_A_UNIT)
        for start in range(0, count, _NAMES):
            numbers = start + np.flatnonzero(untaken[start : start + _NAMES])
            for number, name in zip(numbers.tolist(), subjects.names_of(numbers.tolist()), strict=True):
                if name is None or is_private(name):
                    continue
                if f"{name}." in prefixes:
                    found.add("beside_prefix", name)
                elif now_us - int(since_us[number]) >= UNTAKEN_US:
                    found.add("not_followed", name)
            yield 2 + 2 * len(numbers)


class _Findings:
    """The names that were found, each once."""

    def __init__(self) -> None:
        #: Code and name of each, and the texts of those about prefixes.
        self.known = set[tuple[str, str]]()
        self.texts = dict[tuple[str, str], str]()
        self._counts = Counter[str]()  # of subjects, by code
        self._first = dict[str, list[str]]()  # the first NAMED of them, by code

    def add(self, code: str, name: str, text: str = "") -> None:
        """Add a name, with the *text* about the prefix of a group; a second call for it does nothing."""
        if (code, name) in self.known:
            return
        self.known.add((code, name))
        if text:
            self.texts[code, name] = text
            return
        self._counts[code] += 1
        first = self._first.setdefault(code, [])
        if len(first) < NAMED or name < first[-1]:
            insort(first, name)
            del first[NAMED:]

    def told(self) -> tuple[UntakenName, ...]:
        """Return the findings: one for each prefix of a group, one for all subjects of a kind."""
        prefixes = [UntakenName(code, self.texts[code, name]) for code, name in sorted(self.texts)]
        return (*prefixes, *[_of_subjects(code, self._first[code], self._counts[code]) for code in sorted(self._first)])


def _not_taken(group: str, prefix: str, has_consumers: bool) -> str:
    who = f"none of the consumers of group {group} takes" if has_consumers else f"group {group} has no consumer for"
    return (
        f"{who} {prefix or 'everything'!r}, which the group follows, and has not for an hour or more, while messages "
        f"wait there: start a consumer that subscribes to it, or let the group follow other names with `qmq groups set "
        f"{group} follows=...`"
    )


def _of_subjects(code: str, first: list[str], count: int) -> UntakenName:
    """Return the finding about *count* subjects, with the names of the *first* ones."""
    some = ", ".join(map(repr, first)) + (f" and {count - len(first)} more" if count > len(first) else "")
    several = "subject" if count == 1 else "subjects"
    if code == "beside_prefix":
        return UntakenName(
            code,
            f"no group follows the {several} {some}, though one follows {first[0] + '.'!r}: a prefix with a dot takes "
            "only what comes behind the dot; send to a subject below it, or subscribe to both names",
        )
    return UntakenName(
        code,
        f"no group follows the {several} {some}, and messages have lain there for an hour or more: look for a mistyped "
        "name; if programs read them without a group, all is well",
    )
