"""The end of a command: an error of QMQ is one line on stderr, and the exit code tells programs what happened.

0: success. 1: failure. 2: wrong usage (an option, a name, a setting). 130 and 143: Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, Final

import click

from qmq.cli.common.formatting import visible
from qmq.errors import QmqError, UsageError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143


class CommandFailed(click.ClickException):
    """A QmqError that is shown as one line on stderr."""

    exit_code = EXIT_FAILED

    def __init__(self, error: QmqError) -> None:
        super().__init__(visible(" ".join(str(error).split())))

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"qmq: {self.message}", file=file, err=True)


class CalledWrongly(CommandFailed):
    """A QmqError about the arguments of the command."""

    exit_code = EXIT_USAGE


@contextmanager
def showing_errors() -> Iterator[None]:
    """Turn the errors of QMQ into those that click shows as one line."""
    try:
        yield
    except UsageError as error:
        raise CalledWrongly(error) from error
    except QmqError as error:
        raise CommandFailed(error) from error


@contextmanager
def ending_with_exit_code(context: click.Context) -> Iterator[None]:
    """Turn the errors of a command into its end. SIGTERM is handled like Ctrl-C, so that everything open is closed."""
    terminated = False

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    try:
        with showing_errors():
            yield
    except KeyboardInterrupt:
        context.exit(EXIT_TERMINATED if terminated else EXIT_INTERRUPTED)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
