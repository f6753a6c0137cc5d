"""``qmq serve``: run a broker in the foreground."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qmq.cli.common.signals import noting_hangups
from qmq.cli.common.standard_streams import echo_ready
from qmq.errors import InvalidOption
from qmq.logs import log_to_stderr
from qmq.settings import Settings, load

if TYPE_CHECKING:
    from qmq.daemon.main import RunningBroker


@click.command(short_help="Run a broker on a data directory.")
@click.option("--config", metavar="FILE.toml", type=click.Path(path_type=Path), help="Read settings from a file.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Set one setting; may be repeated.")
@click.option("--data-dir", metavar="DIR", help="The data directory.  [default: ./qmq-data]")
@click.option(
    "--listen",
    metavar="HOST:PORT,...",
    help="Port 0 takes a free one; [::] is all addresses.  [default: 127.0.0.1:20881]",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text]")
def serve(
    config: Path | None,
    assignments: tuple[str, ...],
    data_dir: str | None,
    listen: str | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run a broker on a data directory, until Ctrl-C or SIGTERM.

    When it is ready it prints one line on stdout (on a terminal the log says it); its log goes to stderr, with times in
    UTC. `qmq config` shows every
    setting. Environment variables such as QMQ_LISTEN and QMQ_DATA_DIR set them too, and override --config. At SIGHUP it
    reads the file of --config again, applies the settings that can change while it runs, and logs them.

    \b
    Examples:
      qmq serve
      qmq serve --data-dir /var/lib/qmq --listen 10.0.0.5:20881
      qmq serve --config qmq.toml --set retention_ms=604800000
    """
    with noting_hangups() as hung_up:
        flags = {"data_dir": data_dir, "listen": listen, "log_level": log_level, "log_format": log_format}
        _serve(config, assignments, flags, hung_up)


def _serve(
    config: Path | None, assignments: tuple[str, ...], flags: dict[str, str | None], hung_up: Callable[[], bool]
) -> None:
    settings = load(config, assignments, flags, os.environ)
    log_to_stderr(settings.log_format, settings.log_level)
    from qmq.daemon import main as wiring

    def read_again() -> Settings:
        assert config is not None
        if config.exists() and not config.is_file():  # opening a pipe could block the broker
            raise InvalidOption(f"the settings file {config} cannot be read again: it is no regular file; give one")
        return load(config, assignments, flags, os.environ)

    try:
        wiring.run(settings, _ready, read_again if config is not None else None, hung_up)
    except KeyboardInterrupt:
        logging.getLogger("qmq.broker").info("stopped while the data directory was opened")


def _ready(broker: RunningBroker) -> None:
    if sys.stdout.isatty() and sys.stderr.isatty() and logging.getLogger("qmq.broker").isEnabledFor(logging.INFO):
        return  # its log has said so on the same terminal
    echo_ready(f"ready on {broker.shown_urls}, data in {shown_directory(broker.settings.data_dir)}", "qmq.broker")


def shown_directory(path: Path) -> str:
    """Return a directory as people write it: ./NAME if it is relative."""
    return str(path) if path.is_absolute() or path.parts[:1] in ((), ("..",)) else f"./{path}"
