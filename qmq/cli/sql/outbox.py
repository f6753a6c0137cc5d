"""``qmq outbox``: send the rows of an outbox, and see what waits there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.exceptions import Exit

from qmq.cli.common.arguments import Seconds
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.connect import run, server_option
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.extras import needing_extra
from qmq.cli.common.formatting import age_of, iso, number, visible
from qmq.cli.common.listing import is_for_people, json_option, print_object
from qmq.cli.common.standard_streams import echo_ready
from qmq.logs import log_to_stderr

if TYPE_CHECKING:
    from qmq.sql.shards import Backlog, Executor, ParkedRow

log = logging.getLogger("qmq.sql")

T = TypeVar("T")

_MOST_SHOWN: Final = 20
#: The lease of a command that only looks.
_LEASE_S: Final = 60.0


def db_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --db."""
    return click.option(
        "--db", metavar="URL", envvar="QMQ_DB", required=True,
        help="The database, as SQLAlchemy names it: postgresql+psycopg://user:secret@host/shop. Everybody here sees a "
        "secret in the list of processes, so rather use QMQ_DB.",
    )(command)  # fmt: skip


@click.group(cls=CommandGroup, short_help="Send the rows of an outbox; see what waits there.")
def outbox() -> None:
    """Send what programs wrote into the outbox of a database, and see what waits there.

    \b
    Examples:
      qmq outbox relay --db sqlite:///shop.db         send until SIGTERM
      qmq outbox status                               with QMQ_DB set: what waits
      qmq outbox retry --all                          send refused rows again
    """


@outbox.command(short_help="Send committed rows until SIGTERM.")
@db_option
@click.option("--poll", type=Seconds(above_0=True), default="100ms", show_default=True, metavar="S",
              help="How often to look for rows. PostgreSQL tells at once.")  # fmt: skip
@click.option("--keep", type=Seconds(), default="1d", show_default=True, metavar="S",
              help="How long rows that are sent stay in the table; 0: delete them at once.")  # fmt: skip
@click.option("--lease", type=Seconds(above_0=True), default="15s", show_default=True, metavar="S",
              help="How long a relay that is silent keeps rows from others, at least 10s.")  # fmt: skip
@click.option("--unique-for", type=Seconds(above_0=True), default="1h", show_default=True, metavar="S",
              help="The brokers' setting unique_for_ms: rows tried longer ago than half of it are parked.")  # fmt: skip
@click.option("--metrics-listen", metavar="HOST:PORT", envvar="QMQ_OUTBOX_METRICS_LISTEN",
              help="Serve /metrics for Prometheus there. Also from QMQ_OUTBOX_METRICS_LISTEN.")  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), envvar="QMQ_LOG_LEVEL",
              default="info", show_default=True, help="Also from QMQ_LOG_LEVEL.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), envvar="QMQ_LOG_FORMAT", default="text",
              show_default=True, help="Also from QMQ_LOG_FORMAT.")  # fmt: skip
@server_option
def relay(
    db: str, poll: float, keep: float, lease: float, unique_for: float, metrics_listen: str | None, log_level: str,
    log_format: str, server: str,
) -> None:  # fmt: skip
    """Send the committed rows of the outbox in a database to brokers, each once, until SIGTERM or Ctrl-C.

    Several relays share the work of one outbox. A row that the broker refuses for good is parked with the reason, and
    holds up no other; `qmq outbox status` shows it. It also deletes sent rows that are old, and old rows of the inbox.
    It needs `pip install 'qmq[sql]'`, and the driver of the database.

    \b
    Examples:
      qmq outbox relay --db sqlite:///shop.db --metrics-listen 127.0.0.1:9464
      QMQ_DB=postgresql+psycopg://shop:secret@db/shop qmq outbox relay
    """
    log_to_stderr(log_format, log_level)  # type: ignore[arg-type]  # one of the choices
    with needing_extra("sql", "qmq outbox"):
        from qmq.sql.databases import database_of, engine_of, listener_of
        from qmq.sql.serve import RELAYS, RelayOptions, serve

        engine = engine_of(db)
        databases = [database_of(engine) for _ in range(RELAYS)]

    def ready(metrics: str) -> None:
        echo_ready(f"ready, metrics on {metrics}" if metrics else "ready", "qmq.sql")
        log.info("sending the outbox of %s to %s", engine.url.render_as_string(hide_password=True), server)

    options = RelayOptions(server, poll, keep, lease, unique_for, metrics_listen)
    run(serve(databases, options, listener=listener_of(engine), on_ready=ready))


