"""Apache RocketMQ: a name server, and a proxy with the broker inside."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.peers.installing import java, maven, size_of
from bench.peers.peer import Client, Installed, Peer, Promise, Tool, Way
from bench.peers.processes import Server, answers, free_ports

_VERSION: Final = "5.5.0"  # 5.5.1 is published incomplete
_ARTIFACTS: Final = tuple(
    f"org.apache.rocketmq:rocketmq-{name}:{_VERSION}" for name in ("namesrv", "broker", "proxy", "tools", "example")
)
#: The internals of Java 17 that it uses.
_OPENED: Final = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED", "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
)  # fmt: skip
_FAST: Final = ("-server", "-XX:+UseG1GC")
#: The options for short-lived processes.
_QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_FLUSH: Final = {Promise.PAGE_CACHE: "ASYNC_FLUSH", Promise.FSYNC: "SYNC_FLUSH"}
_NAME_SERVER: Final = "listenPort={names}\nkvConfigPath={directory}/kv.json\n"
_BROKER: Final = """brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=0
brokerIP1=127.0.0.1
listenPort={broker}
haListenPort={replicas}
namesrvAddr=127.0.0.1:{names}
storePathRootDir={directory}/store
autoCreateTopicEnable=true
autoCreateSubscriptionGroup=true
flushDiskType={flush}
diskMaxUsedSpaceRatio=95
"""


class RocketMq(Peer):
    """RocketMQ from its Maven artifacts."""

    name = "rocketmq"
    title = "Apache RocketMQ"
    warm_messages = 3_000
    promises = {  # noqa: RUF012 a constant
        Promise.PAGE_CACHE: "flushDiskType=ASYNC_FLUSH",
        Promise.FSYNC: "flushDiskType=SYNC_FLUSH",
    }
    clients = (
        Client(
            "rocketmq-python-client",
            "rocketmq_client",
            sends={"queued": Way("send_async through the proxy, 1,000 in flight", 3_000)},
            consumes={
                "each": Way("receive of 32 by 16 threads, each acked", 2_500),
                "failing": Way("the same, one of ten given a lease of 1 s the first time: there is no nack", 0),
                "paced": Way("receive of 32 by 16 threads, each acked", 0),
            },
            paced={"paced": Way("send_async", 0)},
        ),
    )

    tools = (
        Tool(
            "its Java benchmark",
            "rocketmq",
            sends={
                "16 threads": Way("Producer, 16 threads that wait for each message, past the proxy", 14_000, "awaited"),
                "batches": Way("BatchProducer, 4 threads, batches of 32, past the proxy", 170_000, "bulk"),
            },
            consumes={"each": Way("Consumer, 20 threads, past the proxy; counted, bodies not compared", 150_000)},
            only_counts=True,
        ),
    )

    def install(self, home: Path) -> Installed:
        java()
        return Installed(_VERSION, size_of(maven(home, "rocketmq", _ARTIFACTS)))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        lib = maven(home, "rocketmq", _ARTIFACTS)
        # The broker opens a second port beside its first, and one for replicas beside both.
        names, broker, replicas, grpc, remoting = free_ports(5)
        rocket_home = directory / "home"
        (rocket_home / "conf").mkdir(parents=True)
        places = {
            "names": names,
            "broker": broker,
            "replicas": replicas,
            "directory": directory,
            "flush": _FLUSH[promise],
        }
        (directory / "names.conf").write_text(_NAME_SERVER.format(**places), "utf-8")
        (directory / "broker.conf").write_text(_BROKER.format(**places), "utf-8")
        proxy = {
            "rocketMQClusterName": "DefaultCluster",
            "grpcServerPort": grpc,
            "remotingListenPort": remoting,
            "localServeAddr": "127.0.0.1",
        }
        (directory / "proxy.json").write_text(json.dumps(proxy), "utf-8")
        admin = [*_java(lib, rocket_home, "128m", *_QUICK), "org.apache.rocketmq.tools.command.MQAdminStartup"]
        more = {
            "java": _java(lib, rocket_home, "1g", *_FAST),
            "admin": admin,
            "names": f"127.0.0.1:{names}",
            "home": str(rocket_home),
        }
        server = Server(self.name, directory, {"address": f"127.0.0.1:{grpc}", "promise": promise, "more": more})
        environment = {"ROCKETMQ_HOME": str(rocket_home), "NAMESRV_ADDR": f"127.0.0.1:{names}", "HOME": str(directory)}
        start = _java(lib, rocket_home, "256m", *_FAST)
        server.run([*start, "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", directory / "names.conf"], environment)
        server.wait_until(lambda: answers(names))
        start = [*_java(lib, rocket_home, "2g", *_FAST), "-XX:MaxDirectMemorySize=2g"]
        files = ["-bc", directory / "broker.conf", "-pc", directory / "proxy.json"]
        server.run(
            [*start, "org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local", "-n", f"127.0.0.1:{names}", *files],
            environment,
        )
        server.wait_until(lambda: answers(grpc) and _has_registered(admin, names, environment))
        return server


def _java(lib: Path, home: Path, heap: str, *options: str) -> Sequence[str]:
    return [
        java(), f"-Xmx{heap}", *options, *_OPENED, f"-Duser.home={home}",
        f"-Drocketmq.home.dir={home}", "-cp", f"{lib}/*",
    ]  # fmt: skip


def _has_registered(admin: Sequence[str], names: int, environment: dict[str, str]) -> bool:
    """Return whether the name server knows the broker: the proxy's port answers before that."""
    told = subprocess.run(
        [*admin, "clusterList", "-n", f"127.0.0.1:{names}"],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "broker-a" in told.stdout
