"""``qmq doctor``: what is wrong, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from click.exceptions import Exit

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import age, age_of, number, visible
from qmq.cli.common.listing import Fields, is_for_people, output_options, show
from qmq.cli.manage.blocked import blocked_text
from qmq.errors import QmqError
from qmq.net.client.address import parse_url
from qmq.version import VERSION

if TYPE_CHECKING:
    from qmq import BrokerInfo, ConsumerInfo, GroupInfo, SubjectInfo
    from qmq.console.snapshot import GroupNow

#: Messages that wait for longer are a problem.
_LATE: Final = timedelta(hours=1)
#: Messages that nobody takes for longer are one.
_IDLE: Final = timedelta(minutes=1)
#: Clocks that differ by more, in seconds, are one: delays and expiry go by the broker's clock.
_SKEW_S: Final = 5.0
#: An event loop that was blocked for longer, in seconds, delays heartbeats and acks.
_BLOCKED_S: Final = 1.0
#: What to do about messages that wait, by the code of the reason.
_ADVICE: Final = {
    "consumers_crash": "see the log of its program; a message that ends max_session_expiries sessions alone is dead",
    "held": "see with `qmq consumers {name}` who has them, and what its handler waits for",
    "attempts_fail": "see the log of its program for the errors of its handler",
    "nothing_taken": "see whether its program still pulls, and what it waits for",
}
#: The most of one kind that are shown on a terminal.
_MOST_SHOWN: Final = 10
#: A message in flight for longer that holds up others of its order key is a problem, and so is a retry that does, where
#: messages of the group have waited for longer than the second.
_HELD: Final = timedelta(minutes=1)
_WAITED: Final = timedelta(minutes=10)
#: The most groups whose order keys are looked at.
_MOST_BLOCKED: Final = 20
#: The most subjects, and groups with messages in flight, that are looked at.
_MOST: Final = 1_000


class Ailment(NamedTuple):
    """Something that is wrong: ``level`` is "error" if messages or service suffer now, else "warning"."""

    level: str
    code: str
    broker: str
    message: str


FIELDS: Final[Fields[Ailment]] = {
    "level": lambda found: found.level,
    "code": lambda found: found.code,
    "broker": lambda found: found.broker,
    "message": lambda found: found.message,
}


@click.command(short_help="Say what is wrong, and what to do.")
@output_options
@admin_options
def doctor(as_json: bool, header: bool, server: str, timeout: float) -> None:
    """Say what is wrong with brokers, groups and consumers, and what to do about it.

    It asks each broker for its problems (disks, damaged files, checkpoints, an open address), compares versions and
    clocks, and looks for dead letters, groups that nobody serves, messages that wait for long, order keys that hold
    messages up, consumers whose event loop is blocked, and names that are probably mistyped. Ends with 1 if there is an
    error; warnings end with 0.

    \b
    Examples:
      qmq doctor
      qmq doctor --json | jq -r .message
    """
    found: list[Ailment] = []
    for address in parse_url(server):
        try:
            found += run(_examine(address.url, timeout))
        except QmqError as error:
            is_told = "qmq serve" in str(error) or not error.retryable  # a broker answered, and said what is wrong
            text = str(error) if is_told else f"{error}; see whether `qmq serve` runs there, and its log"
            found.append(Ailment("error", "not_reached", str(address), " ".join(text.split())))
    found += _of_this_machine(datetime.now(UTC))
    found.sort(key=lambda one: one.level != "error")
    errors = sum(one.level == "error" for one in found)
    caption = f"{number(errors, 'error')}, {number(len(found) - errors, 'warning')}"
    if is_for_people(as_json):
        found = _shortened(found)
    show(found, FIELDS, _lines, as_json=as_json, header=header, none=f"nothing is wrong at {server}", caption=caption)
    if errors:
        raise Exit(EXIT_FAILED)


def _shortened(found: Sequence[Ailment]) -> list[Ailment]:
    """Return what a person reads: some of each kind, and how many more there are."""
    counts, shown = Counter((one.level, one.code) for one in found), list[Ailment]()
    seen = Counter[tuple[str, str]]()
    for one in found:
        kind = one.level, one.code
        seen[kind] += 1
        if seen[kind] <= _MOST_SHOWN:
            shown.append(one)
        elif seen[kind] == counts[kind]:
            more = f"{counts[kind] - _MOST_SHOWN:,} more of this kind ({one.code}); `qmq doctor --json` lists all"
            shown.append(one._replace(message=more))
    return shown


async def _examine(url: str, timeout: float) -> list[Ailment]:
    """Return what is wrong at one broker. Raises QmqError if it does not answer."""
    async with connect(url, admin_timeout=timeout) as client:
        (info,) = await client.admin.info()
        asked_at = datetime.now(UTC)
        (stats,) = await client.admin.stats()
        clock = _Clock(asked_at, stats.at, datetime.now(UTC))
        groups = await client.admin.groups()
        subjects: list[SubjectInfo] = []
        async for subject in client.subjects():
            subjects.append(subject)
            if len(subjects) >= _MOST:
                break
        consumers: list[tuple[str, ConsumerInfo]] = []
        for group in [group.name for group in groups if group.in_flight][:_MOST]:
            consumers += [(group, consumer) for consumer in await client.admin.consumers(group)]
        stuck = list(islice((group.name for group in groups if _may_be_stuck(group, datetime.now(UTC))), _MOST_BLOCKED))
        blocked = [one for name in stuck for one in await client.admin.groups(name)]
    from qmq.console.snapshot import make_snapshot

    waiting = make_snapshot(1, stats.at, [stats], {}, None).groups
    found = [*_of_broker(info), *_of_clock(clock), *_of_groups(groups, waiting, stats.at), *_of_consumers(consumers),
             *_of_order_keys(blocked, datetime.now(UTC))]  # fmt: skip
    if len(subjects) < _MOST:
        found += _of_names(groups, subjects)
    return [Ailment(level, code, info.broker, message) for level, code, message in found]


def _of_this_machine(now: datetime) -> Iterator[Ailment]:
    from qmq.net.client.failover.spool import waiting_messages

    for waiting in waiting_messages():
        if now - waiting.oldest > _IDLE:
            text = (
                f"{number(waiting.messages, 'failed message')} of group {waiting.group} in {waiting.directory} on this "
                f"machine, for {age_of(waiting.oldest)}, which no broker has taken: run a client of {waiting.brokers} "
                "here whose token may consume them, as this user, and see its log"
            )
            yield Ailment("warning", "spool_waits", waiting.brokers, text)


_Found = tuple[str, str, str]


class _Clock(NamedTuple):
    """The clock of a broker, and this machine's before and after the broker looked at it."""

    before: datetime
    broker: datetime
    after: datetime


