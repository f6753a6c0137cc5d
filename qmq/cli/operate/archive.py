"""``qmq archive``: copy the sealed segments of a data directory to an archive."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from qmq.archive.write import Archived, archive_segments, open_run
from qmq.cli.common.connect import admin_options
from qmq.cli.common.formatting import number
from qmq.cli.common.progress import reading_bar
from qmq.cli.operate.archive_seal import seal_source
from qmq.cli.operate.archive_tables import archive_tables, summary_of_tables
from qmq.net.client.address import shown_location


def _now_us() -> int:
    return time.time_ns() // 1_000


@click.command(short_help="Copy sealed segments of a data directory to an archive.")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to",
    "destination",
    required=True,
    metavar="DEST",
    help="The archive: a path, or a file:// or hdfs:// URL.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["segments", "parquet", "both"]),
    default="segments",
    help="Copy segments byte for byte (default), write Parquet, or both.",
)
@click.option("--seal", is_flag=True, help="Have the broker of SOURCE seal its current segments first.")
@admin_options
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def archive(source: Path, destination: str, form: str, seal: bool, server: str, timeout: float, as_json: bool) -> None:
    """Copy every sealed segment of the data directory SOURCE to the archive DEST, byte for byte or as Parquet.

    A broker may be using SOURCE: segments that it still writes are left for a later run, unless --seal has it seal them
    (--server says where it is). Of a stopped broker's directory, all segments are copied. A run can be killed at any
    moment and repeated: it copies only what is missing, and a segment appears as a whole or not at all. Only one run at
    a time can write to DEST. Beside each segment whose copy was verified, a receipt is written. For DEST in HDFS: pip
    install 'qmq[hdfs]'.

    \b
    Examples:
      qmq archive /var/lib/qmq --to /mnt/archive
      qmq archive /var/lib/qmq --to /mnt/archive --as both --seal
    """
    done = tables = None
    if seal:
        seal_source(source, server, timeout)
    with open_run(source, destination, _now_us) as run:
        if form != "parquet":
            with reading_bar() as progress:
                done = archive_segments(run.source, run.files, run.lock, _now_us, progress)
        if form != "segments":
            with reading_bar() as progress:
                tables = archive_tables(run, progress)
    if as_json:
        said = {"destination": shown_location(destination), **(asdict(done) if done is not None else {})}
        click.echo(json.dumps({**said, **({"parquet": asdict(tables)} if tables is not None else {})}))
    else:
        lines = [_summary(done)] if done is not None else []
        lines += [summary_of_tables(tables)] if tables is not None else []
        click.echo("\n".join(f"{shown_location(destination)}: {line}" for line in lines))
    if tables is not None and (tables.damages or tables.bad_files):
        click.get_current_context().exit(1)


def _summary(done: Archived) -> str:
    size = f"{number(done.copied_bytes, 'byte')}, {number(done.messages, 'message')}"
    parts = [
        f"{number(done.copied, 'segment')} copied ({size})",
        f"{done.kept:,} there already",
    ]
    if done.receipts:
        parts.append(f"{number(done.receipts, 'receipt')} written")
    if done.left:
        parts.append(f"{done.left:,} left, which a broker still writes")
    if done.dropped:
        parts.append(f"{done.dropped:,} dropped by retention before they could be copied")
    if done.removed:
        parts.append(f"{number(done.removed, 'unfinished file')} of earlier runs removed")
    return ", ".join(parts)
