"""Options and the event loop of all commands that talk to a broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from qmq.cli.common.arguments import Seconds, given_in
from qmq.cli.common.profiles import complete_profiles, profile_of, take_profile

T = TypeVar("T")

DEFAULT_SERVER = "qmq://127.0.0.1:20881"


def profile_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --profile."""
    return click.option(
        "--profile",
        metavar="NAME",
        envvar="QMQ_PROFILE",
        is_eager=True,
        expose_value=False,
        callback=take_profile,
        shell_complete=complete_profiles,
        help="Take --server and --timeout from this profile of ~/.config/qmq.toml. Also from QMQ_PROFILE.",
    )(command)


def leading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``qmq`` itself the options --server and --profile, which then hold for the command that follows."""
    help_ = "For the command that follows, if it talks to a broker: see there."
    server = click.option("--server", metavar="URL", help=help_)
    profile = click.option(
        "--profile",
        metavar="NAME",
        expose_value=False,
        callback=take_profile,
        shell_complete=complete_profiles,
        help=help_,
    )
    return server(profile(command))


def server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --server and --profile."""
    server = click.option(
        "--server",
        metavar="URL",
        envvar="QMQ_SERVER",
        default=DEFAULT_SERVER,
        show_default=True,
        callback=_chosen,
        help="The broker; several addresses with commas between. Also from QMQ_SERVER.",
    )
    return server(profile_option(command))


def admin_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that asks each broker the options --timeout, --server and --profile."""
    timeout = click.option(
        "--timeout",
        metavar="S",
        envvar="QMQ_TIMEOUT",
        type=Seconds(above_0=True),
        default="10s",
        show_default=True,
        callback=_chosen,
        help="How long each broker gets for an answer.",
    )
    return timeout(server_option(command))


def _chosen(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return the value of the command line, of a profile that it names, of the environment, or of the default profile,
    in this order.
    """
    name = parameter.name
    assert name is not None
    given = given_in(context, name)
    if given is not None:
        return given.params.get(name, value)
    profile = profile_of(context)
    is_set = context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    if name in profile.values and (profile.named or not is_set):
        return parameter.type_cast_value(context, profile.values[name])
    return value


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run *main* with uvloop. Ctrl-C and SIGTERM cancel it."""
    with closing(main):  # an interrupt before it runs would leave a warning
        import uvloop

        return uvloop.run(main)
