"""``qmq bench``: measure, show a growing table, save JSON."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table

from qmq.bench import suite
from qmq.bench.context import SIZES_OF_RUNS, Bench
from qmq.bench.values import GOALS, Summary, Value, shown, summarize
from qmq.cli.common.connect import tls_options
from qmq.cli.common.tables import print_table
from qmq.errors import InvalidOption

WIDTH = 120


@click.command(short_help="Measure the speed of QMQ on this machine.")
@click.option("--only", metavar="NAME,...", help="Take only these measurements; may be repeated.", multiple=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How often to take each.")
@click.option(
    "--size", type=click.Choice(list(SIZES_OF_RUNS)), default="quick", show_default=True, help="How much to send."
)
@click.option(
    "--json", "json_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Save the numbers."
)
@click.option("--goals", is_flag=True, help="Show the goals for two cores, and whether they were reached.")
@click.option("--server", metavar="URL", help="Measure this broker instead of a new one.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="A setting of the new broker.")
@click.option("--dir", "directory", metavar="DIR", type=click.Path(path_type=Path), help="Where the new broker writes.")
@click.option("--list", "as_list", is_flag=True, help="List the measurements.")
@tls_options
def bench(
    only: tuple[str, ...],
    rounds: int,
    size: str,
    json_file: Path | None,
    goals: bool,
    server: str | None,
    assignments: tuple[str, ...],
    directory: Path | None,
    as_list: bool,
) -> None:
    """Measure the speed of QMQ on this machine.

    Starts a broker on a directory that is deleted afterwards, and load generators as processes of their own. Every
    number is taken once a round; the table shows the median and how far the rounds spread.

    \b
    Examples:
      qmq bench --list
      qmq bench --size full --goals
    """
    if as_list:
        for name, measurement in suite.MEASUREMENTS.items():
            click.echo(f"{name:18}{(measurement.measure.__doc__ or '').splitlines()[0]}")
        return
    settings = dict(_assignment(text) for text in assignments)
    if server is not None and settings:
        raise InvalidOption("--set is for a new broker; leave it or --server out")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise InvalidOption(f"the directory of {json_file} does not exist; create it, or give another --json")
    named = [name for text in only for name in text.split(",") if name]
    if only and not named:
        raise InvalidOption("--only names no measurement; --list shows them")
    names = suite.chosen(named, own_broker=server is None)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qmq-bench-", dir=directory) as scratch:
        measured = Bench(Path(scratch), SIZES_OF_RUNS[size], server, settings)
        summaries = _measure(measured, names, rounds)
        found = suite.report(measured, summaries, shlex.join(["qmq", *sys.argv[1:]]), rounds, size)
    console = Console()
    console.width = max(console.width, WIDTH)
    print_table(_table(summaries, goals), console)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        click.echo(f"saved in {json_file}")


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(f"--set {text!r} is not key=value; `qmq config` lists the keys")
    return key.strip(), value.strip()


def _measure(bench: Bench, names: Sequence[str], rounds: int) -> list[Summary]:
    """Take all rounds, and report on stderr what is being measured."""
    console = Console(stderr=True)
    found: list[tuple[str, Value]] = []
    with Status("", console=console) if console.is_terminal else nullcontext() as status:

        def starting(number: int, name: str) -> None:
            text = f"round {number + 1} of {rounds}: {name}"
            if isinstance(status, Status):
                status.update(text)
            else:
                click.echo(text, err=True)

        for name, value in suite.run(bench, names, rounds, starting):
            found.append((name, value))
            if isinstance(status, Status):
                console.print(f"  {name}, {value.what}: {shown(value.value)} {value.unit}", highlight=False)
    return summarize(found)


def _table(summaries: Sequence[Summary], goals: bool) -> Table:
    table = Table("measurement", "what", box=None, header_style="bold", pad_edge=False)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("least to most", justify="right", style="dim", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    if goals:
        table.add_column("goal", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    before = ""
    for summary in summaries:
        name = summary.measurement if summary.measurement != before else ""
        if name and before:
            table.add_section()
        before = summary.measurement
        spread = f"{shown(min(summary.values))} to {shown(max(summary.values))}" if len(summary.values) > 1 else ""
        row = [name, summary.what, shown(summary.median), spread, summary.unit]
        if goals:
            row += [str(summary.goal or ""), _outcome(summary)]
        table.add_row(*row)
    if goals and not any((summary.measurement, summary.what) in GOALS for summary in summaries):
        table.caption = "none of these has a goal"
    return table


def _outcome(summary: Summary) -> str:
    if summary.reached is None:
        return ""
    return "[green]reached[/]" if summary.reached else "[red]not reached[/]"
