"""Options and the event loop of all commands that talk to a broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from qmq.cli.common.arguments import Seconds

T = TypeVar("T")


def server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --server."""
    return click.option(
        "--server",
        metavar="URL",
        envvar="QMQ_SERVER",
        default="qmq://127.0.0.1:20881",
        show_default=True,
        callback=_inherited,
        help="The broker; several addresses with commas between. Also from QMQ_SERVER.",
    )(command)


def admin_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that asks each broker the options --timeout and --server."""
    timeout = click.option(
        "--timeout",
        metavar="S",
        type=Seconds(above_0=True),
        default=10.0,
        show_default=True,
        callback=_inherited,
        help="How long each broker gets for an answer.",
    )
    return timeout(server_option(command))


def _inherited(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return the value given before the name of a subcommand, unless the subcommand has one of its own."""
    name, parent = parameter.name, context.parent
    assert name is not None
    if parent is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    return parent.params[name] if parent.get_parameter_source(name) is ParameterSource.COMMANDLINE else value


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run *main* with uvloop. Ctrl-C and SIGTERM cancel it."""
    with closing(main):  # an interrupt before it runs would leave a warning
        import uvloop

        return uvloop.run(main)
