"""Which connection sends under which producer name: two clients under one name would be taken for one.

They number their messages alike, so what one sends would be taken for a repeat of what the other sent.
"""

from __future__ import annotations

from typing import NamedTuple

from qmq.errors import ProducerInUse


class _Claim(NamedTuple):
    """Who claimed a producer, and on which connection last."""

    client: bytes
    connection: int


class Claims:
    """Those of the connections that there are; each has one at most. Nothing is kept on disk."""

    def __init__(self) -> None:
        self._by_producer: dict[bytes, _Claim] = {}
        self._by_connection: dict[int, bytes] = {}

    def claim(self, connection: int, producer_id: bytes, client: bytes) -> None:
        """A client sends under that producer on this connection from now on; on another one of its own no more.

        Raises ProducerInUse while another client has it.
        """
        held = self._by_producer.get(producer_id)
        if held is not None and held.client != client:
            raise ProducerInUse(
                "another client that is connected sends under this producer: give each client a producer of its own, "
                "or end the other one (where its machine is gone, the broker finds out within two minutes)"
            )
        if held is not None:
            del self._by_connection[held.connection]
        self.disconnected(connection)
        self._by_producer[producer_id] = _Claim(client, connection)
        self._by_connection[connection] = producer_id

    def disconnected(self, connection: int) -> None:
        """It is gone, or claims another producer: what it had is free."""
        producer_id = self._by_connection.pop(connection, None)
        if producer_id is not None:
            del self._by_producer[producer_id]
