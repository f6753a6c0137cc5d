"""All peers by name; QMQ is the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.peers.brokers.beanstalkd import Beanstalkd
from bench.peers.brokers.kafka import Kafka
from bench.peers.brokers.nats import Nats
from bench.peers.brokers.qmq import Qmq
from bench.peers.brokers.rabbitmq import RabbitMq
from bench.peers.brokers.redis import Redis
from bench.peers.brokers.rocketmq import RocketMq
from bench.peers.peer import Peer
from qmq.errors import InvalidOption

PEERS: Final[dict[str, Peer]] = {
    peer.name: peer for peer in (Qmq(), Kafka(), RocketMq(), Nats(), Redis(), RabbitMq(), Beanstalkd())
}


def chosen(names: Sequence[str]) -> list[Peer]:
    """Return the peers of these names, or all, always with QMQ, which the ratios need. Raises InvalidOption."""
    for name in names:
        if name not in PEERS:
            raise InvalidOption(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return [peer for peer in PEERS.values() if not names or peer.name in names or peer.name == "qmq"]
