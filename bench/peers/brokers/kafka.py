"""Apache Kafka: one node, broker and controller, a topic of one partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.peers.installing import java, maven, say, size_of
from bench.peers.peer import Client, Installed, Peer, Promise, Tool, Way
from bench.peers.processes import Server, answers, free_ports

_VERSION: Final = "4.3.1"
_ARTIFACTS: Final = tuple(f"org.apache.kafka:{name}:{_VERSION}" for name in ("kafka_2.13", "kafka-tools"))
#: The options of Kafka's own scripts.
_JAVA_OPTIONS: Final = (
    "-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
)  # fmt: skip
_PROPERTIES: Final = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory}/data
num.partitions=1
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
{more}"""
_FSYNC: Final = "log.flush.interval.messages=1"


class Kafka(Peer):
    """Kafka from its Maven artifacts, in KRaft mode."""

    name = "kafka"
    title = "Apache Kafka"
    warm_messages = 300_000
    promises = {Promise.PAGE_CACHE: "its default, acks=all", Promise.FSYNC: _FSYNC}  # noqa: RUF012 a constant
    clients = (
        Client(
            "confluent-kafka",
            "confluent",
            sends={
                "bulk": Way("produce_batch of 10,000, linger.ms=50, batch.size=1000000, idempotent", 700_000),
                "queued": Way("produce, linger.ms=50, batch.size=1000000, idempotent", 600_000),
            },
            consumes={
                "bulk": Way("consumer group, consume(10000) and commit, bodies not touched", 1_000_000),
                "each": Way("consumer group, consume(10000), each body touched, commit", 900_000),
                "share bulk": Way("share group, poll and commit_sync, bodies not touched", 700_000, "bulk"),
                "share each": Way(
                    "share group, explicit: each body touched and acknowledged, commit_sync", 500_000, "each"
                ),
                "failing": Way("share group, one of ten released the first time", 0),
                "paced": Way("consumer group, poll, commit every 100 ms", 0),
            },
            paced={
                "linger 5": Way("produce, linger.ms=5", 0, "paced"),
                "linger 0": Way("produce, linger.ms=0", 0, "paced"),
            },
            keyed={"key": Way("produce with key, linger.ms=50, poll every 500", 400_000)},
            limited={
                f"at most {limit}": Way(f"consumer group, consume({limit}) and commit, bodies not touched", rate)
                for limit, rate in (("5,000", 1_000_000), ("1,000", 900_000), ("100", 300_000))
            },
            spread={
                f"at most {limit}": Way(f"consumer group of a pattern, consume({limit}), bodies touched, commit", 0)
                for limit in ("5,000", "500")
            },
        ),
        Client(
            "aiokafka",
            "aiokafka_client",
            sends={
                "bulk": Way("send_batch of ready batches of 1,000, 16 in flight", 1_000_000),
                "queued": Way("send, linger_ms=5, max_batch_size=1000000", 120_000),
                "awaited": Way("await send_and_wait, 1,000 in flight", 30_000),
            },
            consumes={
                "bulk": Way("getmany of 10,000 and commit", 600_000),
                "each": Way("async for, commit every 10,000", 100_000, "iterated"),
            },
            keyed={"key and property": Way("await send_and_wait with key and header, 1,000 tasks", 20_000)},
        ),
    )

    tools = (
        Tool(
            "its Java tools",
            "kafka",
            sends={"bulk": Way("ProducerPerformance, acks=all, linger.ms=50, batch.size=1000000", 900_000)},
            consumes={"bulk": Way("ConsumerPerformance, consumer group, from its first fetch on", 2_000_000)},
        ),
    )

    def install(self, home: Path) -> Installed:
        java()
        return Installed(_VERSION, size_of(maven(home, "kafka", _ARTIFACTS)))

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        port, controller = free_ports(2)
        lib = maven(home, "kafka", _ARTIFACTS)
        server = Server(
            self.name,
            directory,
            {"address": f"127.0.0.1:{port}", "promise": promise, "more": {"java": _command(lib)}},
        )
        properties = directory / "server.properties"
        more = _FSYNC if promise is Promise.FSYNC else ""
        properties.write_text(
            _PROPERTIES.format(port=port, controller=controller, directory=directory, more=more), "utf-8"
        )
        storage = [*_command(lib), "kafka.tools.StorageTool"]
        number = say([*storage, "random-uuid"]).split()[-1]
        say([*storage, "format", "-t", number, "-c", properties])
        server.run([java(), *_JAVA_OPTIONS, "-cp", f"{lib}/*", "kafka.Kafka", properties])
        server.wait_until(lambda: answers(port))
        return server


def _command(lib: Path) -> Sequence[str]:
    return [java(), "-cp", f"{lib}/*"]
