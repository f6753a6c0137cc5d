"""Keep standard streams usable that are closed, full or ASCII only: a command ends with an error line, not a crash."""

from __future__ import annotations

import os
import select
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, Final, TextIO

import click

from qmq.errors import StorageFailed

#: Modes for descriptors that are closed, each the opposite of its use: reading stdin and writing stdout then fail, and
#: the command reports it. What is written to stderr is lost.
_STAND_INS = ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))
#: Seconds that the end of a command waits for a reader of stderr.
MOMENT_S: Final = 1.0
#: The name of stdout in an OSError.
_STDOUT = "<stdout>"


class _Stdout(FileIO):
    """stdout as a raw file that names itself in the errors of the system."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


def prepare_streams() -> None:
    """Open descriptors 0 to 2 if they are closed, lest a socket become one of them; make stdout and stderr accept all
    text.
    """
    for number, flags in _STAND_INS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number is this one
    if sys.stdin is None:
        sys.stdin = TextIOWrapper(FileIO(0, "r", closefd=False), "utf-8")
    if sys.stderr is None:
        sys.stderr = TextIOWrapper(FileIO(2, "w", closefd=False), "utf-8")
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        before = sys.stdout
        encoding = "utf-8" if before is None else before.encoding
        raw = _Stdout(1, "w", closefd=False)
        sys.stdout = TextIOWrapper(BufferedWriter(raw), encoding, line_buffering=raw.isatty())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def failure_of(error: OSError) -> StorageFailed:
    """Return an error that names the file and says what the system refused."""
    name, reason = error.filename, error.strerror or str(error)
    if name is _STDOUT:
        return StorageFailed(f"stdout cannot be written: {reason}")
    return StorageFailed(reason if name is None else f"{os.fsdecode(name)}: {reason}")


def echo_ready(text: str, logger: str) -> None:
    """Print that a server is ready. It serves all the same when nobody reads stdout, and logs that."""
    import logging

    log = logging.getLogger(logger)
    try:
        if can_print(sys.stdout, 0):
            click.echo(text)
        else:
            log.warning("could not print that it is ready: nobody reads stdout")
    except OSError as error:
        log.warning("could not print that it is ready: %s", failure_of(error))


def can_print(stream: TextIO, timeout_s: float) -> bool:
    """Return whether a line can be printed without waiting for a reader, now or within *timeout_s*."""
    try:
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        return bool(poller.poll(timeout_s * 1_000))
    except (OSError, ValueError):
        return True  # it is no file of the system, or the system says why when it is written


def end_streams() -> None:
    """Discard output that could not be written, about which the interpreter would complain when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _give_up(stream)


def _give_up(stream: TextIO) -> None:
    """Send the remaining output of *stream* to /dev/null."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return  # it has no descriptor
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
