"""qmq/logs.py: one line a record for people, an object for collectors, and no waiting for those who read them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qmq.logs import JsonFormatter, StderrHandler, TextFormatter


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("qmq.broker").makeRecord(
        "qmq.broker", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )
    made.created = 1_767_225_599.1239
    return made


def test_text_has_time_level_logger_and_message() -> None:
    line = TextFormatter().format(record("%d of %d", 1, 2, ignored="x"))
    assert line == "2025-12-31T23:59:59.123Z WARNING qmq.broker: 1 of 2"


def test_json_has_the_same_and_what_came_with_the_record() -> None:
    line = JsonFormatter().format(record("a line\nof %s", "two", group="billing", path=Path("/data")))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2025-12-31T23:59:59.123Z",
        "level": "warning",
        "logger": "qmq.broker",
        "message": "a line\nof two",
        "group": "billing",
        "path": "/data",
    }


def test_json_has_the_traceback_of_an_exception() -> None:
    failed = record("it failed")
    try:
        raise ValueError("no number")
    except ValueError:
        failed.exc_info = sys.exc_info()
    shown = json.loads(JsonFormatter().format(failed))["exception"]
    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: no number")


# --- the thread that writes -------------------------------------------------------------------------------------------


@contextmanager
def pipe(size: int = 4_096) -> Iterator[tuple[int, int]]:
    """A pipe that takes *size* bytes while nobody reads it: its end for the reader, and that of the writer."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    try:
        yield reader, writer
    finally:
        for descriptor in (reader, writer):
            with suppress(OSError):
                os.close(descriptor)


def lines_of(reader: int, last: str) -> list[str]:
    """Read lines until one ends with *last*."""
    read = ""
    while not read.endswith(f"{last}\n"):
        assert select.select((reader,), (), (), 20)[0], read
        read += os.read(reader, 65_536).decode()
    return read.splitlines()


def handler_of(writer: int, most_bytes: int = 1 << 20) -> StderrHandler:
    handler = StderrHandler(writer, most_bytes)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def test_without_a_reader_nothing_waits_and_what_was_dropped_is_counted() -> None:
    with pipe() as (reader, writer):
        handler = handler_of(writer, 10_000)
        for number in range(2_000):
            handler.handle(record("%08d", number))
        change = record("a change")
        change.name = "qmq.audit"
        handler.handle(change)
        handler.handle(record(""))  # there is room for this one, but others before it were dropped
        *kept, told = lines_of(reader, "since stderr took nothing")
        assert kept == [f"{number:08d}" for number in range(len(kept))]
        assert 10_000 // 9 <= len(kept) <= 14_096 // 9 + 1  # what may wait, and what the pipe has taken
        dropped = 2_002 - len(kept)
        assert told == f"{dropped} lines of the log were dropped, 1 of them of the audit, since stderr took nothing"
        handler.handle(record("and on"))
        assert lines_of(reader, "and on") == ["and on"]
        handler.close()


def test_a_line_that_is_longer_than_a_pipe_is_whole_and_so_is_one_to_a_pipe_that_does_not_block() -> None:
    for blocking in (True, False):
        with pipe() as (reader, writer):
            os.set_blocking(writer, blocking)
            handler = handler_of(writer)
            handler.handle(record("x" * 50_000 + "end"))
            assert lines_of(reader, "end") == ["x" * 50_000 + "end"]
            handler.close()


def test_what_a_broken_pipe_does_not_take_is_no_error_and_is_counted_once_lines_are_taken_again() -> None:
    with pipe() as (reader, writer):
        handler = handler_of(writer)
        os.close(reader)
        for number in range(5):
            handler.handle(record("%d", number))
            handler.flush()
        again, there = os.pipe()
        os.dup2(there, writer)  # as a disk that was full, and has room now
        handler.handle(record("and on"))
        told = lines_of(again, "and on")
        os.close(there)
        os.close(again)
    assert told == ["5 lines of the log were dropped, 0 of them of the audit, since stderr took nothing", "and on"]


def test_a_record_that_cannot_be_formatted_is_a_line_that_says_so() -> None:
    with pipe() as (reader, writer):
        handler = handler_of(writer)
        handler.handle(record("%d of %d", "one"))
        handler.handle(record("end"))
        assert lines_of(reader, "end") == ["this line cannot be shown: '%d of %d'", "end"]
        handler.close()


PROGRAM = """
import logging, os, qmq
qmq.log_to_stderr("json")
logging.getLogger("shop").info("ready")
if {forks} and not os.fork():
    logging.getLogger("shop").info("of the child")
    logging.shutdown()
    os._exit(0)
elif {forks}:
    os.wait()
"""


def test_a_program_logs_to_its_last_line_and_so_do_its_forks() -> None:
    for forks, expected in ((False, ["ready"]), (True, ["ready", "of the child"])):
        code = PROGRAM.format(forks=forks)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert sorted(json.loads(line)["message"] for line in done.stderr.splitlines()) == sorted(expected)


def test_the_end_of_a_program_waits_a_moment_for_a_reader_and_no_longer() -> None:
    code = "import logging, qmq; qmq.log_to_stderr(); [logging.info('x' * 1_000) for _ in range(500)]; print('end')"
    with pipe() as (_, writer):
        done = subprocess.run([sys.executable, "-c", code], stderr=writer, stdout=-1, timeout=20, check=True)
    assert done.stdout == b"end\n"
