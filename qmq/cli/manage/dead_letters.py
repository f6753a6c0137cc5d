"""``qmq dead-letters``: list, show, redrive and delete the dead letters of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import click

from qmq import connect
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.completion import complete_groups
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number, visible
from qmq.cli.common.listing import (
    Fields,
    are_several,
    end_if_incomplete,
    in_cell,
    json_option,
    output_options,
    print_object,
    show,
    show_details,
)
from qmq.cli.messages.message_text import shown_body, text_or_base64
from qmq.cli.messages.stored import stored_messages
from qmq.errors import InvalidOption, QmqError
from qmq.names import check_group_or_member

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import DeadLetter, Message

FIELDS: Final[Fields[DeadLetter]] = {
    "id": lambda letter: letter.id,
    "subject": lambda letter: letter.subject,
    "sequence": lambda letter: letter.sequence,
    "attempts": lambda letter: letter.attempts,
    "session_expiries": lambda letter: letter.session_expiries,
    "reason": lambda letter: letter.reason,
    "died_at": lambda letter: letter.died_at,
    "broker": lambda letter: letter.broker,
}


class ShownLetter(NamedTuple):
    """A dead letter with its message; None if it cannot be read."""

    letter: DeadLetter
    message: Message | None


_SHOWN: Final[Fields[ShownLetter]] = {
    **{name: lambda shown, take=take: take(shown.letter) for name, take in FIELDS.items()},  # type: ignore[misc]  # mypy does not see the default
    "key": lambda shown: shown.message and shown.message.key,
    "tags": lambda shown: shown.message and shown.message.tags,
    "stored_at": lambda shown: shown.message and shown.message.stored_at,
    "body": lambda shown: shown.message and text_or_base64(shown.message.body),
}
_SHOWN_NESTED: Final[Fields[ShownLetter]] = {"properties": lambda shown: shown.message and shown.message.properties}

#: From this width on, a row of the table is one line.
_WIDE: Final = 160


@click.group(cls=CommandGroup, short_help="List, show, redrive and delete dead letters.")
def dead_letters() -> None:
    """List, show, redrive or delete the messages that a group is not given any more: rejected, expired, out of
    attempts, unreadable, or lost with too many consumers.

    Each member of a broadcast group has dead letters of its own; its group is GROUP@CONSUMER, as `qmq groups` prints
    it.

    \b
    Examples:
      qmq dead-letters list billing                 reasons, the oldest first
      qmq dead-letters show billing ID              one with its body
      qmq dead-letters redrive billing ID           deliver it again
      qmq dead-letters delete billing --all         asks first
    """


@dead_letters.command("list", short_help="List the dead letters of a group.")
@click.argument("group", shell_complete=complete_groups)
@output_options
@admin_options
def list_letters(group: str, as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List the dead letters of GROUP with their reasons, the oldest first.

    \b
    Examples:
      qmq dead-letters list billing
      qmq dead-letters list billing --json | jq -r '"\\(.id) \\(.reason)"'
    """
    found, is_whole = run(_letters(group, server, timeout))
    none, caption = f"{group} has no dead letters", number(len(found), "dead letter")
    show(found, FIELDS, _table, as_json=as_json, header=header, none=none, caption=caption)
    end_if_incomplete(is_whole)


async def _letters(group: str, server: str, timeout: float) -> tuple[list[DeadLetter], bool]:
    check_group_or_member(group)
    async with connect(server, admin_timeout=timeout) as client:
        return [letter async for letter in client.admin.dead_letters(group)], not client.admin.missed


_all_option = click.option("--all", "every", is_flag=True, help="All dead letters of the group.")


@dead_letters.command("show", short_help="Show dead letters with their messages.")
@click.argument("group", shell_complete=complete_groups)
@click.argument("ids", nargs=-1, metavar="(ID... | --all)")
@_all_option
@json_option
@admin_options
def show_letters(group: str, ids: tuple[str, ...], every: bool, as_json: bool, server: str, timeout: float) -> None:
    """Show dead letters of GROUP with reason, key, properties and body: those with these message IDs, or --all.

    \b
    Example:
      qmq dead-letters show billing 0123456789abcdef0123456789abcdef
    """
    _check_ids("show", ids, every)

    async def load() -> tuple[list[ShownLetter], bool]:
        letters, is_whole = await _letters(group, server, timeout)
        wanted = {one.lower() for one in ids}
        chosen = [letter for letter in letters if every or letter.id in wanted]
        absent = wanted - {letter.id for letter in chosen}
        if absent:
            raise InvalidOption(
                f"{number(len(absent), 'id')} not found among the dead letters of group {group!r}, such as "
                f"{min(absent):.80}; `qmq dead-letters list {group}` lists them"
            )
        return [ShownLetter(letter, await _message(letter)) for letter in chosen], is_whole

    found, is_whole = run(load())
    show_details(found, _SHOWN, _pairs, as_json=as_json, nested=_SHOWN_NESTED)
    end_if_incomplete(is_whole)


async def _message(letter: DeadLetter) -> Message | None:
    """Return the message of a dead letter; None if it is not stored where the letter says."""
    if letter.subject is None or letter.sequence is None:
        return None
    try:
        found = await stored_messages(letter.broker, letter.subject, letter.sequence, 1)
    except QmqError:
        return None
    return next((message for message in found if message.id == letter.id), None)


