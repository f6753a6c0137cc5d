"""The metrics of a relay, in the form that Prometheus reads, and the small server that gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from qmq.sql.relay import RelayCounts
from qmq.sql.shards import Backlog

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_TIMEOUT_S: Final = 10.0
_MOST_REQUEST: Final = 16_384


def metrics_text(counts: RelayCounts, backlog: Backlog | None) -> str:
    """Return the metrics of a relay; *backlog* is None if the database did not answer."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, value: float | None) -> None:
        if value is not None:
            lines.extend(
                (f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {float(value)!r}".removesuffix(".0"))
            )

    add("qmq_outbox_database_up", "gauge", "Whether the database answers.", float(backlog is not None))
    if backlog is not None:
        add("qmq_outbox_ready_rows", "gauge", "Rows that wait to be sent.", backlog.ready)
        age = 0.0 if backlog.oldest_us is None else max(time.time() - backlog.oldest_us / 1e6, 0.0)
        add("qmq_outbox_oldest_ready_age_seconds", "gauge", "Age of the oldest row that waits.", age)
        add("qmq_outbox_parked_rows", "gauge", "Rows that can never be sent.", backlog.parked)
    add("qmq_outbox_sent_rows_total", "counter", "Rows that this relay has sent.", counts.sent)
    add("qmq_outbox_newly_parked_rows_total", "counter", "Rows that this relay has parked.", counts.parked)
    add("qmq_outbox_failed_sends_total", "counter", "Sends that failed and are tried again.", counts.failed)
    add("qmq_outbox_cleaned_rows_total", "counter", "Sent rows, and rows of the inbox, that were deleted.",
        counts.cleaned)  # fmt: skip
    add("qmq_outbox_database_errors_total", "counter", "Errors of the database.", counts.database_errors)
    add("qmq_outbox_last_sent_timestamp_seconds", "gauge", "When this relay last sent a row.", counts.last_sent_at)
    add("qmq_outbox_start_time_seconds", "gauge", "When this relay started.", counts.started_at)
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def serving_metrics(host: str, port: int, text: Callable[[], Awaitable[str]]) -> AsyncIterator[int]:
    """Answer ``GET /metrics`` with *text*; gives the port. Raises OSError if it cannot listen there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(None, 2)
                if len(words) == 3 and words[0] in (b"GET", b"HEAD") and words[1].partition(b"?")[0] == b"/metrics":
                    status, body = "200 OK", (await text()).encode()
                else:
                    status, body = "404 Not Found", b"there is /metrics\n"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + (b"" if words[0] == b"HEAD" else body)
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_MOST_REQUEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