@outbox.command(short_help="Show what waits, and what was refused.")
@db_option
@json_option
def status(db: str, as_json: bool) -> None:
    """Show how many rows wait in the outbox and since when, how many are sent, and those that were refused.

    \b
    Examples:
      qmq outbox status --db sqlite:///shop.db
      qmq outbox status --json | jq .parked      with QMQ_DB set
    """
    with needing_extra("sql", "qmq outbox"):
        from qmq.sql.shards import backlog, check_tables, parked_rows

    def load(executor: Executor) -> tuple[Backlog, list[ParkedRow]]:
        check_tables(executor)
        return backlog(executor, counts_sent=True), parked_rows(executor, _MOST_SHOWN)

    counts, parked = run(_in_database(db, load))
    oldest = None if counts.oldest_us is None else datetime.fromtimestamp(counts.oldest_us / 1e6, UTC)
    if not is_for_people(as_json):
        rows = [
            {"id": row.id, "subject": row.subject, "created_at": iso(_time_of(row)), "reason": row.reason}
            for row in parked
        ]
        fields = {"ready": counts.ready, "oldest": iso(oldest), "parked": counts.parked, "sent": counts.sent}
        if as_json:
            print_object({**fields, "parked_rows": rows})
        else:
            click.echo("\t".join("" if value is None else str(value) for value in fields.values()))
        return
    since = f", the oldest for {age_of(oldest)}" if oldest else ""
    click.echo(f"{number(counts.ready, 'row')} to send{since}; {number(counts.sent or 0)} sent; "
               f"{number(counts.parked)} parked")  # fmt: skip
    for row in parked:
        click.echo(f"  {row.id}  {row.subject}  {age_of(_time_of(row))} ago: {visible(row.reason or '')}")
    if counts.parked > len(parked):
        click.echo(f"  and {number(counts.parked - len(parked))} more")
    if parked:
        click.echo("`qmq outbox retry` sends them again")


def _time_of(row: ParkedRow) -> datetime:
    return datetime.fromtimestamp(row.created_at_us / 1e6, UTC)


@outbox.command(short_help="Send refused rows again.")
@click.argument("ids", metavar="[ID]...", nargs=-1, type=int)
@click.option("--all", "takes_all", is_flag=True, help="All rows that are parked.")
@db_option
@json_option
def retry(ids: tuple[int, ...], takes_all: bool, db: str, as_json: bool) -> None:
    """Have rows of the outbox sent again that were parked, by their numbers in `qmq outbox status`, or all.

    Later rows of their keys went before them. Ends with 1 if there is no such row.

    \b
    Examples:
      qmq outbox retry 4421 4422 --db sqlite:///shop.db
      qmq outbox retry --all
    """
    if bool(ids) == takes_all:
        raise click.UsageError("give the numbers of rows, or --all")
    with needing_extra("sql", "qmq outbox"):
        from qmq.sql import shards

    def change(executor: Executor) -> int:
        shards.check_tables(executor)
        return shards.retry(executor, None if takes_all else ids)

    count = run(_in_database(db, change))
    if as_json:
        print_object({"retried": count})
    else:
        click.echo(f"{number(count, 'row')} will be sent again")
    if ids and count < len(set(ids)):
        click.echo(f"qmq: {number(len(set(ids)) - count, 'row is', 'rows are')} not parked", err=True)
        raise Exit(EXIT_FAILED)


async def _in_database(db: str, action: Callable[[Executor], T]) -> T:
    with needing_extra("sql", "qmq outbox"):
        from qmq.sql.databases import database_of, engine_of

        database = database_of(engine_of(db))
    async with database.connect(_LEASE_S) as connection:
        return await connection.run(action)
