"""A small disk of its own for a broker: a tmpfs, mounted by root, or in a namespace where one may be root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import pytest

from tests.broker_process import BrokerProcess

_SERVE: Final = [sys.executable, "-c", "from qmq.cli.main import cli; cli()"]
_CHUNK: Final = 64 << 10
_TIMEOUT_S: Final = 30


class SmallDisk:
    """Where brokers see it: ``path``; where this process does: ``seen``."""

    def __init__(self, path: Path, seen: Path, enter: list[str]) -> None:
        self.path = path
        self.seen = seen
        self._enter = enter

    def broker(self, **settings: object) -> BrokerProcess:
        """A broker that keeps its data there, not started."""
        return BrokerProcess(self.path / "data", self._start, **settings)

    def serve_and_fail(self) -> tuple[int, str]:
        """Start a broker that is to end by itself at once; its exit code and stderr."""
        command = [*self._enter, *_SERVE, "serve", "--data-dir", str(self.path / "data"), "--listen", "127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return done.returncode, done.stderr

    def _start(self, arguments: list[str], stderr: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._enter, *_SERVE, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True)

    def free(self) -> int:
        """Bytes that can still be written."""
        return shutil.disk_usage(self.seen).free

    def fill(self, name: str, size: int | None = None) -> None:
        """Write a file of *size* bytes; None: all that there is room for."""
        left = size
        with (self.seen / name).open("wb", buffering=0) as file:
            while left is None or left > 0:
                try:
                    written = file.write(bytes(_CHUNK if left is None else min(left, _CHUNK)))
                except OSError:
                    assert left is None, f"there was no room for {size} bytes"
                    return
                left = None if left is None else left - written

    def remove(self, name: str) -> None:
        """Make room again."""
        (self.seen / name).unlink()


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of *size* bytes at *path*. Fails the test, with the reason, where this machine allows none."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is not None and mounted.returncode == 0:
        try:
            yield SmallDisk(path, path, [])
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    with _namespace(mount, "" if mounted is None else mounted.stderr) as process_id:
        enter = ["nsenter", "--target", str(process_id), "--user", "--mount", "--preserve-credentials"]
        yield SmallDisk(path, Path(f"/proc/{process_id}/root{path}"), enter)


@contextmanager
def _namespace(mount: list[str], why_not_root: str) -> Iterator[int]:
    """A process that holds a namespace in which *mount* has been done; its process id."""
    script = 'trap "exit 0" TERM; "$@" && echo mounted && read -r forever'
    holder = subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *mount],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "mounted\n":
            _, error = holder.communicate(timeout=_TIMEOUT_S)
            pytest.fail(f"no tmpfs can be mounted here, by root ({why_not_root.strip()}) or in a namespace: {error}")
        yield holder.pid
    finally:
        holder.communicate("", timeout=_TIMEOUT_S)  # the end of its input ends it
