"""Brokers that others choose for order by key and for priorities: Kafka with one partition a consumer, and RabbitMQ.

RabbitMQ's quorum queues have priorities from 4.0 on; an older one, such as Debian's, is measured with a classic durable
queue of three priorities.
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from pathlib import Path
from typing import Any, Final

import pika
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench.ordering import Arrived, Found, Shared, add, body_of, consumed, keyed, packed
from bench.peers.brokers.kafka import Kafka
from bench.peers.brokers.rabbitmq import RabbitMq
from bench.peers.peer import Absent, Promise

_HOME: Final = Path(__file__).parents[1] / ".peers"
_PARTITIONS: Final = 4
_PULL: Final = 10_000
_SUBJECTS: Final = 100


def measure_peers(found: Found, wanted: argparse.Namespace, scratch: Path) -> None:
    """Measure Kafka for order and RabbitMQ for priorities; say so where one cannot be installed."""
    for name, measure in (("kafka", _measure_kafka), ("rabbitmq", _measure_rabbitmq)):
        try:
            measure(found, wanted, scratch / name)
        except Absent as error:
            print(f"  {name} is absent: {error}", flush=True)


def _measure_kafka(found: Found, wanted: argparse.Namespace, directory: Path) -> None:
    kafka = Kafka()
    title = f"Kafka {kafka.install(_HOME).version}, {_PARTITIONS} partitions, {wanted.keys:,} keys"
    with kafka.start(_HOME, directory, Promise.PAGE_CACHE) as server:
        address, topic = server.target["address"], f"bench-{secrets.token_hex(4)}"
        admin = AdminClient({"bootstrap.servers": address})
        for made in admin.create_topics([NewTopic(topic, _PARTITIONS, 1)]).values():
            made.result(60)
        producer = Producer(
            {
                "bootstrap.servers": address, "linger.ms": 50, "batch.size": 1_000_000, "batch.num.messages": 100_000,
                "queue.buffering.max.messages": 1_000_000, "acks": "all", "enable.idempotence": True,
            }
        )  # fmt: skip
        for bodies, names in keyed(wanted.messages, wanted.keys):
            while len(producer) > 900_000:
                producer.poll(0.01)
            for body, name in zip(bodies, names, strict=True):
                producer.produce(topic, body, name)
            producer.poll(0)
        assert not producer.flush(120)
        rate = consumed(address, topic, "consume", wanted.messages, _consume_kafka)
        add(found, f"{title}, consume({_PULL}) and commit, msg/s", rate)


def _consume_kafka(address: str, topic: str, name: str, _: str, shared: Shared) -> None:
    """Run one consumer of the group in this process."""
    arrived: Arrived = []
    consumer = Consumer(
        {
            "bootstrap.servers": address, "group.id": "bench", "client.id": name, "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "queued.min.messages": 100_000, "fetch.queue.backoff.ms": 5,
            "max.partition.fetch.bytes": 4_194_304,
        }
    )  # fmt: skip
    # Each has its partition from the beginning, so that no rebalance is measured.
    consumer.assign([TopicPartition(topic, int(name[1:]), OFFSET_BEGINNING)])
    shared.barrier.wait(60)
    while not shared.is_done:
        messages = consumer.consume(_PULL, 0.2)
        if messages:
            arrived.append((time.monotonic_ns(), [message.value() for message in messages]))
            consumer.commit(asynchronous=False)
            shared.add(len(messages))
    consumer.close()
    shared.found.put((*packed(arrived), time.process_time()))


def _measure_rabbitmq(found: Found, wanted: argparse.Namespace, directory: Path) -> None:
    rabbit, messages = RabbitMq(), min(wanted.messages, 200_000)
    version = rabbit.install(_HOME).version
    is_quorum = int(version.partition(".")[0]) >= 4
    arguments = {"x-queue-type": "quorum"} if is_quorum else {"x-max-priority": 3}
    title = f"RabbitMQ {version}, {'quorum' if is_quorum else 'classic durable'} queue, three priorities"
    with rabbit.start(_HOME, directory, Promise.FSYNC) as server:
        host, _, port = server.target["address"].partition(":")
        connection = pika.BlockingConnection(pika.ConnectionParameters(host, int(port), heartbeat=0))
        channel = connection.channel()
        channel.queue_declare("bench", durable=True, arguments=arguments)
        chance = random.Random(1)
        for number in range(messages):
            properties = pika.BasicProperties(delivery_mode=2, priority=chance.randrange(3))
            channel.basic_publish("", "bench", body_of(number % _SUBJECTS, number), properties)
        _wait_for(channel, messages)
        channel.basic_qos(prefetch_count=_PULL)
        began = time.perf_counter()
        for count, (method, _properties, _body) in enumerate(channel.consume("bench"), 1):
            if count % 1_000 == 0 or count == messages:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if count == messages:
                break
        left = channel.queue_declare("bench", passive=True).method.message_count
        add(found, f"{title}, one ack for 1,000, msg/s", messages / (time.perf_counter() - began))
        assert not left, f"{left} messages were left"
        connection.close()


def _wait_for(channel: Any, messages: int) -> None:
    """Wait until the queue has all messages that were published without confirms."""
    until = time.monotonic() + 120
    while channel.queue_declare("bench", passive=True).method.message_count < messages:
        assert time.monotonic() < until, "the queue does not have all messages after two minutes"
        channel.connection.process_data_events(0.1)
