"""``qmq peek``: look at messages, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import click

from qmq import connect
from qmq.cli.common.completion import complete_groups, complete_prefixes
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import end_if_incomplete, is_for_people, output_options
from qmq.cli.messages.message_text import show_messages
from qmq.cli.messages.stored import WaitingSpan, waiting_spans
from qmq.names import check_group_or_member, check_prefix, takes

if TYPE_CHECKING:
    from qmq import Finder, GroupInfo, StoredMessage

_DEFAULT = 10
#: The ranks of priorities, in the order in which they are handed out.
_RANKS = {"high": 0, "normal": 1, "low": 2}
#: The most lanes of subjects with waiting messages that are looked at of one group at one broker.
_MOST_LANES = 100_000


@click.command(short_help="Look at messages, and change nothing.")
@click.argument("subject", required=False, shell_complete=complete_prefixes)
@click.option("--group", metavar="G", shell_complete=complete_groups, help="What waits for this group, next first.")
@click.option("--first", metavar="N", type=click.IntRange(1, 10_000), help="The first N messages that are stored.")
@click.option("--last", metavar="N", type=click.IntRange(1, 10_000), help="The last N messages.  [default: 10]")
@output_options
@admin_options
def peek(
    subject: str | None,
    group: str | None,
    first: int | None,
    last: int | None,
    as_json: bool,
    header: bool,
    server: str,
    timeout: float,
) -> None:
    """Look at the last stored messages of SUBJECT ("shop." is all that begin so), or with --group at those that a group
    gets next. Nothing changes: no attempt is counted, no message is acknowledged, no group is made.

    --group shows messages that no consumer of the group had yet, those of higher priorities first; those that are in
    flight, in retry or dead are not among them. With --group and --last it shows the last stored messages that the
    group follows, whether it has taken them or not. A search that takes longer than --timeout ends, and says so.

    \b
    Examples:
      qmq peek shop.order.paid
      qmq peek shop. --last 3 --json
      qmq peek --group billing
    """
    if (subject is None) is (group is None):
        raise click.UsageError("give either a SUBJECT or --group G")
    if first is not None and last is not None:
        raise click.UsageError("give either --first or --last")
    if subject is not None:
        check_prefix(subject)
    if group is not None:
        check_group_or_member(group)
    count = first or last or _DEFAULT
    rest = ""
    if group is not None and last is None:
        found, is_whole, rest = run(_next_of(server, timeout, group, count))
        none = f"nothing is ready for {group}"
    else:
        found, is_whole = run(_ends(server, timeout, subject, group, count, from_start=first is not None))
        none = f"no message of {subject or 'any subject'} is stored" if group is None else f"{group} follows no message"
    show_messages(found, as_json, header, none)
    if rest and is_for_people(as_json):
        click.echo(rest)
    end_if_incomplete(is_whole)


async def _next_of(server: str, timeout: float, group: str, count: int) -> tuple[list[StoredMessage], bool, str]:
    """Return the messages that a group gets next: of each lane of a subject those that no consumer had yet, higher
    priorities first; and a line about all others that the group has to do with, if there are any.
    """
    async with connect(server, admin_timeout=timeout) as client:
        infos = await client.admin.groups(group)
        is_whole = not client.admin.missed
    found: list[tuple[int, StoredMessage]] = []
    for broker in {info.broker for info in infos}:
        mine = [info for info in infos if info.broker == broker]
        spans = [span for info in mine for span in waiting_spans(broker, info.name, timeout, _MOST_LANES)]
        if spans:
            ranked, is_complete = await _waiting_at(broker, timeout, mine, spans, count)
            found, is_whole = found + ranked, is_whole and is_complete
    found.sort(key=lambda one: (one[0], one[1].stored_at_us))
    return [message for _, message in found[:count]], is_whole, _rest(group, infos)


async def _waiting_at(
    broker: str, timeout: float, infos: Sequence[GroupInfo], spans: Sequence[WaitingSpan], count: int
) -> tuple[list[tuple[int, StoredMessage]], bool]:
    """Return the first *count* messages within these spans of one broker, each with the rank of its priority; and
    whether no other one may come before them.
    """
    tags = {tag for info in infos for tag in info.settings["tags"]}
    times = [info.oldest for info in infos if info.ready]
    since = min((time for time in times if time is not None), default=None) if None not in times else None
    found: list[tuple[int, StoredMessage]] = []
    is_whole = True
    async with connect(broker, admin_timeout=timeout) as client:
        for prefix in sorted({prefix for info in infos for prefix in info.follows}):
            within = _Waiting([span for span in spans if takes((prefix,), span.subject)], tags, count)
            finder = client.find(prefix, since=since, limit=None, stop_after=timeout)
            while not within.has_all and (page := await finder.page()):
                for message in page:
                    within.add(message)
            found += within.found()
            is_whole = _is_whole(finder, within.has_all) and is_whole
    return found, is_whole


class _Waiting:
    """Gathers the messages of spans, until those that come first are known."""

    def __init__(self, spans: Sequence[WaitingSpan], tags: set[str], count: int) -> None:
        self._spans: dict[tuple[str, int], WaitingSpan] = {}
        for span in spans:  # members of a broadcast group have the same lanes
            known = self._spans.setdefault((span.subject, span.lane), span)
            start, end = min(known.start, span.start), max(known.end, span.end)
            self._spans[span.subject, span.lane] = span._replace(start=start, end=end)
        self._tags = tags
        self._count = count
        self._found: list[list[StoredMessage]] = [[] for _ in _RANKS]
        self._looked, self._totals = [0] * len(_RANKS), [0] * len(_RANKS)
        for span in self._spans.values():
            self._totals[_rank_of(span.lane)] += span.end - span.start

    def add(self, message: StoredMessage) -> None:
        """Take a message if it waits."""
        from qmq.net.client.find.stored_message import lane_of_stored

        lane, rank = lane_of_stored(message), _RANKS[message.priority]
        span = self._spans.get((message.subject, lane))
        if span is None or message.sequence is None or not span.start <= message.sequence < span.end:
            return
        if not self._tags or not self._tags.isdisjoint(message.tags):
            self._found[rank].append(message)
        self._looked[rank] += 1

    def found(self) -> list[tuple[int, StoredMessage]]:
        """Return the messages that come first, each with the rank of its priority."""
        found = [(rank, message) for rank, messages in enumerate(self._found) for message in messages]
        return found[: self._count]

    @property
    def has_all(self) -> bool:
        """Whether no message can come before those that were found: messages are looked at by their times."""
        found = 0
        for rank, messages in enumerate(self._found):
            found += len(messages)
            if found >= self._count:
                return True
            if self._looked[rank] < self._totals[rank]:
                return False
        return True


def _rank_of(lane: int) -> int:
    from qmq.format.lanes import priority_of

    return _RANKS[priority_of(lane)]


def _rest(group: str, infos: Sequence[GroupInfo]) -> str:
    """Return a line about the messages of a group that do not come next; "" where there are none."""
    in_retry, in_flight, dead = (
        sum(getattr(info, name) for info in infos) for name in ("in_retry", "in_flight", "dead")
    )
    blocked = sum(slot.waiting for info in infos for slot in info.blocked)
    hidden = [
        f"{in_retry:,} in retry, delivered again when due" if in_retry else "",
        f"{in_flight:,} in flight" if in_flight else "",
        f"{dead:,} dead (`qmq dead-letters list {group}`)" if dead else "",
    ]
    rest = "; ".join(filter(None, hidden))
    lines = [f"not shown: {rest}" if rest else ""]
    if blocked:
        waits = f"{number(blocked, 'message')} {'waits' if blocked == 1 else 'wait'}"
        lines.append(f"{waits} for an earlier one of the same order key: see `qmq groups show {group}`")
    return "\n".join(filter(None, lines))


async def _ends(
    server: str, timeout: float, subject: str | None, group: str | None, count: int, *, from_start: bool
) -> tuple[list[StoredMessage], bool]:
    """Return the first or the last stored messages of a subject, a prefix, or of all that a group follows."""
    found: list[StoredMessage] = []
    async with connect(server, admin_timeout=timeout) as client:
        prefixes = [subject or ""]
        if group is not None:
            prefixes = sorted({name for info in await client.admin.groups(group) for name in info.follows})
        is_whole = not client.admin.missed
        for prefix in prefixes:
            finder = client.find(prefix, newest=not from_start, limit=count, stop_after=timeout)
            part = [message async for message in finder]
            is_whole = _is_whole(finder, len(part) == count) and is_whole
            found += part if from_start else reversed(part)
    found.sort(key=attrgetter("stored_at_us"))  # those of one batch stay in their order
    return (found[:count] if from_start else found[-count:]), is_whole


def _is_whole(finder: Finder, has_enough: bool) -> bool:
    """Return whether a search has looked at all that it had to; say what is missing if it has not."""
    for missed in finder.missed:
        click.echo(f"qmq: no answer from {missed}: its messages are missing", err=True)
    if finder.unreadable:
        places = number(finder.unreadable, "place")
        click.echo(f"qmq: {places} could not be read: messages may be missing; run qmq verify there", err=True)
    is_cut = not has_enough and finder.cursor is not None and not finder.missed
    if is_cut:
        done = f"{finder.progress.share:.0%} was looked at within --timeout"
        click.echo(f"qmq: {done}: messages may be missing; give more time, or a longer prefix", err=True)
    return not finder.missed and not finder.unreadable and not is_cut
