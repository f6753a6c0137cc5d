"""``qmq repair``: rebuild derived files from the message log, and show what was done."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import number
from qmq.cli.common.progress import reading_bar
from qmq.cli.operate.verify import InUse, place_cells
from qmq.errors import DirectoryInUse
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.renew_id import is_renewal_unfinished, renew_id
from qmq.storage.verify.repair import Outcome, Repair, RepairResult
from qmq.storage.verify.repair import repair as repair_directory
from qmq.storage.verify.skip_ahead import skip_ahead as skip

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {Outcome.LEFT: "red", Outcome.GIVEN_UP: "red"}


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from qmq.settings import size_of

    try:
        return None if value is None else int(str(size_of(value)))
    except ValueError:
        raise click.BadParameter(f"{value!r:.80} is no size; give bytes, or a text such as 100GiB or 1TiB.") from None


@click.command(short_help="Rebuild the derived files of a data directory.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--skip-ahead", metavar="SIZE", callback=_size, help="Of an older copy: leave out so many positions, 1TiB."
)
@click.option("--new-id", is_flag=True, help="Of a copy that serves beside its original: give it another store id.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each fault, then a summary.")
@click.pass_context
def repair(context: click.Context, directory: Path, skip_ahead: int | None, new_id: bool, as_json: bool) -> None:
    """Rebuild the consumer log and the indexes of the data directory DIRECTORY from its message log if they are missing
    or wrong, and repair what else a start of a broker repairs.

    DIRECTORY belongs to a stopped or killed broker. It is checked before and after, as by qmq verify. If a segment of
    the message log is missing, nothing is changed: put it back, or let a broker start without it. Ends with 0 if
    everything is good afterwards; 1 if something bad remains or was lost, which is named; 2 if a broker is using the
    directory or it is no data directory.

    With --skip-ahead a broker that is started on an older copy (a backup) gives no message an id or a sequence that
    the lost newer directory had given: it continues behind SIZE more bytes of messages than there are. Choose more than
    was stored since the copy was made; no space is used, and the sequences in between are known as gaps.

    With --new-id the directory gets another store id, and each of its messages another message id: of two directories
    that serve at the same time, each needs its own. It writes the message log anew, segment by segment. An interrupted
    one is finished by another; until then no broker starts on the directory. Archives and streams take the directory
    for another one from then on.

    \b
    Examples:
      qmq repair /var/lib/qmq
      qmq repair /var/lib/qmq --skip-ahead 1TiB
      qmq repair /var/lib/qmq-copy --new-id
    """
    disk, renewed = Disk(), None
    try:
        if new_id and is_renewal_unfinished(directory, disk):
            renewed = renew_id(directory, disk, time.time_ns() // 1_000)
        with reading_bar() as progress:
            done = repair_directory(directory, disk, time.time_ns() // 1_000, progress)
        if new_id and renewed is None and done.is_whole:
            renewed = renew_id(directory, disk, time.time_ns() // 1_000)
    except DirectoryInUse as error:
        raise InUse(error) from error
    if renewed is not None:
        done.notes.append(
            f"{directory} is store {renewed.store_id.hex()} now, and was {renewed.former.hex()}: its messages have "
            "other ids than before"
        )
    elif new_id:
        done.notes.append(f"{directory} did not get another store id, as it is not whole")
    if skip_ahead is not None and done.is_whole:
        skipped = skip(directory, Disk(), time.time_ns() // 1_000, skip_ahead)
        done.notes.append(
            f"{directory} continues at position {', '.join(map(str, skipped.positions))}, and sequences were raised by "
            f"{skipped.raised_by}: no id is given twice"
        )
    elif skip_ahead is not None:
        done.notes.append(f"{directory} did not skip ahead, as it is not whole")
    if as_json:
        _print_json(done)
    elif sys.stdout.isatty():
        from rich.console import Console

        _print_table(done, Console())
    else:
        for treated in done.treated:
            click.echo(_line(treated))
        click.echo("\n".join([*done.notes, *_closing_lines(done)]))
    if not done.is_whole:
        context.exit(EXIT_FAILED)


def _line(treated: RepairResult) -> str:
    finding = treated.finding
    advice = f"; {finding.advice}" if treated.outcome is Outcome.LEFT else ""
    return f"{treated.outcome.value}: {finding.place}: {finding.what}{advice}"


def _print_json(done: Repair) -> None:
    for treated in done.treated:
        finding = treated.finding
        line = {"file": str(finding.file), "position": finding.position, "what": finding.what}
        line["outcome"] = treated.outcome.value
        line["advice"] = finding.advice if treated.outcome is Outcome.LEFT else None
        click.echo(json.dumps(line))
    summary = {
        "directory": str(done.directory),
        "whole": done.is_whole,
        **{outcome.value.replace(" ", "_"): count for outcome, count in _counts(done).items()},
        "left_out": done.left_out,
        "notes": done.notes,
    }
    click.echo(json.dumps(summary))


def _print_table(done: Repair, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from qmq.cli.common.tables import print_table

    if done.treated:
        table = Table(title=f"Repaired in {done.directory}", title_justify="left")
        for column in ("", "file", "at byte", "what was wrong", "what to do"):
            is_number = column == "at byte"
            table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
        for treated in done.treated:
            table.add_row(*_cells(treated, done.directory))
        print_table(table, console)
    for line in (*done.notes, *_closing_lines(done)):
        console.print(escape(line), style="green" if done.is_whole else "red", soft_wrap=True, highlight=False)


def _cells(treated: RepairResult, directory: Path) -> list[str]:
    from rich.markup import escape

    finding, outcome = treated
    return [
        f"[{_COLOURS.get(outcome, 'green')}]{outcome.value}[/]",
        *place_cells(finding, directory),
        escape(finding.what),
        escape(finding.advice) if outcome is Outcome.LEFT else "",
    ]


def _closing_lines(done: Repair) -> list[str]:
    if not done.treated:
        return [f"{done.directory}: nothing to repair"]
    counts = ", ".join(f"{outcome.value} {count:,}" for outcome, count in _counts(done).items() if count)
    lines = [f"{done.directory}: {counts}"]
    if done.left_out:
        lines.append(f"{number(done.left_out, 'more finding')} not shown, of files that have many")
    return lines


def _counts(done: Repair) -> dict[Outcome, int]:
    counts = Counter(treated.outcome for treated in done.treated)
    return {outcome: counts[outcome] for outcome in Outcome}
