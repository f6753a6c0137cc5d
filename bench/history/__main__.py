"""The command: measure, and save JSON and Markdown; or write the part of docs/BENCHMARKS.md again from saved JSON."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from bench.history import archives, table
from bench.history.orders import Amount, total, write_orders
from bench.history.queries import READY, Job
from bench.parts import put_part
from qmq.bench.processes import Child
from qmq.bench.suite import machine
from qmq.bench.values import BenchFailed, Summary, Value

_ROOT = Path(__file__).parents[2]
_OUT = _ROOT / "bench-results" / "history"
PARTS = ("spark", "parquet", "directory", "hdfs")
_PACKAGES = ("pyspark", "pyarrow", "numpy", "hdfs-native")
_QUERIES = (
    "count by subject",
    "count by subject, all columns but the body",
    "sum of lengths, bodies alone",
    "sum of lengths, all columns",
    "noop write, all columns",
    READY,
)
#: How often a session runs each query: at the first time the JVM compiles.
_TIMES = 3

Found = Iterator[tuple[str, Value]]


@click.group()
def cli() -> None:
    """Messages in Spark, in archives and as Parquet."""


@cli.command()
@click.option("--messages", type=click.IntRange(10_000), default=Amount().messages, show_default=True)
@click.option("--body-bytes", type=click.IntRange(100), default=Amount().body_bytes, show_default=True)
@click.option("--subjects", type=click.IntRange(20, 100_000), default=Amount().subjects, show_default=True)
@click.option("--segment-bytes", type=click.IntRange(32 << 20), default=Amount().segment_bytes, show_default=True)
@click.option("--headers", is_flag=True, help="Messages with a key, a tag and two properties.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--only", default=",".join(PARTS), show_default=True, metavar="PART,...", help="These parts.")
@click.option("--quick", is_flag=True, help="One round, and no Parquet by Spark: within four minutes.")
@click.option("--datanodes", type=click.IntRange(1, 3), default=1, show_default=True, help="DataNodes and replicas.")
@click.option("--driver-memory", default="1g", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's session.")
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where it writes."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=_OUT, help="Where it saves.")
def run(
    messages: int, body_bytes: int, subjects: int, segment_bytes: int, headers: bool, rounds: int, only: str,
    quick: bool, datanodes: int, driver_memory: str, settings: tuple[str, ...], directory: Path | None, out: Path,
) -> None:  # fmt: skip
    """Make messages, measure, and save the results."""
    amount = Amount(messages, body_bytes, subjects, headers=headers, segment_bytes=segment_bytes)
    parts = [part for part in PARTS if part in only.split(",")]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-history-", dir=directory) as scratch:
        rounds = 1 if quick else rounds
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "bench.history", *sys.argv[1:]]),
            "machine": machine(Path(scratch)),
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "amount": amount._asdict(),
            "rounds": rounds,
            "datanodes": datanodes,
        }
        bench = _Bench(Path(scratch), amount, quick, datanodes, Job([], 0, "", 2, driver_memory, _pairs(settings)))
        for number in range(rounds):
            for part in parts:
                bench.measure(number, part)
    found = {**about, "bytes": bench.segment_bytes, "numbers": [one.as_json() for one in bench.summaries()]}
    (out / "found.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    _show(out)


@cli.command()
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path), default=_OUT / "found.json")
def show(file: Path) -> None:
    """Write the part of docs/BENCHMARKS.md about Spark, HDFS and Parquet, from saved JSON."""
    text = table.render(json.loads(file.read_text("utf-8")))
    put_part(_ROOT / "docs" / "BENCHMARKS.md", text)
    click.echo(text)


def _show(out: Path) -> None:
    text = table.render(json.loads((out / "found.json").read_text("utf-8")))
    (out / "found.md").write_text(text, "utf-8")
    click.echo(text)
    click.echo(f"saved in {out}")


def _pairs(settings: tuple[str, ...]) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in settings)


class _Bench:
    """The messages, and the results so far."""

    def __init__(self, scratch: Path, amount: Amount, quick: bool, datanodes: int, job: Job) -> None:
        self._scratch = scratch
        self._amount = amount
        self._quick = quick
        self._datanodes = datanodes
        self._job = job
        self._values: dict[tuple[str, str, str], list[float]] = {}
        self._source = scratch / "qmq"
        click.echo(f"writing {amount.messages:,} messages")
        self._contents = write_orders(self._source, amount)
        self._messages, self._body_bytes, _ = total(self._contents)
        self.segment_bytes = archives.segment_bytes(self._source)

    def measure(self, number: int, part: str) -> None:
        """Measure one part of a round."""
        click.echo(f"round {number + 1}: {part}")
        for what, value in getattr(self, f"_{part}")(number):
            click.echo(f"    {what}, {value.what}: {value.value:,.4g} {value.unit}")
            self._values.setdefault((what, value.what, value.unit), []).append(value.value)

    def summaries(self) -> list[Summary]:
        """Return the summary of each number over the rounds."""
        return [
            Summary(what, name, unit, tuple(values), table.GOALS.get((what, name)))
            for (what, name, unit), values in self._values.items()
        ]

    # --- parts -------------------------------------------------------------------------------------------------------

    def _spark(self, _: int) -> Found:
        place = str(self._source)
        queries = [(query, place) for query in _QUERIES for _ in range(_TIMES)]
        if not self._quick:
            queries.append(("Parquet by Spark", place))
        seen: set[str] = set()
        for told in self._session([*queries, ("check", place)]):
            if "memory" in told:
                yield from _memory("session", told["memory"])
                continue
            query = told["query"]
            name = query if query == "session" or query in seen else f"{query}, first time"
            seen.add(query)
            self._check(query, told["rows"])
            if query != "check":
                yield from self._rates(name, told["seconds"], told["cpu_s"])

    def _session(self, queries: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        job = self._job._replace(queries=queries, messages=self._messages, scratch=str(self._scratch))
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "spark"), os.environ.get("PYTHONPATH", "")])
        os.environ.update(PYTHONPATH=paths, SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable)
        arguments = ["-m", "bench.history.queries", json.dumps(job._asdict())]
        with Child("the session", arguments, self._scratch / "session.errors") as child:
            told = 0
            while told < len(queries) + 2:
                line = child.read_line()
                if line.startswith("{"):  # Java may print other lines
                    told += 1
                    yield json.loads(line)

    def _check(self, query: str, rows: list[list[Any]]) -> None:
        """Raise BenchFailed unless the answer of a query equals what was written."""
        expected: list[list[Any]]
        if query == "check":
            expected = [[subject, *tally] for subject, tally in self._contents.items()]
        elif query.startswith("count by subject"):
            expected = [[subject, tally.messages] for subject, tally in self._contents.items()]
        elif query.startswith("sum of lengths"):
            expected = [[self._messages, self._body_bytes]]
        elif query.startswith("Parquet"):
            expected = [[self._messages]]
        else:
            expected = []
        if sorted(rows) != sorted(expected):
            raise BenchFailed(f"{query} gave {str(sorted(rows))[:300]} instead of {str(sorted(expected))[:300]}")

    def _rates(self, what: str, seconds: float, cpu_s: float) -> Found:
        yield what, Value("time", seconds, "s")
        yield what, Value("processor time", cpu_s, "cpu s")
        if what != "session":
            yield what, Value("messages", self._messages / seconds, "msg/s")
            yield what, Value("bodies", self._body_bytes / seconds / 1e6, "MB/s")

    def _directory(self, number: int) -> Found:
        plain = archives.copy_plainly(self._source, self._scratch / "plain", synced=False)
        synced = archives.copy_plainly(self._source, self._scratch / "plain", synced=True)
        destination = self._scratch / f"archive-{number}"
        archived = archives.archive(self._source, str(destination))
        shutil.rmtree(destination)
        yield from self._copied("copy to a directory, not synced", plain)
        yield from self._copied("copy to a directory, synced", synced)
        yield from self._copied("archive to a directory", archived)
        yield "archive to a directory", Value("of the copy, not synced", plain[0] / archived[0], "")
        yield "archive to a directory", Value("of the copy, synced", synced[0] / archived[0], "")

    def _hdfs(self, number: int) -> Found:
        directory = self._scratch / f"hdfs-{number}"
        directory.mkdir()
        with archives.hdfs(directory, self._datanodes) as hdfs:
            plain = hdfs.put(self._source, "plain")
            hdfs.remove("plain")
            archived = archives.archive(self._source, f"{hdfs.address}/archive", hdfs.settings)
        shutil.rmtree(directory)
        yield from self._copied("hdfs dfs -put", plain)
        yield from self._copied("archive to HDFS", archived)
        yield "archive to HDFS", Value("of hdfs dfs -put", plain[0] / archived[0], "")

    def _parquet(self, number: int) -> Found:
        destination = self._scratch / f"parquet-{number}"
        seconds, cpu_s, memory = archives.archive_as_parquet(self._source, destination)
        size = sum(path.stat().st_size for path in destination.rglob("*.parquet"))
        yield from self._copied("archive as Parquet", (seconds, cpu_s, memory))
        yield "archive as Parquet", Value("time a GB", seconds / self.segment_bytes * 1e9, "s")
        yield "archive as Parquet", Value("size, of the segments", size / self.segment_bytes, "")
        for told in self._session([("check", str(destination))]):
            if told.get("query") == "check":
                self._check("check", told["rows"])
        shutil.rmtree(destination)

    def _copied(self, what: str, found: archives.Taken) -> Found:
        seconds, cpu_s, memory = found
        yield what, Value("time", seconds, "s")
        yield what, Value("processor time", cpu_s, "cpu s")
        yield what, Value("segments", self.segment_bytes / seconds / 1e6, "MB/s")
        yield from _memory(what, {name: size for name, size in memory.items() if name.startswith("python")})


def _memory(what: str, most: dict[str, int]) -> Found:
    for name, size in sorted(most.items()):
        yield what, Value(f"most RssAnon of {name}", size / (1 << 20), "MiB")


if __name__ == "__main__":
    cli(prog_name="python -m bench.history")
