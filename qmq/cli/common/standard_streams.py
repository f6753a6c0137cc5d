"""Standard streams that are closed, full or of few letters: a command ends with a line about them, not by a crash."""

from __future__ import annotations

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

from qmq.errors import StorageFailed

#: Opened the wrong way round, so that whoever uses them is told: read from stdin, written to stdout. stderr has nobody
#: left to tell.
_STAND_INS = ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))
#: The name of stdout in such an error.
_STDOUT = "<stdout>"


class _Stdout(FileIO):
    """Names itself in the errors of the system."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


def prepare_streams() -> None:
    """Have descriptors 0 to 2 open, or a socket would become one of them; and streams that can write every text."""
    for number, flags in _STAND_INS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest number that is free: this one
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
    """Say what the system refused, and of which file."""
    name, reason = error.filename, error.strerror or str(error)
    if name is _STDOUT:
        return StorageFailed(f"stdout cannot be written: {reason}")
    return StorageFailed(reason if name is None else f"{os.fsdecode(name)}: {reason}")


def end_streams() -> None:
    """Give up what streams could not write, or the interpreter would complain about it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _give_up(stream)


def _give_up(stream: TextIO) -> None:
    """Have what it could not write go nowhere."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return  # none of the system's
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
