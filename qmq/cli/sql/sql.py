"""``qmq sql``: query messages, subjects, groups, consumers and dead letters with SQL, and change nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qmq.cli.common.arguments import text_of
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.connect import admin_options
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.extras import needing_extra
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import is_for_people, output_options
from qmq.errors import InvalidOption

if TYPE_CHECKING:
    from qmq.sql.query.database import QueryDatabase

#: Places of bad bytes that are named; more are only counted.
_MOST_NAMED = 20


class _StatementGroup(CommandGroup):
    """A group that takes what is no command of it for a statement, and runs its command ``query`` on that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_help = set(args[:1]) & set(ctx.help_option_names)
        if args and not asks_help and args[0] not in self.commands and "query" in self.commands:
            args = ["query", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_StatementGroup, short_help="Query messages with SQL, or print the tables of outbox and inbox.")
def sql() -> None:
    """Query messages with SQL. `qmq sql "SELECT ..."` is short for `qmq sql query "SELECT ..."`.

    \b
    Examples:
      qmq sql "SELECT subject, count(*) FROM messages GROUP BY ALL"
      qmq sql query --help             the tables, and more examples
      qmq sql ddl --dialect mysql      the tables of outbox and inbox
    """


@sql.command(short_help="Query messages, groups and dead letters.")
@click.argument("query")
@click.option("--data", metavar="DIR", help="A data directory, without a broker.")
@click.option("--archive", metavar="DEST", help="An archive, also hdfs://.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with the names of the columns first.")
@click.option(
    "--parquet", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write a Parquet file."
)
@click.option(
    "--memory", metavar="SIZE", default="1GB", show_default=True,
    help="What the query may take of it; what needs more goes to temporary files.",
)  # fmt: skip
@output_options
@admin_options
def query(
    query: str, data: str | None, archive: str | None, as_csv: bool, parquet: Path | None, memory: str, as_json: bool,
    header: bool, server: str, timeout: float,
) -> None:  # fmt: skip
    """Run QUERY, a SELECT of DuckDB ("-": read it from stdin), over running brokers, a data directory, or an archive.
    Nothing changes: other statements, files and extensions are refused. It needs `pip install 'qmq[sql]'`.

    The tables: messages and subjects; with a broker also groups, consumers and dead_letters. `DESCRIBE messages` lists
    columns. Times are in UTC; bodies are bytes: decode(body) is text. Conditions on subject, stored_at, key and
    message_id spare reading what they rule out.

    On a terminal the first 1,000 rows are shown. Ends with 1 if bytes could not be read: then messages are missing.

    \b
    Examples:
      qmq sql "SELECT subject, count(*) FROM messages GROUP BY ALL"
      qmq sql "SELECT * FROM messages WHERE key = 'order-4421'" --json
      qmq sql --data /var/lib/qmq "SELECT max(stored_at) FROM messages
               WHERE subject LIKE 'shop.%'"
      qmq sql "SELECT group_name, reason, count(*) FROM dead_letters
               GROUP BY ALL ORDER BY 3 DESC"
      qmq sql --archive /mnt/archive "FROM messages" --parquet all.parquet
      qmq sql "SELECT decode(body)->>'total' FROM messages LIMIT 5"
    """
    if data is not None and archive is not None:
        raise click.UsageError("give either --data or --archive")
    if sum((as_json, as_csv, parquet is not None)) > 1:
        raise click.UsageError("give one of --json, --csv and --parquet")
    if parquet is not None and not parquet.name:
        raise click.UsageError("--parquet is empty; give the name of a file")
    text = sys.stdin.read() if query == "-" else text_of(query)
    location = data if data is not None else archive
    with needing_extra("sql", "qmq sql"):
        from qmq.sql.query.database import QueryDatabase
    with QueryDatabase(
        server=server if location is None else None, location=location, timeout=timeout, memory=text_of(memory)
    ) as database:
        _print(database, text, as_json=as_json, as_csv=as_csv, header=header, parquet=parquet)
        damages, unreadable = list(map(str, database.damages)), database.unreadable
    for damage in damages[:_MOST_NAMED]:
        click.echo(f"qmq: {damage}", err=True)
    unnamed = len(damages[_MOST_NAMED:]) + unreadable
    if unnamed:
        places = number(unnamed, "place" if not damages else "more place")
        click.echo(f"qmq: {places} could not be read: messages are missing; run qmq verify there", err=True)
    if damages or unreadable:
        click.get_current_context().exit(EXIT_FAILED)


def _print(
    database: QueryDatabase, query: str, *, as_json: bool, as_csv: bool, header: bool, parquet: Path | None
) -> None:
    from qmq.cli.sql import rows

    with database.run(query) as result:
        names = result.schema.names
        if parquet is not None:
            try:
                count = rows.write_parquet(result, parquet)
            except OSError as error:
                raise InvalidOption(f"--parquet {parquet} cannot be written: {error.strerror or error}") from error
            click.echo(f"{number(count, 'row')} in {parquet}")
        elif as_json:
            rows.print_json(result, names)
        elif as_csv:
            rows.print_csv(result, names)
        elif is_for_people(False):
            rows.print_for_people(result)
        else:
            rows.print_lines(result, names, header=header)


@sql.command(short_help="Print the tables of outbox and inbox.")
@click.option("--dialect", type=click.Choice(["postgresql", "mysql", "sqlite"]), required=True,
              help="The database that they are for; mysql also for MariaDB.")  # fmt: skip
def ddl(dialect: str) -> None:
    """Print the statements that make the tables of the outbox and the inbox, for a migration tool.

    \b
    Example:
      qmq sql ddl --dialect mysql > migrations/0007_qmq.sql
    """
    with needing_extra("sql", "qmq sql ddl"):
        from qmq.sql.tables import ddl as statements
    click.echo(statements(dialect), nl=False)
