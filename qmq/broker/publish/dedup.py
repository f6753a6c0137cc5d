"""Remember the last batches of each producer, so that no send makes two messages.

For each producer the broker remembers the sequence that comes next, and its last ``window`` batches as a ring of
32-byte records (first sequence u64, position u64, messages u32, data crc u32, partition u16, 6 bytes spare). A producer
is forgotten ``ttl`` after its last send, by the monotonic clock: were the wall clock set forward, a send whose answer
was lost could be stored twice. While no broker runs, no time passes. Where there would be too many, those without a
connection go before that, the one that is idle for longest first. A client that connects again says which batches it
sends again, and since when: if their producer may have been forgotten for want of room since then, nobody knows whether
they are stored, and they are refused.

A client claims its producer for its connection. Two clients under one producer would number their messages alike, and
messages of one would be taken for repeats of the other's.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from qmq.errors import BadBatch, ProducerInUse, QmqError, SequenceForgotten, TooManyProducers

_BATCH: Final = struct.Struct("<QQIIH6x")
_BATCH_SIZE: Final = 32
_PARTITION: Final = struct.Struct("<24xH6x")
assert _BATCH.size == _BATCH_SIZE


class RememberedBatch(NamedTuple):
    """Where a batch was stored before."""

    partition: int
    position: int


class Producer:
    """One producer. ``ring`` has its last batches, oldest first; batches below ``horizon`` have been dropped from
    it.
    """

    __slots__ = ("horizon", "last_send_us", "next_sequence", "ring")

    def __init__(self, next_sequence: int = 0, horizon: int = 0, last_send_us: int = 0, ring: bytes = b"") -> None:
        self.next_sequence = next_sequence
        self.horizon = horizon
        self.last_send_us = last_send_us
        self.ring = bytearray(ring)

    def records(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Return (first sequence, position, messages, data crc, partition) of each remembered batch, oldest first."""
        return _BATCH.iter_unpack(bytes(self.ring))

    def claimed(self, unclaimed: Mapping[int, int]) -> bytes:
        """Return the ring without batches that lie at or behind the position that *unclaimed* gives for their
        partition.
        """
        if unclaimed.keys().isdisjoint(partition for (partition,) in _PARTITION.iter_unpack(self.ring)):
            return bytes(self.ring)
        kept = (record for record in self.records() if record[1] < unclaimed.get(record[4], record[1] + 1))
        return b"".join(_BATCH.pack(*record) for record in kept)

    def drop_oldest(self) -> None:
        """Forget the oldest batch; batches before it can no longer be told from repeats."""
        first, _, messages, _, _ = _BATCH.unpack_from(self.ring)
        if first + messages > self.horizon:
            self.horizon = first + messages
        del self.ring[:_BATCH_SIZE]


#: The row of a checkpoint that says when a batch was last forgotten for want of room; other rows are of producers.
_FORGOTTEN: Final = b"qmq: forgotten  "
#: A client's account of its time may be wrong by the time that its HELLO needed, and more.
_MARGIN_US: Final = 60_000_000


