"""Measure a plain copy over loopback from one process to another, to compare brokers with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.bench.processes import LoadWorker
from qmq.bench.values import BenchFailed

#: It takes the place of a broker's name.
NAME: Final = "loopback"
TITLE: Final = "no broker"
CLIENT: Final = "two sockets"
WAY: Final = "copy"
SAYS: Final = "batches of 1,000 by sendmsg, recv_into of 1 MiB, in two processes; no checksum, nothing is stored"
_BATCH: Final = 1_000


def rate(scratch: Path, size: int, messages: int) -> float:
    """Return the messages of *size* bytes a second that a plain socket moves to another process, as batches of 1,000.

    Raises BenchFailed if it moved fewer.
    """
    with LoadWorker(scratch, "raw.sink", {"write_to": None}) as sink:
        sink.go()
        options = {"port": sink.prepared["port"], "size": size, "count": _BATCH, "batches": max(messages // _BATCH, 1)}
        with LoadWorker(scratch, "raw.send_plain", options) as source:
            source.go()
            sent = source.result()
        received = sink.result()
    if received["bytes"] != sent["bytes"]:
        raise BenchFailed(f"the copy received {received['bytes']} of {sent['bytes']} bytes")
    return float(sent["messages"] / sent["seconds"])
