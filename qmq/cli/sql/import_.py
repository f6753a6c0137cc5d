"""``qmq import``: send the rows of a database, each once, and let groups begin where their offset was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qmq.cli.common.arguments import text_of
from qmq.cli.common.connect import admin_options
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.extras import needing_extra
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import print_object
from qmq.cli.common.progress import Counting
from qmq.errors import InvalidOption

if TYPE_CHECKING:
    from qmq.sql.importing.run import ImportSummary

#: Options that say what becomes of the columns; they belong to what an import is.
_MAPPING = (
    "subject", "subject_column", "id", "body", "keys", "tags", "order_key", "priority", "time", "properties",
    "json_properties",
)  # fmt: skip


def _columns(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of columns, given one by one or with commas between."""
    return tuple(name.strip() for given in value for name in given.split(",") if name.strip())


@click.command("import", short_help="Send the rows of a database, each once.")
@click.option(
    "--db",
    metavar="URL",
    required=True,
    envvar="QMQ_DB",
    help="The database, as SQLAlchemy names it. Also from QMQ_DB, which no list of processes shows.",
)
@click.option("--query", metavar="SELECT", required=True, help="The rows, one a message.")
@click.option("--subject", metavar="S", help="The subject of all messages.")
@click.option("--subject-column", metavar="COL", help="The column with the subject of each.")
@click.option(
    "--id",
    metavar="COL",
    default="id",
    show_default=True,
    help="The column that tells rows apart: whole numbers or texts, sent in their order.",
)
@click.option("--body", metavar="COL", default="body", show_default=True, help="The column with the body.")
@click.option(
    "--key",
    "keys",
    metavar="COL",
    multiple=True,
    callback=_columns,
    help="A column with a key; may be given several times.",
)
@click.option("--tags", metavar="COL", help="A column with tags, with commas between.")
@click.option("--order-key", metavar="COL", help="The column with the order key.")
@click.option("--priority", metavar="COL", help="The column with low, normal (or middle), high, or 0, 1, 2.")
@click.option("--time", metavar="COL", help="A column with a time, which becomes the property `time`.")
@click.option(
    "--properties",
    metavar="COL,...",
    multiple=True,
    callback=_columns,
    help="RowColumns that become properties of the same name.",
)
@click.option(
    "--json-properties", metavar="COL", help="A column with an object of JSON, whose fields become properties."
)
@click.option(
    "--group-offsets",
    metavar="SELECT",
    help="For each group the id of the last row that it is through with; with --priority for each priority.",
)
@click.option(
    "--follow", "follows", metavar="PREFIX", multiple=True, help="What these groups follow. [default: --subject]"
)
@click.option("--allow-repeats", is_flag=True, help="Let groups whose offsets cross get some messages again.")
@click.option(
    "--skip-others",
    is_flag=True,
    help="Let these groups begin behind messages that others have sent, and not get them.",
)
@click.option(
    "--name", metavar="NAME", help="The name of the import. [default: made of --db and all that says what is sent]"
)
@click.option(
    "--state",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="How far it is; repeat the import with the same file. [default: ./NAME.state]",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What a row does that can be no message: end the import, or be left out and counted.",
)
@click.option(
    "--rejected",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where rows go that were left out. [default: ./NAME.rejected]",
)
@click.option("--dry-run", is_flag=True, help="Look at all rows, and say what would be sent; no broker is needed.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@admin_options  # fmt: skip
def import_(
    db: str, query: str, group_offsets: str | None, follows: tuple[str, ...], allow_repeats: bool, skip_others: bool,
    name: str | None, state: Path | None, on_error: Any, rejected: Path | None, dry_run: bool, as_json: bool,
    server: str, timeout: float, **mapping: Any,
) -> None:  # fmt: skip
    """Send the rows of a SELECT to a broker, each as one message and once: an import can be killed and repeated, with
    the same options and the file --state. Repeated later, it sends the rows that came since.

    With --group-offsets, groups are made that begin where their offset was; rows that all of them are through with are
    not sent. Messages say in their properties `import` and `import-id` which row they were. It needs `pip install
    'qmq[sql]'`, and the driver of the database.

    Ends with 1 if rows are left in the table that were committed too late. Let programs send to the subject themselves
    only when the import has run once: docs/import.md says how to switch over.

    \b
    Examples:
      qmq import --db mysql+pymysql://app@db/shop --subject shop.mail \\
          --query "SELECT id, body, ref_key FROM msg_high_t" --key ref_key
      qmq import --db sqlite:///queue.db --subject shop.mail --dry-run \\
          --query "SELECT id, body FROM mail" \\
          --group-offsets "SELECT group_id, last_id FROM groups"
    """
    mapping = {each: _text(value) for each, value in mapping.items()}
    name, group_offsets = _text(name), _text(group_offsets)
    follows = _text(follows) or ((mapping["subject"],) if mapping["subject"] else ())
    if group_offsets is not None and not follows:
        raise click.UsageError("with --subject-column, say with --follow what the groups of --group-offsets follow")
    if "," in server:
        raise InvalidOption("an import sends to one broker; give one --server, and the rows of others to others")
    with needing_extra("sql", "qmq import"):
        from qmq.sql.importing.rows import RowColumns
        from qmq.sql.importing.run import ImportRun
        from qmq.sql.importing.source import RowSource
        from qmq.sql.importing.state import ImportStateFile
    columns = RowColumns(**mapping)
    what = json.dumps({"query": " ".join(query.split()), **{each: mapping[each] for each in _MAPPING if mapping[each]}})
    source = RowSource(text_of(db), text_of(query), columns)
    try:
        if name is None:
            name = "import-" + hashlib.sha256(f"{source.shown_url} {what}".encode()).hexdigest()[:12]
        state, rejected = state or Path(f"{name}.state"), rejected or Path(f"{name}.rejected")
        with Counting("rows") as counting:
            run = ImportRun(
                source, columns, name, query=what, state=ImportStateFile(state), rejected=rejected, on_error=on_error,
                progress=counting.show,
            )  # fmt: skip
            if dry_run:
                summary = run.look(group_offsets, allow_repeats=allow_repeats)
            else:
                summary = run.run(
                    server, group_offsets, follows, allow_repeats=allow_repeats, skip_others=skip_others,
                    timeout=timeout,
                )  # fmt: skip
    finally:
        source.close()
    _print(summary, state, rejected, dry_run=dry_run, as_json=as_json)
    if summary.late or (dry_run and summary.rejected_now and on_error == "fail"):
        click.get_current_context().exit(EXIT_FAILED)


def _text(value: Any) -> Any:
    """Return the value of an option with its texts in UTF-8. Raises InvalidOption."""
    if isinstance(value, tuple):
        return tuple(map(text_of, value))
    return text_of(value) if isinstance(value, str) else value


def _print(summary: ImportSummary, state: Path, rejected: Path, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        counts = [
            {"subject": subject, "priority": priority, "rows": count}
            for (subject, priority), count in sorted(summary.counts.items())
        ]
        print_object({
            "name": summary.name, "dry_run": dry_run, "imported": summary.imported, "rejected": summary.rejected,
            "imported_now": summary.imported_now, "rejected_now": summary.rejected_now, "late": summary.late,
            "groups": summary.groups, "state": str(state), "rejected_file": str(rejected),
            **({"counts": counts} if dry_run else {}),
        })  # fmt: skip
        return
    for reason in summary.reasons:
        click.echo(f"qmq: {reason}", err=True)
    more = summary.rejected_now - len(summary.reasons)
    if more > 0:
        click.echo(f"qmq: {number(more, 'more row')} rejected", err=True)
    click.echo(f"{summary.name}: {_looked(summary) if dry_run else _sent(summary, state, rejected)}")
    if summary.late:
        click.echo(
            f"qmq: {number(summary.late, 'row')} came into the table behind rows with higher ids, and were not sent: a "
            "transaction was still open. Send them by an import of their own, with another --name; next time import "
            "when nobody writes any more",
            err=True,
        )


def _looked(summary: ImportSummary) -> str:
    parts = [f"would send {number(summary.imported_now, 'row')}"]
    for (subject, priority), count in sorted(summary.counts.items())[:20]:
        parts.append(f"{count:,} to {subject}" + ("" if priority == "normal" else f" with {priority} priority"))
    if len(summary.counts) > 20:
        parts.append(f"and to {number(len(summary.counts) - 20, 'more subject')}")
    if summary.rejected_now:
        parts.append(f"{number(summary.rejected_now, 'row')} can be no message")
    if summary.groups:
        parts.append(f"make groups {', '.join(summary.groups)}")
    return ", ".join(parts)


def _sent(summary: ImportSummary, state: Path, rejected: Path) -> str:
    parts = [f"{number(summary.imported, 'row')} imported"]
    if summary.imported != summary.imported_now:
        parts.append(f"{summary.imported_now:,} of them now")
    if summary.rejected:
        parts.append(f"{number(summary.rejected, 'row')} left out, see {rejected}")
    if summary.groups:
        parts.append(f"made groups {', '.join(summary.groups)}")
    return ", ".join(parts) + f"; to go on, repeat it with {state}"
