"""Runs a page of docs as its reader would, block by block. ``python -m tests.tutorial`` writes into it what it prints.

A block of ``sh`` runs in bash, one of ``python`` as if typed; a block of ``text`` is what the one before has printed.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.spark.session import running

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "tutorial-history.md"
PLOT: Final = "orders-a-day.svg"
BIN: Final = Path(sys.executable).parent
URL: Final = "qmq://127.0.0.1:20881"
_BLOCK: Final = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S: Final = 120


class Block(NamedTuple):
    """A block of a page: of which kind, what stands in it and where."""

    kind: str
    text: str
    start: int
    end: int


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    return [Block(found[1], found[2], *found.span(2)) for found in _BLOCK.finditer(page)]


class Reader:
    """Does what a page says, in the current directory. Its broker takes any port that is free."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._broker: subprocess.Popen[str] | None = None
        self._url = URL

    def run(self, block: Block) -> str:
        """Run a block; gives what it prints."""
        if block.kind == "python":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text.replace(URL, self._url), PAGE.name, "exec"), self._names)
            return printed.getvalue()
        return "".join(map(self._line, block.text.splitlines()))

    def close(self) -> None:
        """Stop the broker."""
        if self._broker is not None:
            self._broker.send_signal(signal.SIGTERM)
            self._broker.communicate(timeout=_TIMEOUT_S)
            assert self._broker.returncode == 0
            self._broker = None

    def _line(self, line: str) -> str:
        line = line.replace(".venv/bin", str(BIN))
        if line == "kill %1":
            self.close()
            return ""
        if line.endswith("&"):
            command = [*line.removesuffix("&").split(), "--listen", "127.0.0.1:0", "--log-level", "error"]
            self._broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._broker.stdout is not None
            ready = re.match(r"ready on (qmq://\S+), data in ", self._broker.stdout.readline())
            assert ready is not None
            self._url = ready[1]
            return ""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), line
        return done.stdout


@contextmanager
def reader() -> Iterator[Reader]:
    """A reader whose broker is gone in the end."""
    made = Reader()
    try:
        yield made
    finally:
        made.close()


def printed(page: str) -> list[tuple[Block, str]]:
    """Every block of text of a page, and what stands there when the page is run in the current directory."""
    found, said = list[tuple[Block, str]](), ""
    with reader() as made:
        for block in blocks(page):
            if block.kind == "text":
                found.append((block, said))
            else:
                said = "\n".join(line.rstrip() for line in made.run(block).rstrip().splitlines()) + "\n"
    return found


def main() -> None:
    """Write into the page what it prints, and its plot beside it."""
    page = PAGE.read_text("utf-8")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        with running(Path(directory)):
            for block, said in reversed(printed(page)):
                page = page[: block.start] + said + page[block.end :]
        PAGE.write_text(page, "utf-8")
        (PAGE.parent / PLOT).write_bytes(Path(PLOT).read_bytes())


if __name__ == "__main__":
    main()
