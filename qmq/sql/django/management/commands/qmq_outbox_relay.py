"""``manage.py qmq_outbox_relay``: send the rows of the outbox in a database of Django."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from qmq import log_to_stderr
from qmq.durations import seconds_of
from qmq.errors import QmqError
from qmq.sql.django.databases import DjangoDatabase, listener_of
from qmq.sql.serve import RELAYS, RelayOptions, serve


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Sends rows until SIGTERM or Ctrl-C."""

    help = "Send the committed rows of the outbox to QMQ brokers, each once, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options; they are those of ``qmq outbox relay``."""
        parser.add_argument("--using", default="default", help="the alias of the database")
        parser.add_argument("--server", help="the brokers (default: QMQ_SERVER, or qmq://127.0.0.1:20881)")
        parser.add_argument("--poll", default="100ms", help="how often to look for rows (100ms)")
        parser.add_argument("--keep", default="1d", help="how long rows that are sent stay (1d; 0: not at all)")
        parser.add_argument("--lease", default="15s", help="how long a silent relay keeps rows from others (15s)")
        parser.add_argument("--unique-for", default="1h", help="the brokers' setting unique_for_ms (1h)")
        parser.add_argument("--metrics-listen", help="HOST:PORT to serve /metrics on")
        parser.add_argument("--log-format", choices=["text", "json"], default="text")

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the relay."""
        log_to_stderr(options["log_format"], "info")
        using = options["using"]
        try:
            times = {name: seconds_of(f"--{name}", options[name]) for name in ("poll", "keep", "lease", "unique_for")}
            chosen = RelayOptions(server=options["server"], metrics_listen=options["metrics_listen"], **times)
            asyncio.run(
                serve(
                    [DjangoDatabase(using) for _ in range(RELAYS)],
                    chosen,
                    listener=listener_of(using),
                    on_ready=self._ready,
                ),
            )
        except QmqError as error:
            raise CommandError(str(error)) from error

    def _ready(self, metrics: str) -> None:
        self.stdout.write(f"ready, metrics on {metrics}" if metrics else "ready")
        self.stdout.flush()
