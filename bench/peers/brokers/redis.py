"""Redis: a stream a topic, with a consumer group."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.peers.installing import debian, debian_size, debian_version
from bench.peers.peer import Client, Installed, Peer, Promise, Tool, Way
from bench.peers.processes import Server, answers, free_ports

_FSYNC: Final = {Promise.PAGE_CACHE: "everysec", Promise.FSYNC: "always"}


class Redis(Peer):
    """Debian's redis-server with an append-only file and no snapshots."""

    name = "redis"
    title = "Redis Streams"
    promises = {  # noqa: RUF012 a constant
        Promise.PAGE_CACHE: "appendfsync everysec",
        Promise.FSYNC: "appendfsync always",
    }
    lacks = {  # noqa: RUF012 a constant
        "failing": "it has no nack: what is not acknowledged waits until somebody claims it",
    }
    clients = (
        Client(
            "redis",
            "redis_py",
            sends={
                "bulk": Way("pipelines of 1,000 XADD, with hiredis", 150_000),
                "awaited": Way("redis.asyncio, await xadd, 100 connections, 1,000 callers", 10_000),
            },
            consumes={
                "bulk": Way("XREADGROUP COUNT 1000, one XACK for all", 220_000),
                "each": Way("XREADGROUP COUNT 1000, an XACK each, in a pipeline", 80_000),
                "paced": Way("XREADGROUP BLOCK, one XACK for all that came", 0),
            },
            paced={"paced": Way("what is due in one pipeline of XADD", 0)},
            keyed={
                "key": Way("pipelines of 500 XADD with a field for the key", 120_000),
                "key and property": Way("redis.asyncio, await xadd with two more fields, 1,000 tasks", 10_000),
            },
            limited={
                f"at most {limit}": Way(f"XREADGROUP COUNT {limit}, one XACK for all", rate)
                for limit, rate in (("5,000", 220_000), ("1,000", 220_000), ("100", 100_000))
            },
            spread={
                f"at most {limit}": Way(f"XREADGROUP over {limit} streams at a time, an XACK each, in a pipeline", 0)
                for limit in ("5,000", "500")
            },
        ),
    )

    tools = (
        Tool(
            "redis-benchmark (C)",
            "redis",
            sends={"bulk": Way("XADD, 8 connections, pipelines of 64", 400_000)},
            consumes={},
        ),
    )

    def install(self, home: Path) -> Installed:
        debian("redis-server", "redis-server")
        return Installed(debian_version("redis-server"), debian_size("redis-server", "redis-tools"))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        (port,) = free_ports(1)
        server = Server(self.name, directory, {"address": f"127.0.0.1:{port}", "promise": promise})
        settings = {
            "bind": "127.0.0.1",
            "port": port,
            "dir": directory,
            "save": "",
            "appendonly": "yes",
            "appendfsync": _FSYNC[promise],
            "daemonize": "no",
        }
        server.run(
            [
                debian("redis-server", "redis-server"),
                *(str(part) for key in settings for part in (f"--{key}", settings[key])),
            ]
        )
        server.wait_until(lambda: answers(port))
        return server
