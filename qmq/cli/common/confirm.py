"""Ask before a command does something that cannot be undone."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
from click.exceptions import Exit

from qmq.cli.common.errors import EXIT_FAILED
from qmq.errors import InvalidOption

yes_option = click.option("--yes", is_flag=True, help="Do it without asking.")


def can_ask() -> bool:
    """Return whether stdin and stderr are a terminal, so that a question can be shown and answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(yes: bool, what: str, question: Callable[[], str], *, only_on_terminal: bool = False) -> None:
    """Return if the user agrees, by --yes or by answering the *question*; else end the command.

    *what* says what the command would do, as in "this deletes dead letters". Without a terminal it raises
    InvalidOption, or returns if it is to ask *only_on_terminal*.
    """
    if yes:
        return
    if not can_ask():
        if only_on_terminal:
            return
        raise InvalidOption(f"{what}, and there is no terminal to ask on: add --yes to do it")
    asked = question()
    try:
        if click.confirm(asked, err=True):
            return
    except click.Abort:
        click.echo(err=True)
    click.echo("qmq: nothing was done", err=True)
    raise Exit(EXIT_FAILED)
