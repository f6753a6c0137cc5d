"""``qmq dead-letters``: list, show, redrive and delete the dead letters of a group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import click

from qmq import connect
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.completion import complete_dead_letters, complete_groups
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
from qmq.cli.messages.message_text import encoding_of, shown_body, text_or_base64
from qmq.errors import BrokersMissed, InvalidOption, QmqError
from qmq.names import check_group_or_member

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import Client, DeadLetter, StoredMessage


class ShownLetter(NamedTuple):
    """A dead letter with its message; None if it cannot be read."""

    letter: DeadLetter
    message: StoredMessage | None


FIELDS: Final[Fields[ShownLetter]] = {
    "id": lambda shown: shown.letter.id,
    "subject": lambda shown: shown.letter.subject,
    "sequence": lambda shown: shown.letter.sequence,
    "key": lambda shown: shown.message and shown.message.key,
    "attempts": lambda shown: shown.letter.attempts,
    "session_expiries": lambda shown: shown.letter.session_expiries,
    "reason": lambda shown: shown.letter.reason,
    "died_at": lambda shown: shown.letter.died_at,
    "broker": lambda shown: shown.letter.broker,
}
_SHOWN: Final[Fields[ShownLetter]] = {
    **FIELDS,
    "keys": lambda shown: shown.message and shown.message.keys,
    "tags": lambda shown: shown.message and shown.message.tags,
    "stored_at": lambda shown: shown.message and shown.message.stored_at,
    "encoding": lambda shown: shown.message and encoding_of(shown.message.body),
    "body": lambda shown: shown.message and text_or_base64(shown.message.body),
}
_SHOWN_NESTED: Final[Fields[ShownLetter]] = {"properties": lambda shown: shown.message and shown.message.properties}

#: Messages that are read at once.
_AT_ONCE: Final = 32
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
    check_group_or_member(group)

    async def load() -> tuple[list[ShownLetter], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            letters = await _letters(client, group)
            return await _with_messages(client, letters), not client.admin.missed

    found, is_whole = run(load())
    none, caption = f"{group} has no dead letters", number(len(found), "dead letter")
    show(found, FIELDS, _listed, as_json=as_json, header=header, none=none, caption=caption)
    end_if_incomplete(is_whole)


async def _letters(client: Client, group: str, ids: Collection[str] | None = None) -> list[DeadLetter]:
    """Return the dead letters of a group, or those with these ids. Raises InvalidOption if one of these is not there,
    UnknownGroup, BrokersMissed.
    """
    from qmq.format.ids import MessageId

    wanted = None if ids is None else {str(MessageId.parse(one)) for one in ids}
    letters = [letter async for letter in client.admin.dead_letters(group) if wanted is None or letter.id in wanted]
    absent = set() if wanted is None else wanted - {letter.id for letter in letters}
    if absent and client.admin.missed:
        missed = ", ".join(client.admin.missed)
        raise BrokersMissed(f"no answer from {missed}, which may have {min(absent)}; try again when all brokers answer")
    if absent:
        raise InvalidOption(
            f"{min(absent)} is no dead letter of group {group!r}"
            + (f", nor are {len(absent) - 1} more of these ids" if len(absent) > 1 else "")
            + f"; `qmq dead-letters list {group}` lists them"
        )
    return letters


async def _with_messages(client: Client, letters: Sequence[DeadLetter]) -> list[ShownLetter]:
    """Return dead letters with their messages, as far as these can be read."""
    import asyncio

    bound = asyncio.Semaphore(_AT_ONCE)

    async def read(letter: DeadLetter) -> ShownLetter:
        if letter.id is None:
            return ShownLetter(letter, None)
        async with bound:
            try:
                return ShownLetter(letter, await client.get(letter.id))
            except QmqError:
                return ShownLetter(letter, None)

    return [shown for few in batched(letters, 1_000) for shown in await asyncio.gather(*map(read, few))]


def batched(letters: Sequence[DeadLetter], count: int) -> Iterator[Sequence[DeadLetter]]:
    """Yield *count* letters after *count* letters."""
    return (letters[at : at + count] for at in range(0, len(letters), count))


_ids_argument = click.argument("ids", nargs=-1, metavar="(ID... | --all)", shell_complete=complete_dead_letters)
_all_option = click.option("--all", "every", is_flag=True, help="All dead letters of the group.")


@dead_letters.command("show", short_help="Show dead letters with their messages.")
@click.argument("group", shell_complete=complete_groups)
@_ids_argument
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
    check_group_or_member(group)

    async def load() -> tuple[list[ShownLetter], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            letters = await _letters(client, group, None if every else ids)
            return await _with_messages(client, letters), not client.admin.missed

    found, is_whole = run(load())
    show_details(found, _SHOWN, _pairs, as_json=as_json, nested=_SHOWN_NESTED)
    end_if_incomplete(is_whole)


_Change = Literal["redrive", "delete"]


def _changing(action: _Change) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Return a decorator with the arguments and options of the commands that change dead letters; its function has
    their help.
    """

    def decorate(documented: Callable[..., None]) -> Callable[..., Any]:
        @click.argument("group", shell_complete=complete_groups)
        @_ids_argument
        @_all_option
        @yes_option
        @json_option
        @admin_options
        @wraps(documented)
        def change(
            group: str, ids: tuple[str, ...], every: bool, yes: bool, as_json: bool, server: str, timeout: float
        ) -> None:
            count = _changed(action, group, ids, every, yes, server, timeout)
            done = "redriven" if action == "redrive" else "deleted"
            if as_json:
                print_object({"group": group, done: count})
            else:
                click.echo(f"{count} {done}")

        return change

    return decorate


