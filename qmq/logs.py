"""The log of a process, which a thread writes to stderr: text for people, JSON for collectors. Times are in UTC."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
from collections import Counter
from datetime import UTC, datetime
from typing import Final, Literal

#: Bytes of lines that wait for a reader of stderr, at most: some 5,000 lines.
MOST_BYTES: Final = 1 << 20
#: Seconds for which the end of a process waits for such a reader.
FLUSH_S: Final = 1.0
#: The logger of changes that administrators make.
AUDIT: Final = "qmq.audit"
_STDERR: Final = 2
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


class StderrHandler(logging.Handler):
    """Has a thread write the records to a descriptor, so that no caller ever waits for its reader.

    When nobody reads, up to *most_bytes* of lines wait. What comes then is dropped and counted until those are written;
    then a line says how many were dropped. Lines of the audit are no exception: no reader of a log stops a program.
    """

    def __init__(self, descriptor: int, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        assert self.lock is not None
        self._changed = threading.Condition(self.lock)  # logging makes this lock anew in a forked process
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._lines: list[tuple[bytes, bool]] = []  # with whether it is one of the audit
        self._bytes = 0  # of all lines that are not written
        self._dropped = Counter[bool]()  # by whether they are of the audit
        self._has_failed = False  # the last write did, as on a full disk
        self._ends = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record to the thread, or drop it."""
        try:
            line = self._line(record)
        except Exception:
            wrong = logging.makeLogRecord({**record.__dict__, "args": (), "exc_info": None, "stack_info": None})
            wrong.msg = f"this line cannot be shown: {record.msg!r:.200}"
            line = self._line(wrong)
        is_audit = record.name == AUDIT
        with self._changed:
            is_behind = bool(self._dropped) and not self._has_failed
            if self._ends or is_behind or self._bytes + len(line) > self._most_bytes:
                self._dropped[is_audit] += 1
                return
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._lines.append((line, is_audit))
            self._bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait a moment until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, FLUSH_S)

    def close(self) -> None:
        """Take no more, and end the thread once all is written."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _start(self) -> None:
        self._lines, self._bytes = [], 0  # in a forked process they are those of its parent, whose thread writes them
        # A daemon thread: a reader that never comes must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="qmq-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._ends or (self._dropped and not self._has_failed))
                lines, self._lines = self._lines, []
                # What was dropped came after all lines that waited, but before those that follow a failed write.
                told = Counter[bool]()
                if self._has_failed or not lines:
                    told, self._dropped = self._dropped, told  # what comes from now on follows that line
            if not lines and not told:
                return
            head = self._dropped_line(told) if told else b""
            is_written = self._write(head + b"".join(line for line, _ in lines))
            with self._changed:
                self._bytes -= sum(len(line) for line, _ in lines)
                self._has_failed = not is_written
                if not is_written:
                    self._dropped.update(told)
                    self._dropped.update(is_audit for _, is_audit in lines)
                self._changed.notify_all()
                if self._ends and not self._lines:
                    return

    def _dropped_line(self, dropped: Counter[bool]) -> bytes:
        text = "%d lines of the log were dropped, %d of them of the audit, since stderr took nothing"
        fields = {"dropped": dropped.total(), "dropped_audit": dropped[True]}
        made = logging.getLogger("qmq.log").makeRecord
        return self._line(made("qmq.log", logging.ERROR, "", 0, text, tuple(fields.values()), None, extra=fields))

    def _write(self, data: bytes) -> bool:
        """Write *data*, however long that takes; return False if the descriptor takes nothing now."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # whoever started this process has made it so
                select.select((), (self._descriptor,), ())
            except OSError:
                return False
        return True


def log_to_stderr(log_format: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Write all log records of this process from *level* up to stderr, unless ``logging`` has a handler already.

    A thread writes them, so a program goes on also when nobody reads its stderr: it drops lines then, and says later
    how many. Times are in UTC; "json" gives an object a line::

        qmq.log_to_stderr()
        logging.getLogger("shop").info("ready")
    """
    _log_with(JsonFormatter() if log_format == "json" else TextFormatter(), level)


def warn_on_stderr() -> None:
    """Write warnings to stderr as ``logging`` does by default, unless it has a handler; a thread does it."""
    _log_with(logging.Formatter("%(message)s"), "warning")


def _log_with(formatter: logging.Formatter, level: str) -> None:
    if not logging.getLogger().hasHandlers():
        handler = StderrHandler(_STDERR)
        handler.setFormatter(formatter)
        logging.basicConfig(handlers=[handler], level=level.upper())
