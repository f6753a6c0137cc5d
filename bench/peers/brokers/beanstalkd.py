"""beanstalkd: a tube a topic."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.peers.installing import debian, debian_size, debian_version
from bench.peers.peer import Client, Installed, Peer, Promise, Way
from bench.peers.processes import Server, answers, free_ports

_SYNC_MS: Final = {Promise.PAGE_CACHE: "50", Promise.FSYNC: "0"}


class Beanstalkd(Peer):
    """Debian's beanstalkd with its binlog."""

    name = "beanstalkd"
    title = "beanstalkd"
    lacks = {"neighbours": "a tube is a plain queue, without groups"}  # noqa: RUF012 a constant
    promises = {  # noqa: RUF012 a constant
        Promise.PAGE_CACHE: "-f 50, a sync every 50 ms",
        Promise.FSYNC: "-f 0, a sync at each put",
    }
    clients = (
        Client(
            "greenstalk",
            "greenstalk_client",
            sends={"one by one": Way("put, the only way there is", 15_000, "awaited")},
            consumes={
                "each": Way("reserve and delete, the only way there is", 10_000),
                "failing": Way("reserve, one of ten released the first time, else delete", 0),
                "paced": Way("reserve and delete", 0),
            },
            paced={"paced": Way("put", 0)},
        ),
    )

    def install(self, home: Path) -> Installed:
        debian("beanstalkd", "beanstalkd")
        return Installed(debian_version("beanstalkd"), debian_size("beanstalkd"))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        (port,) = free_ports(1)
        server = Server(self.name, directory, {"address": f"127.0.0.1:{port}", "promise": promise})
        command = [debian("beanstalkd", "beanstalkd"), "-l", "127.0.0.1", "-p", str(port)]
        server.run([*command, "-b", directory, "-f", _SYNC_MS[promise]])
        server.wait_until(lambda: answers(port))
        return server
