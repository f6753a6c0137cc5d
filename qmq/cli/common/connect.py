"""Options and the event loop of all commands that talk to a broker."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from qmq.cli.common.arguments import Seconds, given_in
from qmq.cli.common.profiles import complete_profiles, profile_of, take_profile
from qmq.errors import InvalidOption

T = TypeVar("T")

DEFAULT_SERVER = "qmq://127.0.0.1:20881"
#: The options of TLS, and what they name.
_TLS_OPTIONS: Final = {
    "tls_ca": "PEM file with the CAs to trust at qmqs:// (default: those of the system).",
    "tls_cert": "PEM file with this client's certificate, for a broker that asks for one.",
    "tls_key": "PEM file with the key of --tls-cert.",
}
#: Whether a token was taken, and from the command line.
_TOKEN: Final = "qmq.token"


class _Servers(click.types.StringParamType):
    """Addresses of brokers; an environment variable has several with commas between."""

    envvar_list_splitter = ","


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
        help="Take --server, --timeout, --token and the like from this profile of ~/.config/qmq.toml. Also from "
        "QMQ_PROFILE.",
    )(command)


def leading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``qmq`` itself the options --server and --profile, which then hold for the command that follows."""
    help_ = "For the command that follows, if it talks to a broker: see there."
    server = click.option(
        "--server", metavar="URL", type=_Servers(), multiple=True, help=help_,
        callback=lambda context, parameter, servers: ",".join(servers) or None,
    )  # fmt: skip
    for name in reversed(_TLS_OPTIONS):
        option = click.option(f"--{name.replace('_', '-')}", name, metavar="FILE", expose_value=False, help=help_)
        command = option(command)
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
        type=_Servers(),
        multiple=True,
        envvar="QMQ_SERVER",
        default=(DEFAULT_SERVER,),
        show_default=True,
        callback=_chosen,
        help="The broker; with TLS qmqs://. For several: with commas between, or repeat it. Also from QMQ_SERVER.",
    )
    return server(token_options(tls_options(profile_option(command))))


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --tls-ca, --tls-cert and --tls-key.

    The client reads them from environment variables, and so do processes that the command starts: while it runs, the
    variables have the values that were chosen.
    """

    @wraps(command)
    def with_tls(*args: Any, **values: Any) -> Any:
        chosen = {name: values.pop(name) for name in _TLS_OPTIONS}
        _check_used(click.get_current_context(), values.get("server"))
        with _in_environment({f"QMQ_{name.upper()}": value for name, value in chosen.items()}):
            return command(*args, **values)

    decorated: Callable[..., Any] = with_tls
    for name, help_ in reversed(_TLS_OPTIONS.items()):
        variable = f"QMQ_{name.upper()}"
        decorated = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar="FILE",
            envvar=variable,
            callback=_chosen,
            help=f"{help_} Also from {variable}.",
        )(decorated)
    return decorated


def _check_used(context: click.Context, server: object) -> None:
    """Raise InvalidOption for an option of TLS on the command line, if the broker is not reached by TLS."""
    for name in _TLS_OPTIONS:
        if isinstance(server, str) and "qmqs://" not in server and given_in(context, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidOption(f"{option} is given, but {server} does not begin with qmqs://: no TLS is used")


@contextmanager
def _in_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for a while; None leaves one as it is."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def token_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --token and --token-file."""
    token = click.option(
        "--token",
        metavar="TOKEN",
        envvar="QMQ_TOKEN",
        expose_value=False,
        callback=_take_token,
        help="NAME:SECRET, where brokers ask for it. Everybody here sees it in the list of processes, so rather use "
        "QMQ_TOKEN or --token-file.",
    )
    file = click.option(
        "--token-file",
        metavar="FILE",
        envvar="QMQ_TOKEN_FILE",
        expose_value=False,
        callback=_take_token,
        help="A file with the token. Also from QMQ_TOKEN_FILE.",
    )
    return token(file(command))


def _take_token(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Have all connections of the command use the token that an option or a profile gives."""
    chosen = _chosen(context, parameter, value)
    given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    if chosen is None or (_TOKEN in context.meta and not given):
        return
    from qmq.net.client.address import read_token, token_of

    if parameter.name == "token" and given:
        if not chosen.strip():
            raise click.BadParameter("it is empty; give NAME:SECRET, or leave the option out", context, parameter)
        click.echo("qmq: --token can be seen in the list of processes; use QMQ_TOKEN or --token-file", err=True)
    # of this process: what a command starts has them, too. The empty one is as none, so that the other counts.
    if parameter.name == "token_file":
        token_of(read_token(chosen))
        variables = {"QMQ_TOKEN": "", "QMQ_TOKEN_FILE": os.path.abspath(chosen)}  # the client reads it again
    else:
        variables = {"QMQ_TOKEN": str(token_of(chosen)), "QMQ_TOKEN_FILE": ""}
    context.meta[_TOKEN] = given
    context.with_resource(_in_environment(variables))


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
    if isinstance(value, tuple):  # of --server
        value = ",".join(value)
    given = given_in(context, name)
    if given is not None:
        return given.params.get(name, value)
    profile = profile_of(context)
    is_set = context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    if name in profile.values and (profile.named or not is_set):
        return parameter.type(profile.values[name], parameter, context)
    return value


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run *main* with uvloop. Ctrl-C and SIGTERM cancel it."""
    with closing(main):  # an interrupt before it runs would leave a warning
        import uvloop

        from qmq.logs import warn_on_stderr

        warn_on_stderr()  # a reader of stderr that stands still holds up no loop
        return uvloop.run(main)
