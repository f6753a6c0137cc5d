"""Run commands of `qmq` in tests, in this process or in one of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from click.testing import CliRunner, Result

from qmq.cli.main import cli


def qmq(*arguments: str, stdin: bytes = b"", server: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(cli, list(arguments), input=stdin, env={"QMQ_SERVER": server})


@contextmanager
def qmq_process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process of its own, with pipes."""
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
