"""The order in which rows are sent, so that each group can begin exactly where its offset was.

A group begins at one place of the log, behind all that was sent before it was made. So the rows go level by level:
first those that only the group that is furthest behind lacks, then those that the next one lacks as well, and so on;
each group is made before its level. Rows that all groups are through with are not sent. Within a level, rows of one
priority go in the order of their ids, as each priority is a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from qmq.errors import InvalidOption
from qmq.sql.importing.rows import RowId, priority_of

#: The value of a priority column, or None: of NULL, and where there is no such column.
RawPriority = int | str | None
#: The last row that a group is through with, by priority; without an entry: none.
Offsets = Mapping[RawPriority, RowId]
_RANKS: Final = {"high": 0, "normal": 1, "low": 2}


class Section(NamedTuple):
    """Rows of one priority in one level: with ids behind ``low``, up to ``high``. None: no bound."""

    level: int
    priority: RawPriority
    low: RowId | None
    high: RowId | None

    @property
    def name(self) -> str:
        """A name that no other section of the import has."""
        return f"{self.level}/{self.priority!r}"


class Level(NamedTuple):
    """The groups that begin here, and the rows that they are the first to lack."""

    groups: tuple[str, ...]
    sections: tuple[Section, ...]


def levels_of(
    priorities: Iterable[RawPriority], offsets: Mapping[str, Offsets], *, allow_repeats: bool = False
) -> list[Level]:
    """Return the levels in the order in which they are sent.

    Raises InvalidOption where two groups are each ahead of the other in some priority, unless *allow_repeats*: the one
    then gets some rows again.
    """
    ranked = sorted(set(priorities) | {priority for each in offsets.values() for priority in each}, key=_rank)
    if not offsets:
        return [Level((), tuple(Section(0, priority, None, None) for priority in ranked))]
    chain = _chain(ranked, offsets, allow_repeats=allow_repeats)
    levels = list[Level]()
    for at, (groups, low) in enumerate(chain):
        high = chain[at + 1][1] if at + 1 < len(chain) else {}
        is_last = at + 1 == len(chain)
        sections = (Section(at, each, low.get(each), None if is_last else high.get(each)) for each in ranked)
        # Where the next group is through with no row either, there is none between the two.
        levels.append(Level(groups, tuple(each for each in sections if is_last or each.high not in (None, each.low))))
    return levels


def _chain(
    ranked: list[RawPriority], offsets: Mapping[str, Offsets], *, allow_repeats: bool
) -> list[tuple[tuple[str, ...], Offsets]]:
    """Return groups with their offsets, those furthest behind first."""
    try:
        names = sorted(offsets, key=lambda name: [_place(offsets[name].get(each)) for each in ranked])
        found = list[tuple[tuple[str, ...], Offsets]]()
        for name in reversed(names):
            own = dict(offsets[name])
            if found:
                groups, ahead = found[-1]
                crossed = [each for each in ranked if _place(own.get(each)) > _place(ahead.get(each))]
                if crossed and not allow_repeats:
                    raise InvalidOption(
                        f"groups {name} and {groups[0]} are each ahead of the other in one priority, so no place in "
                        "the log divides what they have from what they lack; let one of them catch up, or give "
                        "--allow-repeats: it then gets some messages again"
                    )
                own.update({each: ahead[each] for each in crossed if each in ahead})
                for each in crossed:
                    if each not in ahead:
                        del own[each]
                if own == ahead:
                    found[-1] = ((name, *groups), ahead)
                    continue
            found.append(((name,), own))
    except TypeError:
        raise InvalidOption(
            "the offsets of groups are partly numbers and partly texts; cast them in the query"
        ) from None
    return found[::-1]


def _place(row_id: RowId | None) -> tuple[bool, Any]:
    return row_id is not None, row_id if row_id is not None else 0


def _rank(priority: RawPriority) -> tuple[int, str]:
    try:
        return _RANKS[priority_of(priority)], repr(priority)
    except ValueError:  # its rows are rejected one by one
        return len(_RANKS), repr(priority)
