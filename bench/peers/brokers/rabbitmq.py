"""RabbitMQ: a quorum queue a topic, on a node of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from bench.peers.installing import debian, debian_size, debian_version, say
from bench.peers.peer import Absent, Client, Installed, Peer, Promise, Way
from bench.peers.processes import Server, answers, free_ports

#: The script itself: the one on PATH changes to the user rabbitmq.
_SCRIPTS: Final = Path("/usr/lib/rabbitmq/bin")
_SETTINGS: Final = """listeners.tcp.1 = 127.0.0.1:{port}
disk_free_limit.absolute = 1GB
vm_memory_high_watermark.relative = 0.6
loopback_users = none
log.file.level = warning
"""


class RabbitMq(Peer):
    """Debian's rabbitmq-server with quorum queues, which sync before they confirm."""

    name = "rabbitmq"
    title = "RabbitMQ"
    lacks = {"neighbours": "a quorum queue is a plain queue, without groups"}  # noqa: RUF012 a constant
    promises = {Promise.FSYNC: "quorum queues always do"}  # noqa: RUF012 a constant
    cannot = {Promise.PAGE_CACHE: "a quorum queue always syncs before it confirms"}  # noqa: RUF012 a constant
    clients = (
        Client(
            "pika",
            "pika_client",
            sends={"queued": Way("SelectConnection, confirms, 10,000 in flight", 44_000)},
            consumes={
                "bulk": Way("SelectConnection, prefetch 10,000, one ack for 1,000", 60_000),
                "each": Way("SelectConnection, prefetch 10,000, each acked", 30_000),
                "failing": Way("SelectConnection, one of ten put back the first time", 0),
                "paced": Way("SelectConnection, prefetch 10,000, each acked", 0),
            },
            paced={"paced": Way("SelectConnection, confirms", 0)},
        ),
        Client(
            "aio-pika",
            "aio_pika_client",
            sends={"awaited": Way("await publish with confirm, 1,000 in flight", 9_000)},
            consumes={"each": Way("prefetch 1,000, each acked", 15_000)},
        ),
    )

    def install(self, home: Path) -> Installed:
        debian("rabbitmq-server", "rabbitmq-server")
        if not (_SCRIPTS / "rabbitmq-server").exists():
            raise Absent(f"there is no {_SCRIPTS}/rabbitmq-server")
        erlang = re.findall(r"^erlang\S*", say(["dpkg-query", "--show", "--showformat", "${Package}\n"]), re.MULTILINE)
        return Installed(debian_version("rabbitmq-server"), debian_size("rabbitmq-server", *erlang))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        port, distribution, mapper = free_ports(3)
        server = Server(self.name, directory, {"address": f"127.0.0.1:{port}", "promise": promise})
        (directory / "rabbitmq.conf").write_text(_SETTINGS.format(port=port), "utf-8")
        environment = {
            "HOME": str(directory),
            "ERL_EPMD_PORT": str(mapper),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
        }
        # Otherwise the node would start one that outlives it.
        server.run([shutil.which("epmd") or "epmd", "-port", str(mapper), "-address", "127.0.0.1"])
        server.wait_until(lambda: answers(mapper))
        server.run([_SCRIPTS / "rabbitmq-server"], environment)
        server.wait_until(lambda: answers(port) and _is_up(environment))
        return server


def _is_up(environment: dict[str, str]) -> bool:
    """Return whether the node has started completely: its port answers before that."""
    command = [str(_SCRIPTS / "rabbitmqctl"), "-q", "await_startup", "--timeout", "60"]
    return (
        subprocess.run(
            command, env={"PATH": "/usr/bin:/bin:/usr/sbin", **environment}, capture_output=True, check=False
        ).returncode
        == 0
    )