class Producers:
    """All producers, in the order of their last sends, oldest first."""

    def __init__(self, window: int, most: int, ttl_us: int) -> None:
        self._window = window
        self._ring_bytes = window * _BATCH_SIZE
        self._most = most
        self._ttl_us = ttl_us
        #: The producers by id, oldest send first; ``remember`` and ``forget`` change them.
        self.by_id: OrderedDict[bytes, Producer] = OrderedDict()
        self._of_connection: dict[int, bytes] = {}
        self._connection_of: dict[bytes, int] = {}
        #: The producers without a connection, idle for longest first.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        #: The time of the last batch that was forgotten for want of room; None: none was within ``ttl``.
        self._forgotten_us: int | None = None

    @property
    def most(self) -> int:
        """The most producers that are remembered."""
        return self._most

    def __len__(self) -> int:
        return len(self.by_id)

    def attach(self, connection: int, producer_id: bytes) -> None:
        """Note that a producer sends over a connection, which has one producer at a time."""
        if self._of_connection.get(connection) == producer_id:
            return
        self.disconnected(connection)
        self._of_connection[connection] = producer_id
        self._connection_of[producer_id] = connection
        self._idle.pop(producer_id, None)

    def disconnected(self, connection: int) -> None:
        """Note that a connection is gone."""
        producer_id = self._of_connection.pop(connection, None)
        if producer_id is not None and self._connection_of.get(producer_id) == connection:
            del self._connection_of[producer_id]
            if producer_id in self.by_id:
                self._idle[producer_id] = None

    def lookup(
        self, producer_id: bytes, first: int, messages: int, data_crc: int, written_us: int | None = None
    ) -> RememberedBatch | None:
        """Return where a batch is stored already; None when it is new. *written_us*: when its client wrote it at the
        earliest, if it comes again.

        Raises BadBatch when the bounds or bytes differ from those of a batch that it overlaps, SequenceForgotten when
        it is too old to compare, or its producer may have been forgotten; TooManyProducers.
        """
        producer = self.by_id.get(producer_id)
        if producer is None:
            forgotten_us = self._forgotten_us
            if written_us is not None and forgotten_us is not None and forgotten_us >= written_us - _MARGIN_US:
                raise SequenceForgotten(
                    f"more than {self._most} producers sent since, so the broker may have forgotten this one, and no "
                    "longer knows whether the batch was stored; reuse clients, or raise max_producers"
                )
            if len(self.by_id) >= self._most and not self._idle:
                raise TooManyProducers(
                    f"{self._most} producers are connected and remembered; close some, or raise max_producers"
                )
            return None
        if first >= producer.next_sequence:
            return None
        return self._find(producer, first, messages, data_crc)

    def _find(self, producer: Producer, first: int, messages: int, data_crc: int) -> RememberedBatch | None:
        for known_first, position, known_messages, known_crc, partition in producer.records():
            if known_first == first and known_messages == messages and known_crc == data_crc:
                return RememberedBatch(partition, position)
            if known_first < first + messages and first < known_first + known_messages:
                raise BadBatch(
                    f"producer sequences {first} to {first + messages - 1} overlap a stored batch ({known_first} to "
                    f"{known_first + known_messages - 1}) that has other bounds or bytes; a retry must repeat both"
                )
        if first < producer.horizon:
            raise SequenceForgotten(
                f"producer sequence {first} is older than the last {self._window} batches, which alone are remembered "
                f"(next is {producer.next_sequence}); the broker no longer knows whether it was stored"
            )
        return None  # the batch was refused before, and later ones were stored

    def remember(
        self, producer_id: bytes, first: int, messages: int, data_crc: int, partition: int, position: int, now_us: int
    ) -> None:
        """Remember a batch that is stored, or about to be (see ``forget``); *now_us* is of the monotonic clock."""
        producers = self.by_id
        producer = producers.get(producer_id)
        if producer is None:
            producer = producers[producer_id] = Producer()
            if producer_id not in self._connection_of:
                self._idle[producer_id] = None
            self._make_room(producer_id)
        else:
            producers.move_to_end(producer_id)
        ring, end = producer.ring, first + messages
        if len(ring) >= self._ring_bytes:
            producer.drop_oldest()
        ring += _BATCH.pack(first, position, messages, data_crc, partition)
        producer.last_send_us = now_us
        if end > producer.next_sequence:
            producer.next_sequence = end

    def _make_room(self, kept: bytes | None = None) -> None:
        """Forget producers that are too many, but not *kept*."""
        while len(self.by_id) > self._most:
            gone = next((producer_id for producer_id in self._idle if producer_id != kept), None)
            if gone is None:
                return
            self._forgotten_us = max(self._forgotten_us or 0, self.by_id[gone].last_send_us)
            self._remove(gone)

    def _remove(self, producer_id: bytes) -> None:
        del self.by_id[producer_id]
        self._idle.pop(producer_id, None)

    def forget(self, producer_id: bytes, first: int) -> None:
        """Forget the batch that was remembered last: it was not stored."""
        producer = self.by_id[producer_id]
        kept = [record for record in producer.records() if record[0] != first]
        producer.ring = bytearray(b"".join(_BATCH.pack(*record) for record in kept))
        producer.next_sequence = max((record[0] + record[2] for record in kept), default=producer.horizon)
        if not producer.next_sequence:
            self._remove(producer_id)

    def last(self, producer_id: bytes) -> tuple[int, RememberedBatch] | None:
        """Return the last stored sequence of a producer and where its batch lies; None for an unknown producer."""
        producer = self.by_id.get(producer_id)
        if producer is None or not producer.ring:
            return None
        first, position, messages, _, partition = max(producer.records())
        return first + messages - 1, RememberedBatch(partition, position)

    def expire(self, now_us: int) -> None:
        """Forget the producers whose ``ttl`` is over; the cost grows only with their number."""
        if self._forgotten_us is not None and self._forgotten_us + self._ttl_us <= now_us:
            self._forgotten_us = None
        while self.by_id:
            producer_id, producer = next(iter(self.by_id.items()))
            if producer.last_send_us + self._ttl_us > now_us:
                return
            self._remove(producer_id)

    # --- checkpoint ---------------------------------------------------------------------------------------------------

    def bytes_remembered(self) -> int:
        """Return the approximate size of ``packed``, as if every window were full."""
        return len(self.by_id) * (64 + self._window * _BATCH_SIZE)

    def packed(self, unclaimed: Mapping[int, int], now_us: int) -> list[Any]:
        """Return the state for a checkpoint: one row a producer, oldest send first, and before them one for those that
        were forgotten for want of room.

        Batches that lie at or behind the position that *unclaimed* gives for their partition are left out: they may be
        gone at the next start, which reads the log from there.
        """
        rows = [
            (
                producer_id,
                producer.next_sequence,
                producer.horizon,
                now_us - producer.last_send_us,
                producer.claimed(unclaimed),
            )
            for producer_id, producer in self.by_id.items()
        ]
        if self._forgotten_us is not None:
            rows.insert(0, (_FORGOTTEN, 0, 0, now_us - self._forgotten_us, b""))
        return rows

    def restore(self, rows: list[Any], now_us: int) -> None:
        """Restore the state that ``packed`` returned, also when the window has another size now."""
        for producer_id, next_sequence, horizon, idle_us, ring in rows:
            if producer_id == _FORGOTTEN:
                self._forgotten_us = now_us - idle_us
                continue
            producer = Producer(next_sequence, horizon, now_us - idle_us, ring)
            while len(producer.ring) > self._ring_bytes:
                producer.drop_oldest()
            self.by_id[producer_id] = producer
            self._idle[producer_id] = None
        self._make_room()


