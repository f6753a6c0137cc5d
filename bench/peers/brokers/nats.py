"""NATS JetStream: a stream a topic, on files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.peers.installing import go, say, size_of
from bench.peers.peer import Client, Installed, Peer, Promise, Tool, Way
from bench.peers.processes import Server, answers, free_ports
from bench.peers.tools.nats import program

_MODULE: Final = "github.com/nats-io/nats-server/v2@latest"
_SETTINGS: Final = """listen: "127.0.0.1:{port}"
max_payload: 8MB
jetstream {{ store_dir: "{store}", max_file_store: 40GB, max_memory_store: 1GB{sync} }}
"""
_SYNC: Final = {Promise.PAGE_CACHE: "", Promise.FSYNC: ", sync_interval: always"}


class Nats(Peer):
    """nats-server, built from its Go module."""

    name = "nats"
    title = "NATS JetStream"
    promises = {  # noqa: RUF012 a constant
        Promise.PAGE_CACHE: "the default sync_interval",
        Promise.FSYNC: "sync_interval: always",
    }
    clients = (
        Client(
            "nats-py",
            "nats_py",
            sends={
                "queued": Way("publish_async, 4,000 pending", 40_000),
                "awaited": Way("await publish, 1,000 in flight", 40_000),
            },
            consumes={
                "bulk": Way("fetch of 1,000, the last acked for all (ack policy all)", 60_000),
                "each": Way("fetch of 1,000, each acked", 35_000),
                "failing": Way("fetch of 1,000, one of ten nak the first time", 0),
                "paced": Way("push consumer, each acked", 0),
            },
            paced={"paced": Way("publish, each awaited by a task", 0)},
        ),
    )

    tools = (
        Tool(
            "nats.go (Go)",
            "nats",
            sends={
                "queued": Way("PublishAsync, 4,000 pending; natscli, its own load tool, cannot be installed", 180_000)
            },
            consumes={"each": Way("Fetch of 1,000, each acked", 150_000)},
        ),
    )

    def install(self, home: Path) -> Installed:
        server = go(home, _MODULE, "nats-server")
        program(home)
        return Installed(say([server, "--version"]).split()[-1].lstrip("v"), size_of(server))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        (port,) = free_ports(1)
        server = Server(
            self.name,
            directory,
            {"address": f"nats://127.0.0.1:{port}", "promise": promise, "more": {"home": str(home)}},
        )
        settings = directory / "nats.conf"
        settings.write_text(_SETTINGS.format(port=port, store=directory / "store", sync=_SYNC[promise]), "utf-8")
        server.run([go(home, _MODULE, "nats-server"), "-c", settings])
        server.wait_until(lambda: answers(port))
        return server
