"""``qmq peek``: look at messages, and change nothing."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import click

from qmq import connect
from qmq.cli.common.completion import complete_groups, complete_prefixes
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import end_if_incomplete, is_for_people, output_options
from qmq.cli.messages.message_text import show_messages
from qmq.cli.messages.stored import stored_messages, waiting_spans
from qmq.errors import InvalidOption
from qmq.names import check_group_or_member, check_prefix

if TYPE_CHECKING:
    from qmq import Message

_DEFAULT = 10
#: The most subjects whose last messages are read.
_MOST_SUBJECTS = 1_000


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

    --group shows messages that no consumer of the group had yet; those that are in flight, in retry or dead are not
    among them. With --group and --last it shows the last stored messages that the group follows, whether it has taken
    them or not.

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


async def _next_of(server: str, timeout: float, group: str, count: int) -> tuple[list[Message], bool, str]:
    """Return the messages that a group gets next: of each subject those that no consumer had yet; and a line about
    those that consumers had, if there are any.
    """
    async with connect(server, admin_timeout=timeout) as client:
        infos = await client.admin.groups(group)
        is_whole = not client.admin.missed
    in_retry, in_flight, dead = (
        sum(getattr(info, name) for info in infos) for name in ("in_retry", "in_flight", "dead")
    )
    others = [
        f"{in_retry:,} in retry, delivered again when due" if in_retry else "",
        f"{in_flight:,} in flight" if in_flight else "",
        f"{dead:,} dead (`qmq dead-letters list {group}`)" if dead else "",
    ]
    rest = "; ".join(filter(None, others))
    tags = {tag for info in infos for tag in info.settings["tags"]}
    found: list[Message] = []
    for name, broker in {(info.name, info.broker) for info in infos}:
        for span in waiting_spans(broker, name, timeout, _MOST_SUBJECTS):
            few = count if not tags else span.end - span.start  # some may have none of the group's tags
            messages = await stored_messages(broker, span.subject, span.start, min(few, span.end - span.start, 10_000))
            found += [message for message in messages if not tags or not tags.isdisjoint(message.tags)]
    found.sort(key=attrgetter("stored_at_us", "subject", "sequence"))
    return found[:count], is_whole, f"not shown: {rest}" if rest else ""


async def _ends(
    server: str, timeout: float, subject: str | None, group: str | None, count: int, *, from_start: bool
) -> tuple[list[Message], bool]:
    """Return the first or the last stored messages of a subject, a prefix, or of all that a group follows."""
    async with connect(server, admin_timeout=timeout) as client:
        prefixes = [subject or ""]
        if group is not None:
            prefixes = sorted({name for info in await client.admin.groups(group) for name in info.follows})
        infos = {(info.name, info.broker): info for name in prefixes async for info in client.subjects(name)}
        is_whole = not client.admin.missed
    if len(infos) > _MOST_SUBJECTS:
        raise InvalidOption(f"these are {number(len(infos), 'subject')}; give a longer prefix")
    found: list[Message] = []
    for info in infos.values():
        few = min(count, info.next_sequence - info.first_sequence)
        if few and info.messages:
            start = info.first_sequence if from_start else info.next_sequence - few
            found += await stored_messages(info.broker, info.name, start, few)
    found.sort(key=attrgetter("stored_at_us", "subject", "sequence"))
    return (found[:count] if from_start else found[-count:]), is_whole
