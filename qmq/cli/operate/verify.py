"""``qmq verify``: check every file of a data directory, and show the findings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qmq.cli.common.errors import EXIT_FAILED, EXIT_USAGE, CommandFailed
from qmq.cli.common.formatting import number
from qmq.cli.common.progress import reading_bar
from qmq.daemon.verify import verify as verify_directory
from qmq.errors import DirectoryInUse
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import Finding, VerifyReport

if TYPE_CHECKING:
    from rich.console import Console


class InUse(CommandFailed):
    """The error that a broker is using the directory."""

    exit_code = EXIT_USAGE


@click.command(short_help="Check every file of a data directory.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each finding, then a summary.")
@click.pass_context
def verify(context: click.Context, directory: Path, as_json: bool) -> None:
    """Check every file of the data directory DIRECTORY, without changing anything.

    DIRECTORY belongs to a stopped or killed broker, or is a copy of that of a running one. Ends with 0 if everything is
    good, 1 if something is bad, 2 if a broker is using the directory. What a stop may leave behind, such as an
    unfinished tail, is reported as a note and is not bad.

    \b
    Example:
      qmq verify /var/lib/qmq
    """
    try:
        with reading_bar() as progress:
            report = verify_directory(directory, Disk(), progress)
    except DirectoryInUse as error:
        raise InUse(error) from error
    if as_json:
        _print_json(report)
    elif sys.stdout.isatty():
        from rich.console import Console

        _print_table(report, Console())
    else:
        for finding in report.findings:
            click.echo(str(finding))
        click.echo("\n".join(_closing_lines(report)))
    if not report.is_good:
        context.exit(EXIT_FAILED)


def _print_json(report: VerifyReport) -> None:
    for finding in report.findings:
        click.echo(json.dumps({**finding._asdict(), "file": str(finding.file)}))
    counts = {
        kind: {"files": count.files, "bytes": count.bytes, "records": count.records}
        for kind, count in report.counts.items()
    }
    summary = {
        "directory": str(report.directory),
        "good": report.is_good,
        "faults": report.faults,
        "notes": report.notes,
        "left_out": report.left_out,
        "read": counts,
    }
    click.echo(json.dumps(summary))


def _print_table(report: VerifyReport, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from qmq.cli.common.tables import print_table

    if report.findings:
        table = Table(title=f"Found in {report.directory}", title_justify="left")
        for column in ("", "file", "at byte", "what", "what to do"):
            is_number = column == "at byte"
            table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
        for finding in report.findings:
            table.add_row(*_cells(finding, report.directory))
        print_table(table, console)
    read = Table(title="Read", title_justify="left")
    for column in ("kind", "files", "records", "bytes"):
        read.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for kind, count in report.counts.items():
        read.add_row(kind, f"{count.files:,}", f"{count.records:,}", f"{count.bytes:,}")
    print_table(read, console)
    for line in _closing_lines(report):
        console.print(escape(line), style="green" if report.is_good else "red", soft_wrap=True, highlight=False)


def _cells(finding: Finding, directory: Path) -> list[str]:
    from rich.markup import escape

    colour = "red" if finding.severity == "fault" else "yellow"
    return [
        f"[{colour}]{finding.severity}[/]",
        *place_cells(finding, directory),
        escape(finding.what),
        escape(finding.advice),
    ]


def place_cells(finding: Finding, directory: Path) -> list[str]:
    """Return the file, relative to *directory*, and the position of a finding as cells of a table."""
    from rich.markup import escape

    file = finding.file.relative_to(directory) if finding.file.is_relative_to(directory) else finding.file
    return [escape(str(file)), "" if finding.position is None else f"{finding.position:,}"]


def _closing_lines(report: VerifyReport) -> list[str]:
    files = sum(count.files for count in report.counts.values())
    lines = [f"{report.directory}: {number(files, 'file')} read, faults {report.faults:,}, notes {report.notes:,}"]
    if report.left_out:
        lines.append(f"{number(report.left_out, 'more finding')} not shown, of files that have many")
    return lines
