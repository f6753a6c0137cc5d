"""Draws ``qmq top``: chooses groups and their order, and makes the lines of a screen of any size. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from qmq.cli.common.formatting import age, number, visible
from qmq.console.snapshot import GroupNow, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A broker that started so many seconds ago is said to have started.
_JUST_STARTED: Final = 60
#: The least width of names, and of the column that says why messages wait; the width that this has room for at most.
_LEAST_NAME, _MOST_NAME, _LEAST_WHY, _MOST_WHY = 12, 200, 34, 64
#: The most lines about brokers.
_MOST_BROKERS: Final = 3


def short(count: float) -> str:
    """Format a count in at most five characters: "0.4", "9,999", "12.3k", "123k", "1.2M"."""
    if 0 < count < 9.95 and count != int(count):
        return f"{count:.1f}"
    if count < 9_999.5:
        return f"{count:,.0f}"
    for unit, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if count < 99.95 * factor:
            return f"{count / factor:.1f}{unit}"
        if count < 999.5 * factor:
            return f"{count / factor:.0f}{unit}"
    return f"{count / 1e12:.0f}T"


class Column(NamedTuple):
    """A column: its letter, its head, its width, what it sorts by (most first), and its text."""

    letter: str
    head: str
    width: int
    by: Callable[[GroupNow, datetime], Any]
    text: Callable[[GroupNow, datetime], str]
    is_bad: Callable[[GroupNow], bool] = lambda group: False


#: The columns behind the name; their letters sort by them.
COLUMNS: Final = (
    Column(
        "r", "READY", 6, lambda one, at: one.ready,
        lambda one, at: short(one.ready) + ("" if one.ready_exact else "+"),
    ),
    Column(
        "o", "OLDEST", 6, lambda one, at: one.oldest_age(at),
        lambda one, at: "-" if one.oldest is None else age(one.oldest_age(at)),
        lambda one: one.oldest is not None and not one.consumers,
    ),
    Column("f", "FLIGHT", 6, lambda one, at: one.in_flight, lambda one, at: short(one.in_flight)),
    Column("e", "RETRY", 5, lambda one, at: one.in_retry, lambda one, at: short(one.in_retry)),
    Column("d", "DEAD", 5, lambda one, at: one.dead, lambda one, at: short(one.dead), lambda one: one.dead > 0),
    Column("u", "OUT/S", 5, lambda one, at: one.delivered_rate, lambda one, at: short(one.delivered_rate)),
    Column("a", "ACK/S", 5, lambda one, at: one.acked_rate, lambda one, at: short(one.acked_rate)),
    Column(
        "x", "FAIL/S", 6, lambda one, at: one.failed_rate, lambda one, at: short(one.failed_rate),
        lambda one: one.failed_rate > 0,
    ),
    Column("c", "CONS", 5, lambda one, at: one.consumers, lambda one, at: short(one.consumers)),
)  # fmt: skip
#: The letter that sorts by name.
NAME: Final = "n"
LETTERS: Final = (NAME, *(column.letter for column in COLUMNS))
_BY_LETTER: Final = {column.letter: column for column in COLUMNS}

HELP: Final = """\
q, Ctrl-C      quit
up, down       choose a group; also j, k, Page Up, Page Down, Home, End
left, right    choose the column to sort by
n r o f e d u a x c
               sort by name, ready, oldest, in flight, retry, dead,
               handed out/s, acked/s, failed/s, consumers
i              turn the order round
/              show only groups with a text in their names; Escape: all
p              pause, and go on
?              this page; any key closes it

READY          messages that wait; with + there may be more
OLDEST         since when the oldest one waits that is ready or in flight;
               red where no consumer is there
FLIGHT         messages that consumers have, and have not acknowledged
RETRY          failed messages that wait for their next attempt
DEAD           dead letters
OUT/S ACK/S FAIL/S
               messages handed out, acknowledged and failed in a second