@dead_letters.command("redrive", short_help="Deliver dead letters again.")
@click.argument("group", shell_complete=complete_groups)
@click.argument("ids", nargs=-1, metavar="(ID... | --all)")
@_all_option
@yes_option
@json_option
@admin_options
def redrive(
    group: str, ids: tuple[str, ...], every: bool, yes: bool, as_json: bool, server: str, timeout: float
) -> None:
    """Deliver dead letters of GROUP again, as if for the first time: those with these message IDs, or --all.

    It asks on a terminal; without one --all needs --yes.

    \b
    Examples:
      qmq dead-letters redrive billing 0123456789abcdef0123456789abcdef
      qmq dead-letters redrive billing --all --yes
    """
    count = _changed("redrive", group, ids, every, yes, server, timeout)
    if as_json:
        print_object({"group": group, "redriven": count})
    else:
        click.echo(f"{count} redriven")


@dead_letters.command("delete", short_help="Delete dead letters.")
@click.argument("group", shell_complete=complete_groups)
@click.argument("ids", nargs=-1, metavar="(ID... | --all)")
@_all_option
@yes_option
@json_option
@admin_options
def delete(
    group: str, ids: tuple[str, ...], every: bool, yes: bool, as_json: bool, server: str, timeout: float
) -> None:
    """Delete dead letters of GROUP for good: those with these message IDs, or --all.

    It asks on a terminal; without one --all needs --yes.

    \b
    Examples:
      qmq dead-letters delete billing 0123456789abcdef0123456789abcdef
      qmq dead-letters delete billing --all --yes
    """
    count = _changed("delete", group, ids, every, yes, server, timeout)
    if as_json:
        print_object({"group": group, "deleted": count})
    else:
        click.echo(f"{count} deleted")


def _check_ids(action: str, ids: tuple[str, ...], every: bool) -> None:
    """Raise UsageError unless either ids or --all are given: a list of ids that came out empty is not all."""
    if every is bool(ids):
        raise click.UsageError(f"give the IDs of the dead letters to {action}, or --all")


def _changed(
    action: Literal["redrive", "delete"],
    group: str,
    ids: tuple[str, ...],
    every: bool,
    yes: bool,
    server: str,
    timeout: float,
) -> int:
    """Redrive or delete dead letters, and return how many."""
    _check_ids(action, ids, every)
    check_group_or_member(group)

    async def count() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            return sum(row.dead for row in await client.admin.groups(group))

    async def change() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            call = client.admin.redrive if action == "redrive" else client.admin.delete_dead
            return await call(group, None if every else ids, all=every)

    if every:
        does = f"this {action}s all dead letters of {group}"
        confirm(yes, does, lambda: f"{action} {number(run(count()), 'dead letter')} of {group}?")
    else:  # without a terminal, named ids are enough
        does = f"this {action}s {number(len(ids), 'dead letter')} of {group}"
        confirm(yes, does, lambda: f"{action} {number(len(ids), 'dead letter')} of {group}?", only_on_terminal=True)
    return run(change())


def _pairs(shown: ShownLetter) -> list[tuple[str, str]]:
    from rich.markup import escape

    letter, message = shown
    sequence = "" if letter.sequence is None else f" #{letter.sequence:,}"
    pairs = [
        ("id", f"[bold]{letter.id or '(unreadable)'}[/]"),
        ("subject", f"{letter.subject or ''}{sequence}"),
        ("broker", letter.broker),
        ("died", f"{age_of(letter.died_at)} ago, at {iso(letter.died_at)}"),
        ("attempts", f"{letter.attempts:,}, and {number(letter.session_expiries, 'consumer')} lost with it"),
        ("reason", f"[red]{escape(visible(letter.reason))}[/]"),
    ]
    if message is None:
        return [*pairs, ("body", "[yellow]cannot be read: the message is no longer stored there[/]")]
    pairs.append(("stored", f"{age_of(message.stored_at)} ago, at {iso(message.stored_at)}"))
    if message.key is not None:
        pairs.append(("key", escape(visible(message.key))))
    if message.tags:
        pairs.append(("tags", escape(visible(", ".join(message.tags)))))
    pairs += [("property", escape(visible(f"{name} = {value}"))) for name, value in message.properties.items()]
    return [*pairs, ("body", escape("\n".join(shown_body(message.body))))]


def _table(found: Sequence[DeadLetter], width: int) -> Table:
    from rich.markup import escape

    from qmq.cli.common.tables import table_of

    is_wide, several = width >= _WIDE, are_several(found)
    table = table_of("message" if is_wide else "message\n  subject")
    table.columns[0].min_width = 32
    if is_wide:
        table.add_column("subject", overflow="fold")
    for name in ("died", "attempts", "expiries"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide and several:
        table.add_column("broker", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for letter in found:
        name, subject = f"[bold]{letter.id or '(unreadable)'}[/]", letter.subject or ""
        below = f"\n  {subject}" if subject else ""
        first = [name, subject] if is_wide else [f"{name}{below}{in_cell(letter, several)}"]
        counts: list[Any] = [age_of(letter.died_at), str(letter.attempts), str(letter.session_expiries)]
        broker = [letter.broker] if is_wide and several else []
        table.add_row(*first, *counts, *broker, escape(visible(letter.reason)))
    return table
