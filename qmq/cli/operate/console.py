"""``qmq console``: pages, JSON, metrics and events about brokers, for browsers and Prometheus."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from qmq.cli.common.connect import run, server_option
from qmq.cli.common.extras import needing_extra
from qmq.cli.common.standard_streams import echo_ready
from qmq.errors import InvalidOption
from qmq.logs import log_to_stderr


@click.command(short_help="Show brokers in a browser.")
@click.option(
    "--listen", metavar="HOST:PORT", envvar="QMQ_CONSOLE_LISTEN", default="127.0.0.1:20880", show_default=True,
    help="Port 0 takes a free one. Also from QMQ_CONSOLE_LISTEN.",
)  # fmt: skip
@click.option(
    "--tls-cert-file", metavar="FILE", type=click.Path(path_type=Path), envvar="QMQ_CONSOLE_TLS_CERT_FILE",
    help="PEM file with the certificate that browsers get. Also from QMQ_CONSOLE_TLS_CERT_FILE.",
)  # fmt: skip
@click.option(
    "--tls-key-file", metavar="FILE", type=click.Path(path_type=Path), envvar="QMQ_CONSOLE_TLS_KEY_FILE",
    help="PEM file with its key. Also from QMQ_CONSOLE_TLS_KEY_FILE.",
)  # fmt: skip
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), envvar="QMQ_LOG_LEVEL", default="info",
    show_default=True, help="Also from QMQ_LOG_LEVEL.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), envvar="QMQ_LOG_FORMAT", default="text", show_default=True,
    help="Also from QMQ_LOG_FORMAT.",
)  # fmt: skip
@server_option
def console(
    listen: str,
    tls_cert_file: Path | None,
    tls_key_file: Path | None,
    log_level: str,
    log_format: str,
    server: str,
) -> None:
    """Serve the console until Ctrl-C or SIGTERM: pages for a browser, JSON under /api, /metrics, /healthz, /readyz.

    It is a client in a process of its own. Where it has a token (--token-file, QMQ_TOKEN), which must have the right to
    browse everything, users sign in with tokens of their own, and may do what these allow. Without a token everybody
    who reaches it may do everything, so it listens on 127.0.0.1 only. It needs `pip install 'qmq[console]'`.

    \b
    Examples:
      qmq console
      qmq console --server qmqs://10.0.0.5,10.0.0.6 --token-file console.token
    """
    log_to_stderr(log_format, log_level)  # type: ignore[arg-type]  # one of the choices
    if (tls_cert_file is None) != (tls_key_file is None):
        raise InvalidOption("give --tls-cert-file and --tls-key-file, or none of them; one file that has both, twice")
    with needing_extra("console", "the console"):
        from qmq.console.serve import serve

    def ready(url: str) -> None:
        echo_ready(f"ready on {url}", "qmq.console")
        logging.getLogger("qmq.console").info("showing %s on %s", server, url)

    run(serve(server, listen, cert_file=tls_cert_file, key_file=tls_key_file, on_ready=ready))
