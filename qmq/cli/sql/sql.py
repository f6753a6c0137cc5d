"""``qmq sql``: the tables of the outbox and the inbox, for a migration tool."""

from __future__ import annotations

import click

from qmq.cli.common.command_group import CommandGroup


class _StatementGroup(CommandGroup):
    """A group that takes what is no command of it for a statement, and runs its command ``query`` on that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_help = set(args[:1]) & set(ctx.help_option_names)
        if args and not asks_help and args[0] not in self.commands and "query" in self.commands:
            args = ["query", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_StatementGroup, short_help="Ask messages by SQL, or print the tables of outbox and inbox.")
def sql() -> None:
    """Print the tables that the outbox and the inbox need in a database."""
