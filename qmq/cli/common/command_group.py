"""A group of commands that suggests a name for a mistyped one, and may list its things when none is named."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import click


class CommandGroup(click.Group):
    """A group of commands. With *lists* it runs its command ``list`` if no command is named: with "without arguments"
    only if there is no argument at all, with "any argument" also if the first one is not the name of a command.

    The options of ``list`` are those of the group too, where they apply to any of its commands.
    """

    def __init__(self, *args: Any, lists: str = "", **attributes: Any) -> None:
        self._lists = lists
        super().__init__(*args, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with ``list`` put before them where no command is named."""
        if self._lists and not ctx.resilient_parsing:
            try:
                _, positional, _ = self.make_parser(ctx).parse_args(list(args))
            except click.UsageError:
                positional = ["list"] if self._lists == "without arguments" else []
            asks_help = set(args) & set(ctx.help_option_names)
            named = positional and (self._lists != "any argument" or positional[0] in self.commands)
            if not named and not asks_help:
                args = ["list", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command. Raises UsageError, which suggests the name that was probably meant."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r:.80}{self._suggestion(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        names = self.list_commands(ctx)
        near = [self.other_words().get(name), *get_close_matches(name.lower(), names, n=1)]
        near += [one for one in names if len(name) > 1 and one.startswith(name.lower())]
        meant = next((one for one in near if one is not None), None)
        return f"; did you mean `{ctx.command_path} {meant}`?" if meant else ""

    def other_words(self) -> Mapping[str, str]:
        """Return words that other programs use for commands of this group."""
        return {}
