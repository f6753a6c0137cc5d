"""Asking before what cannot be taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
from click.exceptions import Exit

from qmq.cli.common.errors import EXIT_FAILED
from qmq.errors import InvalidOption

yes_option = click.option("--yes", is_flag=True, help="Do it without asking.")


def can_ask() -> bool:
    """Whether somebody sits at a terminal, who reads the question and answers it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(yes: bool, what: str, question: Callable[[], str]) -> None:
    """Go on where the user said yes, with --yes or to the *question*; else end the command.

    *what* is what would be done, as in "this deletes dead letters". Raises InvalidOption where nobody can be asked.
    """
    if yes:
        return
    if not can_ask():
        raise InvalidOption(f"{what}, and there is no terminal to ask on: add --yes if that is meant")
    asked = question()
    try:
        if click.confirm(asked, err=True):
            return
    except click.Abort:
        click.echo(err=True)
    click.echo("qmq: nothing was done", err=True)
    raise Exit(EXIT_FAILED)
