"""What the clients of a simulated broker have sent, been told and been given: the record each crash is held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from qmq.broker.ports.effects import Effect, PulledMessages, Refused, Sent
from qmq.errors import StorageError, SyncFailed
from qmq.format.pieces import Run
from tests.broker.harness import batch_of, runs_of_answer

LogPosition = tuple[int, int]  # partition, position


class Found(NamedTuple):
    """One message as a pull gave it."""

    partition: int
    position: int  # of its batch
    ordinal: int
    subject: str
    sequence: int
    body: bytes


@dataclass
class Batch:
    """A batch, sent once or more, always the same bytes."""

    number: int
    producer: bytes
    sequence: int
    contents: dict[str, list[bytes]]
    #: Where it lies as far as anybody was told.
    log_position: LogPosition | None = None
    #: The last that its sender knows: acknowledged, refused for good, or neither.
    acknowledged: bool = False
    refused: bool = False
    #: It was sent in vain, and may have been stored even so.
    unknown: bool = False
    #: It must be there from now on, whatever happens.
    durable: bool = False

    @property
    def bodies(self) -> list[bytes]:
        """In the order of the batch."""
        return [body for bodies in self.contents.values() for body in bodies]

    def data(self) -> memoryview:
        """Its bytes as a client sends them."""
        return batch_of(dict(self.contents), self.sequence, self.producer)


@dataclass
class Client:
    """All clients of one store."""

    batches: list[Batch] = field(default_factory=list)
    #: What was seen in a place, and under a sequence: for good.
    placed: dict[LogPosition, bytes] = field(default_factory=dict)
    sequenced: dict[tuple[str, int], bytes] = field(default_factory=dict)
    #: What each group was given.
    got: dict[str, set[bytes]] = field(default_factory=dict)
    #: A broker has been ready at least once, so the store is there for good.
    served: bool = False
    #: What was asked in this life of the broker.
    sends: dict[int, tuple[Batch, bool]] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)

    def clone(self) -> Client:
        """The same, to go on in another way; nothing asked before is answered there."""
        return Client(
            [replace(batch) for batch in self.batches],
            dict(self.placed),
            dict(self.sequenced),
            {group: set(bodies) for group, bodies in self.got.items()},
            self.served,
        )

    def make(self, producer: bytes, counts: dict[str, int], size: int) -> Batch:
        """A new batch of a producer, *counts* messages a subject, none like any other."""
        number = len(self.batches)
        sequence = max((b.sequence + len(b.bodies) for b in self.batches if b.producer == producer), default=0)
        contents = {
            subject: [f"{number}/{subject}/{index}/".encode().ljust(size, b".") for index in range(count)]
            for subject, count in counts.items()
        }
        batch = Batch(number, producer, sequence, contents)
        self.batches.append(batch)
        return batch

    # --- what the broker says ----------------------------------------------------------------------------------------

    def hear(self, effects: Iterable[Effect]) -> None:
        """Note what was said, and hold it against all that was said before."""
        for effect in effects:
            if isinstance(effect, Sent):
                self._acknowledged(effect, *self.sends.pop(effect.request))
            elif isinstance(effect, Refused):
                self._refused(effect)
            elif isinstance(effect, PulledMessages):
                self._given(runs_of_answer(effect), self.pulls.pop(effect.request))

    def _acknowledged(self, sent: Sent, batch: Batch, flush: bool) -> None:
        log_position = sent.partition, sent.position
        assert batch.log_position in (None, log_position) or not batch.durable, (batch, log_position)
        batch.log_position, batch.acknowledged, batch.refused = log_position, True, False
        batch.durable |= flush
        firsts = [sent.first_sequences] if isinstance(sent.first_sequences, int) else sent.first_sequences.tolist()
        ordinal = 0
        for (subject, bodies), first in zip(batch.contents.items(), firsts, strict=True):
            for index, body in enumerate(bodies):
                self.see(Found(*log_position, ordinal, subject, first + index, body))
                ordinal += 1

    def _refused(self, refused: Refused) -> None:
        assert isinstance(refused.error, StorageError), refused.error
        sent = self.sends.pop(refused.request, None)
        if sent is not None:
            batch, _ = sent
            batch.unknown |= isinstance(refused.error, SyncFailed)
            is_open = any(other is batch for other, _ in self.sends.values())  # tried twice: the other may be stored
            batch.refused = not (batch.unknown or batch.acknowledged or is_open)
        self.pulls.pop(refused.request, None)

    def _given(self, runs: list[Run], group: str) -> None:
        mine = self.got.setdefault(group, set())
        for found in found_in(runs):
            self.see(found)
            mine.add(found.body)

    def see(self, found: Found) -> None:
        """A client was told where that message is: neither place nor sequence may be another's, ever."""
        log_position = found.partition, found.position + found.ordinal
        assert self.placed.setdefault(log_position, found.body) == found.body, (
            "position given again",
            found,
            self.placed[log_position],
        )
        key = found.subject, found.sequence
        assert self.sequenced.setdefault(key, found.body) == found.body, ("sequence given again", found)

    # --- after a crash -----------------------------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """Nothing that was asked will be answered. With the power, what was not on disk may be gone, also the cut that
        takes a refused batch away.
        """
        for batch in [batch for batch, _ in self.sends.values()] + (self.batches if power else []):
            batch.refused, batch.unknown = False, True
        self.sends.clear()
        self.pulls.clear()
        for batch in self.batches:
            batch.durable |= batch.acknowledged and not power

    def check(self, messages: list[Found]) -> None:
        """Hold all that a recovered store has against the record. What is there is there for good."""
        last_positions: dict[bytes, Found] = {}
        for found in messages:
            assert found.body not in last_positions, ("two messages of one send", found, last_positions[found.body])
            last_positions[found.body] = found
            self.see(found)
        for batch in self.batches:
            there = [last_positions[body] for body in batch.bodies if body in last_positions]
            assert not there or len(there) == len(batch.bodies), ("half a batch", batch, there)
            assert there or not batch.durable, ("lost", batch)
            assert not (there and batch.refused), ("refused, and there", batch)
            if there:
                log_position = there[0].partition, there[0].position
                assert [(f.partition, f.position, f.ordinal) for f in there] == [
                    (*log_position, ordinal) for ordinal in range(len(there))
                ], there
                assert not batch.durable or batch.log_position in (None, log_position)
                batch.log_position, batch.durable = log_position, True
            else:
                batch.log_position, batch.acknowledged, batch.unknown = None, False, False

    def check_group(self, group: str) -> None:
        """A group that has pulled until nothing was left has been given everything that is there."""
        mine = self.got.get(group, set())
        missed = [body for batch in self.batches if batch.durable for body in batch.bodies if body not in mine]
        assert not missed, (group, "was never given", missed)


def found_in(runs: list[Run]) -> list[Found]:
    """The messages of some runs."""
    return [
        Found(run.partition, run.position, run.ordinal + index, run.subject, run.first_sequence + index, body)
        for run in runs
        for index, body in enumerate(run.bodies())
    ]