def _of_broker(info: BrokerInfo) -> Iterator[_Found]:
    for problem in info.problems:
        if problem.code != "no_consumer":  # ``_of_groups`` says it with numbers, and sooner
            yield problem.level, problem.code, problem.message
    mine = VERSION
    if info.version != mine:
        yield "warning", "other_version", f"the broker is qmq {info.version} and this command {mine}: update the older"


def _of_clock(clock: _Clock) -> Iterator[_Found]:
    """Say by how much the clocks differ at least, however long the answer was on its way."""
    ahead = (clock.broker - clock.after).total_seconds()
    behind = (clock.before - clock.broker).total_seconds()
    if max(ahead, behind) > _SKEW_S:
        text = f"the broker's clock is {age(max(ahead, behind))} {'ahead of' if ahead > 0 else 'behind'} this machine's"
        yield "warning", "clock", f"{text}: delays and times of messages go by it; set the time of both (NTP)"


def _of_groups(groups: Iterable[GroupInfo], waiting: Mapping[str, GroupNow], now: datetime) -> Iterator[_Found]:
    """*waiting* says by name what a broker has counted; *now* is by its clock."""
    for group in groups:
        known = waiting.get(group.name)
        why = None if known is None else known.why(now)
        returned = 0 if known is None else min(known.returned, group.in_retry)
        name, waits = group.name, now - group.oldest if group.oldest is not None else timedelta()
        if group.dead:
            text = f"group {name} has {number(group.dead, 'dead letter')}: see `qmq dead-letters list {name}`, mend"
            yield "warning", "dead_letters", f"{text} the cause, then `qmq dead-letters redrive {name} --all`"
        if why is not None and why.code in _ADVICE and known is not None and _is_late(known, now):
            yield "warning", why.code, f"group {name}: {why.text}: {_ADVICE[why.code].format(name=name)}"
        elif ((group.ready and waits > _IDLE) or group.in_retry) and not group.consumers:
            ready = f"{number(group.ready, 'message')} ready (for {age(waits.total_seconds())})" if group.ready else ""
            back = f"{number(returned, 'message')} to hand out again" if returned else ""
            retry = f"{number(group.in_retry - returned, 'message')} in retry" if group.in_retry > returned else ""
            text = f"group {name} has {', '.join(filter(None, (ready, back, retry)))} and no consumer"
            yield "warning", "nobody", f"{text}: start one, or `qmq groups delete {name}` if it is not needed"
        elif group.ready and waits > _LATE:
            text = f"group {name} lags: {number(group.ready, 'message')} ready, "
            text += f"the oldest for {age(waits.total_seconds())}" + ("" if why is None else f", {why.text}")
            yield "warning", "lag", f"{text}: add consumers, or see with `qmq consumers {name}` what holds them up"
        if group.skipped:
            text = (
                f"group {name} missed {number(group.skipped, 'message')}, which retention dropped before it took them"
            )
            yield "warning", "skipped", f"{text}: raise retention_ms, or have it keep up"


