"""QMQ itself: this work tree."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from bench.peers.installing import size_of
from bench.peers.peer import Client, Installed, Peer, Promise, Way
from bench.peers.processes import Server, answers, free_ports

#: The packages that the broker needs.
_NEEDS = ("click", "crc32c", "msgpack", "numpy", "pydantic", "pydantic_core", "rich", "uvloop", "xxhash")


class Qmq(Peer):
    """A `qmq serve` with its defaults."""

    name = "qmq"
    title = "QMQ"
    promises = {  # noqa: RUF012 a constant
        Promise.PAGE_CACHE: "the sender's durability=append",
        Promise.FSYNC: "the sender's durability=flush",
    }
    clients = (
        Client(
            "qmq",
            "qmq_client",
            sends={
                "bulk": Way("send_many of 1,000, 64 calls in flight", 2_500_000),
                "queued": Way("send_nowait, drain every 1,000", 1_000_000),
                "awaited": Way("await send, 1,000 in flight", 130_000),
            },
            consumes={
                "bulk": Way("pull_batch of 50,000, batch.ack(), bodies not touched", 3_000_000),
                "each": Way("pull of 10,000, each body touched and acked", 1_200_000),
                "iterated": Way("async for, each body touched and acked", 900_000),
                "paced": Way("pull of 10,000, each acked", 0),
                "failing": Way("pull of 10,000, one of ten nacked (durably) the first time", 0),
            },
            paced={"paced": Way("send_nowait", 0), "awaited": Way("await send, a task each", 0)},
            keyed={
                "key": Way("send_nowait with key, drain every 500", 300_000),
                "key and property": Way("await send with key and property, 1,000 tasks", 60_000),
            },
            limited={
                f"at most {limit}": Way(f"pull_batch of {limit}, batch.ack(), bodies not touched", rate)
                for limit, rate in (("5,000", 2_000_000), ("1,000", 1_000_000), ("100", 100_000))
            },
            spread={
                f"at most {limit}": Way(f"pull_batch of {limit} by prefix, batch.bodies, batch.ack()", 0)
                for limit in ("5,000", "500")
            },
        ),
    )

    def install(self, home: Path) -> Installed:
        parts = [Path(spec.origin).parent for name in ("qmq", *_NEEDS) if (spec := _found(name)) and spec.origin]
        return Installed(metadata.version("qmq"), sum(map(size_of, parts)))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        (port,) = free_ports(1)
        server = Server(self.name, directory, {"address": f"qmq://127.0.0.1:{port}", "promise": promise})
        serve = "from qmq.cli.main import cli; cli()"
        settings = {"listen": f"127.0.0.1:{port}", "data_dir": directory / "data", "log_level": "warning"}
        assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        server.run([sys.executable, "-c", serve, "serve", *assignments])
        server.wait_until(lambda: answers(port))
        return server


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    return importlib.util.find_spec(name)