CONS           consumers that are online"""


@dataclass(slots=True)
class View:
    """The view of one user: the snapshot, the order, the filter and the group that is chosen."""

    snapshot: Snapshot
    sort: str = "o"
    is_turned: bool = False
    filter: str = ""
    is_typing: bool = False
    is_paused: bool = False
    has_help: bool = False
    is_done: bool = False
    #: The name of the chosen group; None: the first one, whichever that is.
    chosen: str | None = None
    #: Rows of groups of the screen that was drawn last, and the first of them.
    page: int = 1
    _top: int = 0
    _ordered: list[GroupNow] | None = field(default=None, repr=False)

    def take(self, snapshot: Snapshot) -> None:
        """Show another snapshot, unless this one is to stay."""
        if not self.is_paused:
            self.snapshot, self._ordered = snapshot, None

    @property
    def groups(self) -> list[GroupNow]:
        """The groups that the filter takes, in their order."""
        if self._ordered is None:
            wanted, at = self.filter.casefold(), self.snapshot.at
            found = [one for name, one in self.snapshot.groups.items() if wanted in name.casefold()]
            if self.sort == NAME:  # as the snapshot has them
                self._ordered = found[::-1] if self.is_turned else found
            else:
                by = _BY_LETTER[self.sort].by
                self._ordered = sorted(found, key=lambda one: by(one, at), reverse=not self.is_turned)
        return self._ordered

    @property
    def place(self) -> int:
        """The place of the chosen group in the order; that of the first if it is gone."""
        if self.chosen is None:
            return 0
        return next((place for place, one in enumerate(self.groups) if one.name == self.chosen), 0)

    def press(self, key: str) -> None:
        """Do what a key says."""
        if self.is_typing:
            self._type(key)
        elif self.has_help:
            self.has_help, self.is_done = False, key == "q"
        elif key in LETTERS:
            self._sort_by(key)
        elif key in ("left", "right"):
            self._sort_by(LETTERS[(LETTERS.index(self.sort) + (1 if key == "right" else -1)) % len(LETTERS)])
        elif key == "i":
            self.is_turned, self._ordered = not self.is_turned, None
        elif key == "p":
            self.is_paused = not self.is_paused
        elif key == "/":
            self.is_typing = True
        elif key == "escape":
            self._filter("")
        elif key in ("q", "Q"):
            self.is_done = True
        elif key in ("?", "h"):
            self.has_help = True
        else:
            self._move(key)

    def _sort_by(self, letter: str) -> None:
        self.sort, self.is_turned, self._ordered, self.chosen = letter, False, None, None

    def _filter(self, text: str) -> None:
        self.filter, self._ordered, self.chosen = text, None, None

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.is_typing = False
            if key == "escape":
                self._filter("")
        elif key == "backspace":
            self._filter(self.filter[:-1])
        elif key == "clear":
            self._filter("")
        elif len(key) == 1 and len(self.filter) < _MOST_NAME:
            self._filter(self.filter + key)

    def _move(self, key: str) -> None:
        groups = self.groups
        steps = {
            "up": -1, "k": -1, "down": 1, "j": 1, "page up": -self.page, "page down": self.page, " ": self.page,
            "home": -len(groups), "end": len(groups),
        }  # fmt: skip
        if groups and key in steps:
            place = min(max(self.place + steps[key], 0), len(groups) - 1)
            self.chosen = groups[place].name if place else None

    def draw(self, width: int, height: int) -> Text:
        """Return the lines of a screen of that size."""
        lines = list[Text]()
        if self.has_help:
            lines = [Text("qmq top", "bold"), Text(), *map(Text, HELP.splitlines())][: max(height, 1)]
        else:
            head, chosen = self._head(), self._about(width)
            self.page = height - len(head) - len(chosen) - 3
            if self.page > 0:
                rows = self._rows(width)
                blank = [Text()] * (self.page + 1 - len(rows))
                lines = [*head, *rows, *blank, Text(), *chosen, self._last(width)]
            else:  # a very small terminal: the groups are what counts
                self.page = max(height - 2, 1)
                lines = [*head[:1], *self._rows(width)][: max(height, 1)]
        for line in lines:
            line.truncate(width)
        return Text("\n", no_wrap=True, end="").join(lines)

    def whole(self, width: int) -> Text:
        """Return all groups as lines, without what belongs to a screen."""
        columns, name_width, why_width = fitting(width)
        rows = [row(one, self.snapshot.at, columns, name_width, why_width) for one in self.groups]
        lines = [*self._head(), self._columns(columns, name_width, why_width), *rows]
        if not rows:
            lines.append(Text(self._empty()))
        return Text("\n").join(lines)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _head(self) -> list[Text]:
        now, groups = self.snapshot, self.snapshot.groups
        behind = sum(one.oldest is not None for one in groups.values())
        count = len(now.brokers) + len(now.away)
        title = Text.assemble(
            ("qmq top", "bold"), f"  {now.at.astimezone():%H:%M:%S}  ",
            f"{len(now.brokers)} of {number(count, 'broker')}" if now.away else number(count, "broker"),
            f", {number(len(groups), 'group')}, {behind:,} with messages",
            ("  PAUSED" if self.is_paused else "", "bold yellow"),
        )  # fmt: skip
        rates = [
            (f"{short(rate)}/s {what}", "red" if what == "failed" and rate else "")
            for what, rate in (
                ("in", now.received_rate), ("out", now.delivered_rate), ("acked", now.acked_rate),
                ("failed", now.failed_rate),
            )
        ]  # fmt: skip
        counts = [
            (f"{short(found)} {what}", "red" if what == "dead" and found else "")
            for what, found in (
                ("ready", now.ready), ("in flight", now.in_flight), ("in retry", now.in_retry), ("dead", now.dead)
            )
        ]  # fmt: skip
        oldest = min((one.oldest for one in groups.values() if one.oldest is not None), default=None)
        if oldest is not None:
            counts.append((f"oldest {age((now.at - oldest).total_seconds())}", ""))
        lines = [title, _joined(rates), _joined(counts)]
        return [*lines, *self._brokers(), Text()]

    def _brokers(self) -> list[Text]:
        """Return lines about brokers that are away or have just started."""
        now = self.snapshot
        lines = [
            Text(f"AWAY {broker} for {age((now.at - away.since).total_seconds())}: {visible(away.error)}", "bold red")
            for broker, away in now.away.items()
        ]
        lines += [
            Text(f"{stats.broker} started {age(stats.uptime)} ago", "yellow")
            for stats in now.brokers
            if stats.uptime < _JUST_STARTED
        ]
        if len(lines) > _MOST_BROKERS:
            more = f"and {len(lines) - _MOST_BROKERS + 1} brokers more"
            lines = [*lines[: _MOST_BROKERS - 1], Text(more, "bold red")]
        return lines

    def _rows(self, width: int) -> list[Text]:
        """Return the head of the table and the groups that have room, the chosen one among them."""
        groups, place, at = self.groups, self.place, self.snapshot.at
        self._top = min(max(self._top, place - self.page + 1, 0), place, max(len(groups) - self.page, 0))
        columns, name_width, why_width = fitting(width)
        lines = [self._columns(columns, name_width, why_width)]
        for index, group in enumerate(groups[self._top : self._top + self.page], self._top):
            line = row(group, at, columns, name_width, why_width)
            if index == place:
                line.stylize("reverse")
            lines.append(line)
        if not groups:
            lines.append(Text(self._empty(), "dim"))
        return lines

    def _empty(self) -> str:
        if self.filter:
            return f"no group has {visible(self.filter)!r} in its name"
        if not self.snapshot.brokers:
            return "no broker answers"
        return "no groups yet: one begins when its first consumer comes"

    def _columns(self, columns: Sequence[Column], name_width: int, why_width: int) -> Text:
        line = Text()
        line.append(set_cell_size("GROUP", name_width), "bold underline" if self.sort == NAME else "bold")
        for column in columns:
            line.append(" " * (1 + column.width - len(column.head)))
            line.append(column.head, "bold underline" if column.letter == self.sort else "bold")
        return line.append("  WHY", "bold") if why_width else line

    def _about(self, width: int) -> list[Text]:
        """Return the lines about the chosen group."""
        return _folded(about(self.groups[self.place], self.snapshot.at), width) if self.groups else []

    def _last(self, width: int) -> Text:
        """Return the line of the keys, or that of the filter that somebody types."""
        if self.is_typing:
            return Text.assemble(("filter: ", "bold"), visible(self.filter), ("_", "blink"))
        groups = self.groups
        keys = "q quit  <> sort  i turn  / filter  p pause  ? help"
        shown = f"{self._top + 1:,}-{min(self._top + self.page, len(groups)):,} of {len(groups):,}" if groups else ""
        if self.filter:
            shown = f"/{visible(self.filter)}  {shown}"
        room = max(width - len(keys) - 2, 0)
        last = Text(keys, "dim")
        last.append("  " + set_cell_size(shown, min(cell_len(shown), room)).rjust(room))
        return last


def fitting(width: int) -> tuple[list[Column], int, int]:
    """Return the columns that fit a screen, the width of names, and of the reasons (0: there is no room for them)."""
    columns, room = list(COLUMNS), width
    while columns and sum(column.width + 1 for column in columns) + _LEAST_NAME > width:
        columns.pop()
    room -= sum(column.width + 1 for column in columns)
    why = min(room - 2 - 2 * _LEAST_NAME, _MOST_WHY)
    if why < _LEAST_WHY:
        why = 0
    else:
        room -= why + 2
    return columns, max(min(room, _MOST_NAME), 1), why


def row(group: GroupNow, at: datetime, columns: Sequence[Column], name_width: int, why_width: int) -> Text:
    """Return the line of a group."""
    line = Text(cut(group.name, name_width))
    for column in columns:
        text = column.text(group, at)
        style = "bold red" if column.is_bad(group) else "dim" if text in ("0", "-") else ""
        line.append(" ")
        line.append(text.rjust(column.width), style)
    why = group.why(at)
    return line.append(f"  {shortened(why.text, why_width)}") if why_width and why is not None else line


def shortened(text: str, width: int) -> str:
    """Return the beginning of a text in at most *width* characters; the line about the chosen group has all of it."""
    return text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def cut(name: str, width: int) -> str:
    """Return a name in exactly *width* cells; one that is longer has its beginning and its end."""
    name = visible(name)
    if cell_len(name) <= width or width < 3:
        return set_cell_size(name, width)
    front = (width - 1) // 2
    back = ""
    while cell_len(name[-len(back) - 1 :]) <= width - 1 - front:
        back = name[-len(back) - 1 :]
    return set_cell_size(set_cell_size(name, front) + "\N{HORIZONTAL ELLIPSIS}" + back, width)


def about(group: GroupNow, at: datetime) -> str:
    """Say of a group in a sentence why it is behind, and what it follows; with its whole name."""
    why = group.why(at)
    parts = []
    if group.oldest is not None:
        parts.append(f"the oldest message has waited for {age(group.oldest_age(at))}")
    if why is not None:
        parts.append(why.text)
    if group.blocked:
        slots = number(group.blocked_slots, "slot")
        retrying = f", {group.blocked_retrying:,} of them in retry" if group.blocked_retrying else ""
        parts.append(f"{number(group.blocked, 'message')} wait for {slots} of order keys{retrying}")
    if group.in_flight_since is not None:
        parts.append(f"one pull is in flight for {age(group.in_flight_age(at))}")
    parts.append(f"{group.mode}, follows {', '.join(one or 'everything' for one in group.follows[:3]) or 'nothing'}")
    if len(group.follows) > 3:
        parts[-1] += f" and {len(group.follows) - 3} more"
    if len(group.brokers) > 1:
        parts.append(f"at {len(group.brokers)} brokers")
    return visible(f"{group.name}: {'; '.join(parts)}")


def _folded(text: str, width: int, most: int = 4) -> list[Text]:
    """Break a text into at most *most* lines, wherever the width ends."""
    lines, line, used = list[str](), "", 0
    for character in text:
        size = cell_len(character)
        if used + size > max(width, 2):
            lines.append(line)
            line, used = "", 0
        line, used = line + character, used + size
    return [Text(one) for one in [*lines, line][:most]]


def _joined(parts: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join(Text(text, style) for text, style in parts)
