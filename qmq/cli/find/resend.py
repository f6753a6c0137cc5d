"""``qmq resend``: hand stored messages out again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from qmq import connect
from qmq.cli.common.arguments import text_of, time_of
from qmq.cli.common.completion import complete_groups, complete_prefixes
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import json_option, print_object

if TYPE_CHECKING:
    from qmq import ResendCount

#: The counts of messages that a resend leaves alone, and what is said of them.
_LEFT_ALONE: Final = {
    "waiting": "not handed out yet",
    "in_flight": "in flight",
    "retrying": "in retry",
    "gone": "no longer stored",
}


@click.command(short_help="Hand stored messages out again.")
@click.argument("prefix", required=False, shell_complete=complete_prefixes)
@click.option("--id", "ids", metavar="ID", multiple=True, help="The message with this id; may be repeated.")
@click.option("--key", metavar="K", help="Only messages with this key.")
@click.option("--since", metavar="TIME", help="Only messages stored at this time or later, such as 2h (ago).")
@click.option("--until", metavar="TIME", help="Only messages stored before this time.")
@click.option("--group", metavar="G", shell_complete=complete_groups, help="To this group.")
@click.option("--all-groups", is_flag=True, help="To all groups that follow the subjects.")
@click.option("--dry-run", is_flag=True, help="Count the messages, and change nothing.")
@yes_option
@json_option
@admin_options
def resend(
    prefix: str | None,
    ids: tuple[str, ...],
    key: str | None,
    since: str | None,
    until: str | None,
    group: str | None,
    all_groups: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    server: str,
    timeout: float,
) -> None:
    """Hand stored messages out again, whatever became of them: those with these ids, or those of PREFIX ("shop." takes
    all subjects that begin so, "shop.order" that one, "" all).

    Consumers get them as attempt 1, marked as replayed. Messages that the group has not taken yet, and those in flight
    or in retry, are left alone: they come anyway. Dead letters among the messages are dead no more.

    It asks on a terminal; without one it needs --yes. A broker goes on with a large one by itself if this command is
    stopped.

    \b
    Examples:
      qmq resend shop.order. --since 2h --group billing --dry-run
      qmq resend shop.order. --key order-4421 --all-groups
      qmq resend --id 0123456789abcdef0123456789abcdef --group billing --yes
    """
    if bool(ids) is (prefix is not None or key is not None):
        raise click.UsageError('give either the PREFIX of the subjects ("" for all) or --key, or --id')
    if ids and (since is not None or until is not None):
        raise click.UsageError("--since and --until choose among the messages of a PREFIX; with --id leave them out")
    if (group is not None) is all_groups:
        raise click.UsageError("give either --group G, or --all-groups for all groups that follow the subjects")
    options: dict[str, Any] = {
        "ids": ids or None,
        "prefix": prefix,
        "key": None if key is None else text_of(key),
        "since": None if since is None else time_of(since, "--since"),
        "until": None if until is None else time_of(until, "--until"),
        "group": group,
        "all_groups": all_groups,
    }

    async def call(dry: bool, shown: Callable[[int, int], None] | None) -> ResendCount:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.resend(**options, dry_run=dry, on_progress=shown)

    if not dry_run:
        to = "all groups that follow them" if group is None else group
        confirm(yes, f"this hands messages out again to {to}", lambda: _question(run(call(True, None)), group))
    with _bar("counting" if dry_run else "resending") as shown:
        count = run(call(dry_run, shown))
    if as_json:
        print_object({"resent": int(count), **vars(count), "dry_run": dry_run})
    else:
        click.echo(_summary(count, group, dry_run))


def _question(count: ResendCount, group: str | None) -> str:
    return f"{_counted('resend', count, group)}?{_left_alone(count)}"


def _summary(count: ResendCount, group: str | None, dry_run: bool) -> str:
    return _counted("would resend" if dry_run else "resent", count, group) + _left_alone(count)


def _counted(verb: str, count: ResendCount, group: str | None) -> str:
    """Return a text such as "resend 1,234 messages to billing"."""
    to = number(count.groups, "group") if group is None else group
    each = " in all" if group is None and count.groups > 1 else ""
    dead = f", {count.redriven:,} of them dead letters" if count.redriven else ""
    return f"{verb} {number(int(count), 'message')}{each} to {to}{dead}"


def _left_alone(count: ResendCount) -> str:
    found = [f"{getattr(count, name):,} {what}" for name, what in _LEFT_ALONE.items() if getattr(count, name)]
    return f" (left alone: {', '.join(found)})" if found else ""


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on a terminal; yield the function that takes how far it is."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda looked, total: progress.update(task, completed=looked, total=total)
