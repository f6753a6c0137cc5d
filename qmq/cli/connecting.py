"""What the commands that talk to a broker share: which one, and a loop to do it in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import click

T = TypeVar("T")


def server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --server."""
    return click.option(
        "--server",
        metavar="URL",
        envvar="QMQ_SERVER",
        default="qmq://127.0.0.1:20881",
        show_default=True,
        help="The broker; several addresses with commas between. Also from QMQ_SERVER.",
    )(command)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it on the fast loop. Ctrl-C and SIGTERM cancel it."""
    with closing(main):  # or an interrupt that comes before it runs would leave a warning
        import uvloop

        return uvloop.run(main)
