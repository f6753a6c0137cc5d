"""Runs a page of docs as its reader would, block by block, against the broker that the page starts.

A block of ``sh`` is pasted into one bash that stays, so that ``&``, ``%1`` and ``cd`` do what they do for the reader. A
block of ``python`` is typed into ``python -m asyncio``; when its first line is a comment with the name of a file, it is
that file. A block of ``text`` is what the block before has printed. Nothing else runs.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FunctionType
from typing import Any, Final, NamedTuple

BIN: Final = Path(sys.executable).parent
_BLOCK: Final = re.compile(r"^```(sh|python|text|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME: Final = re.compile(r"# ([\w/.-]+\.(?:py|toml|yaml))$", re.MULTILINE)
_TIMEOUT_S: Final = 60


class Block(NamedTuple):
    """A block of a page: its kind, its text, and the line where it begins."""

    kind: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page that are run or compared."""
    return [Block(found[1], found[2], page.count("\n", 0, found.start()) + 1) for found in _BLOCK.finditer(page)]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Shell:
    """One bash, to which blocks are pasted."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def paste(self, text: str) -> str:
        """Run *text*; return all that is printed until its last command ends. Raises AssertionError if that fails."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = uuid.uuid4().hex
        self._bash.stdin.write(f"{text}\nprintf '%s %s\\n' {end} $?\n")
        self._bash.stdin.flush()
        lines = []
        for line in self._bash.stdout:
            before, is_end, status = line.partition(end)
            if is_end:
                lines.append(before)
                assert status.strip() == "0", "".join(lines)
                return "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell ended: {''.join(lines)}")

    def close(self) -> None:
        """End the shell and all that it has left in the background."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        with suppress(BrokenPipeError):
            self._bash.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGTERM)
        try:
            self._bash.stdout.read()  # to the end: all have ended
            self._bash.wait(timeout=_TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._bash.pid, signal.SIGKILL)
            self._bash.stdout.close()


class Reader:
    """Does what a page says in a directory: one shell, and one Python with an event loop."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._shell = Shell(directory, environment)
        self._loop = asyncio.Runner()
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> str:
        """Run a block; return what it prints."""
        if block.kind == "sh":
            return self._shell.paste(block.text)
        if block.file_name is not None:
            path = self._directory / block.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
            return ""
        printed = io.StringIO()
        # Blank lines before it, so that a traceback names the line of the page.
        source = "\n" * block.line + block.text
        code = compile(source, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with redirect_stdout(printed):
            if code.co_flags & inspect.CO_COROUTINE:
                self._loop.run(asyncio.wait_for(FunctionType(code, self._names)(), _TIMEOUT_S))
            else:
                exec(code, self._names)
        return printed.getvalue()

    def close(self) -> None:
        """End what runs."""
        try:
            self._loop.close()
        finally:
            self._shell.close()


@contextmanager
def reader(directory: Path, server: str, **environment: str) -> Iterator[Reader]:
    """Yield a reader whose commands and programs find the broker at *server*, and start one there."""
    variables = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "QMQ_SERVER": server,
        "QMQ_LISTEN": server.removeprefix("qmq://"),
        "QMQ_STATE_DIR": str(directory / "state"),
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    made = Reader(directory, variables)
    try:
        yield made
    finally:
        made.close()
