"""Run NATS' Go client by the program in nats_load, since natscli, its own load tool, cannot be installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.peers.installing import say
from bench.peers.tools import Load, counted, said
from bench.peers.workers.tally import bodies

_SOURCE: Final = Path(__file__).parent / "nats_load"


def program(home: Path) -> Path:
    """Return the load tool, built if it is missing or older than its source. Raises Absent."""
    path = home / "go" / "nats-load"
    if not path.exists() or path.stat().st_mtime < max(file.stat().st_mtime for file in _SOURCE.iterdir()):
        say(["go", "build", "-o", path, "."], cwd=_SOURCE)
    return path


def send(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Send the bodies in order; all are acknowledged."""
    return _run(target, "send", topic, size, messages)


def consume(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Compare and acknowledge each body; the program ends when the broker has nothing left."""
    return _run(target, "consume", topic, size, messages)


def _run(target: Mapping[str, Any], what: str, topic: str, size: int, messages: int) -> Load:
    path = program(Path(target["more"]["home"]))
    with tempfile.TemporaryDirectory() as directory:
        content = Path(directory) / "bodies"
        content.write_bytes(b"".join(bodies(size)))
        told = said([path, what, target["address"], topic, topic.replace(".", "-"), content, size, messages])
    found = json.loads(told)
    counted(found["messages"], messages)
    return Load(messages, messages / found["seconds"])
