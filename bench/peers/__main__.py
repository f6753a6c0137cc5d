"""The command: measure, and save JSON, Markdown and plots; or make these again from saved JSON."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from bench.peers import registry, works
from bench.peers.report import plots, published, table
from bench.peers.running import Amount
from bench.peers.suite import Suite
from qmq.errors import InvalidOption

#: A second signal within this time is one with the first.
END_S: Final = 5.0

_ROOT = Path(__file__).parents[2]
_OUT = _ROOT / "bench-results" / "peers"


def split(text: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers between commas. Raises InvalidOption."""
    try:
        found = tuple(int(name) for name in split(text))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InvalidOption(f"{text!r} is not a list of numbers; give some as in 1000,10000")
    return found


@click.group()
def cli() -> None:
    """QMQ beside other brokers: the same work on each, in turn."""


@cli.command()
@click.option("--peers", "peer_names", default="", metavar="NAME,...", help="Measure these and QMQ; default: all.")
@click.option("--work", "work_names", default="", metavar="NAME,...", help="These; all without.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60),
    default=Amount().seconds,
    show_default=True,
    help="About how long one run takes.",
)
@click.option(
    "--sizes",
    default="100,1024,16384",
    show_default=True,
    metavar="BYTES,...",
    help="Body sizes: 100, 1024, 16384.",
)
@click.option(
    "--rates", default="1000,10000,50000", show_default=True, metavar="N,...", help="Messages a second at fixed rates."
)
@click.option("--backlog", type=int, default=Amount().backlog, show_default=True, help="Messages that wait.")
@click.option("--own-backlog", type=int, default=Amount().own_backlog, show_default=True, help="The same for QMQ.")
@click.option("--subjects", default="1,1000,100000", show_default=True, metavar="N,...", help="Numbers of subjects.")
@click.option(
    "--patience",
    "timeout_s",
    type=click.FloatRange(1, 3_600),
    default=Amount().timeout_s,
    show_default=True,
    help="Seconds after which to give up filling a backlog, making topics or joining.",
)
@click.option(
    "--limit",
    "most_s",
    type=click.FloatRange(1, 86_400),
    default=600.0,
    show_default=True,
    help="Seconds after which to give up a work of one broker; the others continue.",
)
@click.option("--resume", "resumes", is_flag=True, help="Skip what --out has from a run that was interrupted.")
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=_ROOT / ".peers",
    help="Where brokers are installed.",
)
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where brokers write."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=_OUT,
    help="Where it saves JSON, Markdown and plots.",
)
def run(
    peer_names: str,
    work_names: str,
    rounds: int,
    seconds: float,
    sizes: str,
    rates: str,
    backlog: int,
    own_backlog: int,
    subjects: str,
    timeout_s: float,
    most_s: float,
    resumes: bool,
    home: Path,
    directory: Path | None,
    out: Path,
) -> None:
    """Install missing brokers, measure, and save the results after every step."""
    amount = Amount(
        seconds, numbers(sizes), numbers(rates), backlog, own_backlog, numbers(subjects), timeout_s=timeout_s
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=directory) as scratch:
        suite = Suite(
            peers=registry.chosen(split(peer_names)),
            works=works.chosen(split(work_names)),
            rounds=rounds,
            amount=amount,
            home=home.absolute(),
            scratch=Path(scratch),
            command=shlex.join(["python", "-m", "bench.peers", *sys.argv[1:]]),
            most_s=most_s,
        )
        saved = out / "found.json"
        if resumes and saved.exists():
            suite.resume(json.loads(saved.read_text("utf-8")))

        def save() -> None:
            new = saved.with_suffix(".new")
            new.write_text(json.dumps(suite.found(), indent=1) + "\n", "utf-8")
            new.replace(saved)

        suite.install(click.echo)
        suite.measure(click.echo, save)
        save()
    _show([saved], out, draws=True)
    if suite.failures:
        raise SystemExit(f"{len(suite.failures)} steps failed; {out / 'found.md'} says which")


@cli.command()
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=_OUT)
@click.option(
    "--docs", is_flag=True, help="Write docs/BENCHMARKS.md too, its plots, and the JSON that both are made of."
)
@click.option("--draw/--no-draw", "draws", default=True, help="Plots, beside the Markdown.")
def show(files: tuple[Path, ...], out: Path, docs: bool, draws: bool) -> None:
    """Make Markdown and plots from the saved JSON of one or several runs; without FILES, of those in docs/."""
    docs_directory = _ROOT / "docs"
    chosen = list(files) or published.kept(docs_directory)
    if not chosen:
        raise InvalidOption("no figures are kept in docs/benchmarks/found; name the JSON of a run")
    _show(chosen, out, draws)
    if docs:
        if files:
            published.keep(docs_directory, chosen)
        published.write(docs_directory, draws)


def _read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text("utf-8")) for file in files]


def _markdown(files: list[Path]) -> str:
    return table.render(_read(files))


def _show(files: list[Path], out: Path, draws: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = _markdown(files)
    (out / "found.md").write_text(text, "utf-8")
    click.echo(text)
    if draws:
        plots.draw(_read(files), out)
    click.echo(f"saved in {out}")


class _End:
    """Ends as Ctrl-C does, with brokers and workers. A second signal (`timeout` sends two) must not interrupt that.

    One that comes later counts again: Python ignores what is raised while it runs a callback of its own.
    """

    def __init__(self) -> None:
        self._ends_at = float("-inf")

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if now - self._ends_at > END_S:
            self._ends_at = now
            raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _End())
    cli(prog_name="python -m bench.peers")
