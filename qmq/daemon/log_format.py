"""The formats of a broker's log lines: text for people, JSON for collectors of logs. Times are in UTC."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

#: Attributes that each record has; others came with ``extra=``.
_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def utc_time(seconds: float) -> str:
    """Return a time as 2026-01-31T23:59:59.123Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text: time, level, logger, message; a traceback follows in lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # its name there
        return utc_time(record.created)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    Its keys are ``time``, ``level``, ``logger`` and ``message``, those of ``extra=``, and ``exception`` with the
    traceback if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": utc_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update((key, value) for key, value in record.__dict__.items() if key not in _OWN)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def log_to_stderr(log_format: Literal["text", "json"], level: str) -> None:
    """Write all log records of this process from *level* up to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())
