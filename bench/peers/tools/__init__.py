"""Run brokers' own load tools, and parse their output. One file a broker.

Each module has ``send`` and ``consume``, which return what the tool did, and raise `BenchFailed` if that is not what it
was told to do.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from qmq.bench.values import BenchFailed

_PATIENCE_S: Final = 600


class Load(NamedTuple):
    """What a tool has moved: *messages*, at this rate a second; all bodies were *text* if there is one."""

    messages: int
    rate: float
    text: str = ""


class Runs(Protocol):
    """The interface of a module here. *target* is for clients, see `peer.Target`."""

    def send(self, target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
        """Send to an empty topic."""

    def consume(self, target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
        """Consume all of a topic."""


def module(name: str) -> Runs:
    """Return the module of that name."""
    found: Any = importlib.import_module(f"bench.peers.tools.{name}")
    return found  # type: ignore[no-any-return]  # each module has this interface


def said(command: Sequence[object], content: bytes = b"", more: Mapping[str, str] | None = None) -> str:
    """Run a tool, with *content* as its stdin; return its stdout. Raises BenchFailed."""
    words, environment = [str(part) for part in command], {**os.environ, **(more or {})}
    try:
        done = subprocess.run(
            words, input=content, env=environment, capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"{words[0]} took more than {_PATIENCE_S} s") from None
    out = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        last = " ".join((done.stderr.decode("utf-8", "replace") or out).split())[-300:]
        raise BenchFailed(f"{words[0]} ended with {done.returncode}: {last}")
    return out


def counted(messages: int, wanted: int) -> None:
    """Raise BenchFailed unless a tool moved the number it was told to."""
    if messages != wanted:
        raise BenchFailed(f"the tool moved {messages} messages, not {wanted}")
