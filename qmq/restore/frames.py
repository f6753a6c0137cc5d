"""Make frames for a broker of the messages that are read from an archive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from qmq.format.copies.restored import RestoredBatch, numbered, restored_batches
from qmq.format.layout import MESSAGE_ID
from qmq.net.protocol.types import MAX_RESTORE_BATCHES
from qmq.restore.progress import Counts
from qmq.restore.read import ArchiveDamage, Found, RestoreStep

#: A frame is sent when it has so many bytes or batches, or after so many steps.
FRAME_BYTES: Final = 4 << 20
FRAME_BATCHES: Final = MAX_RESTORE_BATCHES
_STEPS: Final = 4_096


@dataclass
class RestoreFrame:
    """Batches to send together, and the counts and positions that are done once they are stored.

    ``is_whole``: the frame ends with a whole batch of the archive, so that progress can be saved after it.
    """

    batches: list[RestoredBatch] = field(default_factory=list)
    size: int = 0
    done: list[tuple[str, int, int]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    damages: list[ArchiveDamage] = field(default_factory=list)
    #: Bytes of the archive that were read.
    read: int = 0
    is_whole: bool = True

    def add(self, batch: RestoredBatch) -> None:
        """Add a batch."""
        self.batches.append(batch)
        self.size += len(batch.buffer)
        self.counts.restored += batch.messages
        self.counts.restored_bytes += len(batch.buffer)

    def settle(self, step: RestoreStep) -> None:
        """Record that the whole step is in this frame or an earlier one."""
        if step.is_settled:
            self.done.append((step.log, step.start, step.end))
        self.read += step.end - step.start
        self.counts.restored += step.found
        self.counts.private += step.private
        self.counts.replayed += step.replayed
        if step.damage is not None:
            self.damages.append(step.damage)
        if step.damage is not None and step.is_settled:
            self.counts.damaged += step.damage.messages or 0
            self.counts.damages += 1

    def without(self, found: Found) -> None:
        """Remove the batches that the broker has already."""
        self.batches = [batch for batch in self.batches if not _is_in(batch, found)]

    def pack(self, run: bytes, following: int) -> tuple[bytes, int]:
        """Return the batches, numbered as messages of *run* from *following* on, and the number after them."""
        for batch in self.batches:
            numbered(batch.buffer, run, following)
            following += batch.messages
        return b"".join(batch.buffer for batch in self.batches), following


def frames_of(steps: Iterator[RestoreStep], most_bytes: int) -> Iterator[RestoreFrame]:
    """Yield the frames of all steps, each with at most *most_bytes* of batches. Raises MessageTooLarge."""
    frame, count, limit = RestoreFrame(), 0, min(FRAME_BYTES, most_bytes)
    for step in steps:
        for number, batch in enumerate(restored_batches(step.parts, step.created_at_us, most_bytes)):
            size = len(batch.buffer)
            if frame.batches and (frame.size + size > limit or len(frame.batches) == FRAME_BATCHES):
                frame.is_whole = not number
                yield frame
                frame, count = RestoreFrame(), 0
            frame.add(batch)
        frame.settle(step)
        count += 1
        if count == _STEPS:
            yield frame
            frame, count = RestoreFrame(), 0
    yield frame


def _is_in(batch: RestoredBatch, found: Found) -> bool:
    store_id, partition, position = MESSAGE_ID.unpack(batch.first)
    return position in found.get((store_id, partition), ())
