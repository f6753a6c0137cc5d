"""qmq/daemon/log_format.py: one line a record for people, one object a record for collectors."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from qmq.daemon.log_format import JsonFormatter, TextFormatter


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