class RefusedBatches:
    """Batches that were refused and will be sent again; later batches of their producers must not overtake them.

    A client sends a refused batch again once it knows of the refusal, and sends nothing new before that. So batches
    that come behind a refused one were already on their way, and are refused too. A batch that comes again ends this,
    also when the client has given up those before it.
    """

    def __init__(self, window: int, most: int) -> None:
        """Remember at most *window* batches of each of at most *most* producers."""
        self._window = window
        self._most = most
        #: The errors of refused batches by producer and first producer sequence.
        self.by_producer: OrderedDict[bytes, dict[int, QmqError]] = OrderedDict()

    def add(self, producer_id: bytes, first: int, error: QmqError) -> None:
        """Remember that the batch from producer sequence *first* on was refused with *error*."""
        refused = self.by_producer.setdefault(producer_id, {})
        refused[first] = error
        if len(refused) > self._window:  # no QMQ client has so many in flight; never block it for good
            del self.by_producer[producer_id]
        elif len(self.by_producer) > self._most:
            self.by_producer.popitem(last=False)

    def check(self, producer_id: bytes, first: int) -> None:
        """Raise the error of the first refused batch that a new batch from *first* on would overtake."""
        refused = self.by_producer.get(producer_id)
        if refused is None:
            return
        lowest = min(refused)
        if first in refused:
            del self.by_producer[producer_id]
        elif first > lowest:
            raise refused[lowest]


class _Claim(NamedTuple):
    """The client that claimed a producer, and its last connection."""

    client: bytes
    connection: int


class ProducerClaims:
    """The producers that connected clients have claimed, at most one for each connection. Nothing is stored on disk."""

    def __init__(self) -> None:
        self._by_producer: dict[bytes, _Claim] = {}
        self._by_connection: dict[int, bytes] = {}

    def claim(self, connection: int, producer_id: bytes, client: bytes) -> None:
        """Give a producer to a client's connection, and free what that connection or that client's last one had.

        Raises ProducerInUse while another client has the producer.
        """
        claim = self._by_producer.get(producer_id)
        if claim is not None and claim.client != client:
            raise ProducerInUse(
                "another client that is connected sends under this producer: give each client a producer of its own, "
                "or end the other one (where its machine is gone, the broker finds out within two minutes)"
            )
        if claim is not None:
            del self._by_connection[claim.connection]
        self.disconnected(connection)
        self._by_producer[producer_id] = _Claim(client, connection)
        self._by_connection[connection] = producer_id

    def disconnected(self, connection: int) -> None:
        """Free the producer of a connection that is gone or claims another one."""
        producer_id = self._by_connection.pop(connection, None)
        if producer_id is not None:
            del self._by_producer[producer_id]
