"""The command ``qmq``: a group that imports the module of a command only when that command runs."""

from __future__ import annotations

from qmq.cli.common.signals import deliver_hangups, ending_at_once

with ending_at_once():  # this is the first module of QMQ that a command imports
    import errno
    import importlib
    import sys
    from collections.abc import Mapping
    from keyword import iskeyword
    from typing import Any, Final, NamedTuple

    import click

    from qmq.cli.common.command_group import CommandGroup
    from qmq.cli.common.connect import leading_options
    from qmq.cli.common.errors import EXIT_FAILED, CommandFailed, ending_with_exit_code, showing_errors
    from qmq.cli.common.standard_streams import MOMENT_S, can_print, end_streams, failure_of, prepare_streams


class Command(NamedTuple):
    """A command: the folder of qmq.cli with its module, and its line in ``qmq --help``."""

    folder: str
    help: str


#: The commands in the order of ``qmq --help``. Each is a click command in a module of the same
#: name (``python_name``). The help is repeated here so that listing the commands imports none of them.
COMMANDS: Final = {
    "serve": Command("operate", "Run a broker on a data directory."),
    "config": Command("operate", "Show every setting of serve, its default and what it does."),
    "ping": Command("manage", "Check that a broker answers."),
    "info": Command("manage", "Show version, settings, disks and connections of a broker."),
    "stats": Command("manage", "Show what a broker has done since its start."),
    "top": Command("top", "Watch rates and backlogs of groups on the terminal."),
    "doctor": Command("manage", "Say what is wrong, and what to do."),
    "produce": Command("messages", "Send a message, or each line of stdin as one."),
    "consume": Command("messages", "Print messages as they arrive, and acknowledge them."),
    "peek": Command("messages", "Look at messages, and change nothing."),
    "find": Command("find", "Find stored messages by id, key, time or text."),
    "cancel": Command("messages", "Cancel a delayed message."),
    "trace": Command("find", "Show what has become of messages, or what a consumer did."),
    "sql": Command("sql", "Query messages with SQL, or print the tables of outbox and inbox."),
    "resend": Command("find", "Hand stored messages out again."),
    "subjects": Command("manage", "List subjects, or show one."),
    "groups": Command("manage", "List groups; show, change, seek and delete one."),
    "consumers": Command("manage", "List the consumers of a group."),
    "dead-letters": Command("manage", "List, show, redrive and delete dead letters."),
    "tokens": Command("operate", "Say who may come in, and do what."),
    "console": Command("operate", "Show brokers in a browser."),
    "verify": Command("operate", "Check every file of a data directory."),
    "repair": Command("operate", "Rebuild the derived files of a data directory."),
    "archive": Command("operate", "Copy sealed segments of a data directory to an archive."),
    "restore": Command("operate", "Send messages of an archive to a broker."),
    "import": Command("sql", "Send the rows of a database, each once."),
    "outbox": Command("sql", "Send the rows of an outbox; see what waits there."),
    "bench": Command("operate", "Measure the speed of QMQ on this machine."),
    "completion": Command("manage", "Print what a shell needs to complete commands and names."),
}

#: Words that other programs use for these commands.
_OTHER_WORDS: Final = {
    "acl": "tokens",
    "check": "doctor",
    "dlq": "dead-letters",
    "dashboard": "console",
    "get": "find",
    "grep": "find",
    "health": "ping",
    "publish": "produce",
    "pub": "produce",
    "queues": "groups",
    "receive": "consume",
    "replay": "resend",
    "run": "serve",
    "search": "find",
    "send": "produce",
    "server": "serve",
    "settings": "config",
    "start": "serve",
    "statistics": "stats",
    "status": "info",
    "sub": "consume",
    "subscribe": "consume",
    "tail": "consume",
    "topics": "subjects",
    "ui": "console",
    "users": "tokens",
    "view": "peek",
    "watch": "top",
}


def python_name(name: str) -> str:
    """Return the name of a command's module, and of the command in it."""
    return name.replace("-", "_") + "_" * iskeyword(name)


class LazyGroup(CommandGroup):
    """A group of commands that imports each when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name != "serve":  # a broker lives on, and sees to them itself
            deliver_hangups()
        name = python_name(cmd_name)
        with ending_at_once():
            command = getattr(importlib.import_module(f"qmq.cli.{COMMANDS[cmd_name].folder}.{name}"), name)
        assert isinstance(command, click.Command), cmd_name
        return command

    def other_words(self) -> Mapping[str, str]:
        return _OTHER_WORDS

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        main: Any = super().main
        if not kwargs.pop("standalone_mode", True):
            return main(*args, standalone_mode=False, **kwargs)
        prepare_streams()
        try:
            exit_code = main(*args, standalone_mode=False, **kwargs) or 0
        except click.Abort:
            exit_code = _print_error("qmq: aborted", EXIT_FAILED)
        except click.ClickException as error:
            exit_code = _print_error(error, error.exit_code)
        except OSError as error:
            exit_code = EXIT_FAILED
            if error.errno != errno.EPIPE:  # the reader of stdout has gone, which is no error
                _print_error(CommandFailed(failure_of(error)), exit_code)
        finally:
            end_streams()
        sys.exit(exit_code)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with showing_errors():  # an option before the name of the command may be wrong
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with ending_with_exit_code(ctx):
            return super().invoke(ctx)


def _print_error(what: click.ClickException | str, exit_code: int) -> int:
    """Print the reason for the end on stderr, if that can be written, and return the exit code."""
    try:
        if not can_print(sys.stderr, MOMENT_S):
            return exit_code
        if isinstance(what, str):
            click.echo(what, err=True)
        else:
            what.show()
    except OSError:
        pass
    return exit_code


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@leading_options
@click.version_option(package_name="qmq", message="qmq %(version)s")
def cli(server: str | None) -> None:
    """QMQ, a message broker: append-only files, pull, and no partition tied to a consumer.

    \b
    Examples:
      qmq serve                                     start a broker in ./qmq-data
      qmq produce shop.order.paid '{"id": 4421}'    send a message
      qmq consume shop. --group billing             receive messages
      qmq --profile prod groups                     at another broker
    """