@dead_letters.command(short_help="Deliver dead letters again.")
@_changing("redrive")
def redrive() -> None:
    """Deliver dead letters of GROUP again, as if for the first time: those with these message IDs, or --all.

    It asks on a terminal; without one --all needs --yes.

    \b
    Examples:
      qmq dead-letters redrive billing 0123456789abcdef0123456789abcdef
      qmq dead-letters redrive billing --all --yes
    """


@dead_letters.command(short_help="Delete dead letters.")
@_changing("delete")
def delete() -> None:
    """Delete dead letters of GROUP for good: those with these message IDs, or --all.

    It asks on a terminal; without one --all needs --yes.

    \b
    Examples:
      qmq dead-letters delete billing 0123456789abcdef0123456789abcdef
      qmq dead-letters delete billing --all --yes
    """


def _check_ids(action: str, ids: tuple[str, ...], every: bool) -> None:
    """Raise UsageError unless either ids or --all are given: a list of ids that came out empty is not all."""
    if every is bool(ids):
        raise click.UsageError(f"give the IDs of the dead letters to {action}, or --all")


def _changed(
    action: _Change, group: str, ids: tuple[str, ...], every: bool, yes: bool, server: str, timeout: float
) -> int:
    """Redrive or delete dead letters, and return how many."""
    _check_ids(action, ids, every)
    check_group_or_member(group)

    async def count() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            if every:
                return sum(row.dead for row in await client.admin.groups(group))
            return len(await _letters(client, group, ids))

    async def change() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            call = client.admin.redrive if action == "redrive" else client.admin.delete_dead
            return await call(group, None if every else ids, all=every)

    does = f"this {action}s {'all dead letters' if every else number(len(ids), 'dead letter')} of {group}"
    if not every:
        run(count())  # wrong ids are an error before the question
    question = lambda: f"{action} {number(run(count()), 'dead letter')} of {group}?"  # noqa: E731
    confirm(yes, does, question, only_on_terminal=not every)  # without a terminal, named ids are enough
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
    pairs += [("key", escape(visible(key))) for key in message.keys]
    if message.tags:
        pairs.append(("tags", escape(visible(", ".join(message.tags)))))
    pairs += [("property", escape(visible(f"{name} = {value}"))) for name, value in message.properties.items()]
    return [*pairs, ("body", escape("\n".join(shown_body(message.body))))]


def _listed(found: Sequence[ShownLetter], width: int) -> Table | str:
    """Return a table, or on a narrow terminal, where a reason would be a column of single words, some lines each."""
    from qmq.cli.common.tables import WIDE, folded

    if width >= WIDE:
        return _table(found, width)
    several, blocks = are_several([shown.letter for shown in found]), []
    for letter, message in found:
        lost = f", {number(letter.session_expiries, 'consumer')} lost with it" if letter.session_expiries else ""
        place = f", at {letter.broker}" if several else ""
        key = f"key {visible(message.key)}" if message is not None and message.key is not None else ""
        died = f"died {age_of(letter.died_at)} ago, after {number(letter.attempts, 'attempt')}{lost}{place}"
        reason = folded(visible(letter.reason), width - 2).splitlines()
        lines = [letter.subject or "", key, died, *(click.style(line, "red") for line in reason)]
        name = click.style(letter.id or "(unreadable)", bold=True)
        blocks.append("\n".join([name, *(f"  {line}" for line in lines if line)]))
    return "\n\n".join(blocks) + "\n"


def _table(found: Sequence[ShownLetter], width: int) -> Table:
    from rich.markup import escape

    from qmq.cli.common.tables import table_of

    is_wide, several = width >= _WIDE, are_several([shown.letter for shown in found])
    keys = any(shown.message is not None and shown.message.key is not None for shown in found)
    table = table_of("message" if is_wide else "message\n  subject" + "\n  key" * keys)
    table.columns[0].min_width = 32
    if is_wide:
        table.add_column("subject", overflow="fold")
        if keys:
            table.add_column("key", overflow="fold")
    for name in ("died", "attempts", "expiries"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide and several:
        table.add_column("broker", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for letter, message in found:
        name, subject = f"[bold]{letter.id or '(unreadable)'}[/]", letter.subject or ""
        key = escape(visible(message.key)) if message is not None and message.key is not None else ""
        below = "".join(f"\n  {text}" for text in (subject, key) if text)
        first = [name, subject, *([key] if keys else [])] if is_wide else [f"{name}{below}{in_cell(letter, several)}"]
        counts: list[Any] = [age_of(letter.died_at), str(letter.attempts), str(letter.session_expiries)]
        broker = [letter.broker] if is_wide and several else []
        table.add_row(*first, *counts, *broker, escape(visible(letter.reason)))
    return table