def _is_late(group: GroupNow, now: datetime) -> bool:
    return group.crashes > 1 or (group.oldest is not None and now - group.oldest > _IDLE)


def _may_be_stuck(group: GroupInfo, now: datetime) -> bool:
    """Return whether some order key of a group may have held messages up for long."""
    return bool(group.blocked) and group.oldest is not None and now - group.oldest > _HELD


def _of_order_keys(groups: Iterable[GroupInfo], now: datetime) -> Iterator[_Found]:
    for group in groups:
        for slot in group.blocked:
            least = _HELD if slot.reason == "in_flight" else _WAITED
            since = slot.since if slot.reason == "in_flight" else group.oldest
            if since is not None and now - since > least:
                name = slot.message_id or "ID"
                what = f"see `qmq trace {name}`, and mend what its handler does with it"
                yield "warning", "order_key", f"group {group.name}: {blocked_text(slot, now)}; {what}"


def _of_consumers(consumers: Iterable[tuple[str, ConsumerInfo]]) -> Iterator[_Found]:
    for group, consumer in consumers:
        if consumer.stalled >= _BLOCKED_S:
            text = f"the event loop of {consumer.name} in group {group} was blocked for {age(consumer.stalled)}"
            yield "warning", "blocked", f"{text}: run long work in a thread (asyncio.to_thread) or process"


def _of_names(groups: Iterable[GroupInfo], subjects: Sequence[SubjectInfo]) -> Iterator[_Found]:
    names = {subject.name for subject in subjects}
    for group in groups:
        for prefix in group.follows:
            if prefix.endswith(".") and not any(name.startswith(prefix) for name in names):
                beside = prefix[:-1] in names
                hint = f"there is a subject {prefix[:-1]!r}, which it does not take" if beside else "is it mistyped?"
                yield (
                    "warning",
                    "no_subject",
                    f"group {group.name} follows {prefix!r}, and no subject begins so: {hint}",
                )
            elif prefix and not prefix.endswith(".") and prefix not in names:
                some = any(name.startswith(f"{prefix}.") for name in names)
                hint = f"subjects begin with {prefix + '.'!r}, which it does not take" if some else "is it mistyped?"
                yield (
                    "warning",
                    "no_subject",
                    f"group {group.name} follows the subject {prefix!r}, which is not there: {hint}",
                )


def _lines(found: Sequence[Ailment], width: int) -> str:
    """Return what a person reads: not a table, since a command may be longer than a line of the terminal."""
    from qmq.cli.common.tables import folded

    several = len({one.broker for one in found}) > 1
    lines = []
    for level, _, broker, message in found:
        text = folded(f"{level}: {visible(message)}{f' (at {broker})' if several else ''}", width)
        lines.append(click.style(level, "red" if level == "error" else "yellow") + text.removeprefix(level))
    return "\n\n".join(lines) + "\n"
