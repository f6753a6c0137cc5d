"""Batches with unique texts: which of their messages repeat a text, and what their senders are told of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.commands import Now, Send
from qmq.broker.ports.effects import SentDuplicates
from qmq.broker.publish.dedup import RememberedBatch
from qmq.broker.publish.staging import OwnBatch, StagedBatch
from qmq.broker.publish.unique_texts import UniqueTexts, keys_of, rows_of
from qmq.errors import QmqError
from qmq.format.batch import CheckedBatch
from qmq.format.layout import DELAY_PARTITION, NO_SEQUENCE, UNIQUE_ROW
from qmq.format.unique import counts_of, unique_hashes


class UniqueBatch(NamedTuple):
    """A batch as it was sent, the ordinals of its messages with unique texts, ascending, and the keys of the texts."""

    batch: CheckedBatch
    ordinals: npt.NDArray[np.int64]
    keys: list[bytes]


#: By ordinal in the batch as it was sent: the UNIQUE_ROW of the first message with the text, or the ordinal of that
#: message, if it is in the same batch.
Duplicates = Mapping[int, bytes | int]


def unique_batch(view: memoryview, batch: CheckedBatch) -> UniqueBatch:
    """Return what a checked batch has of unique texts."""
    ordinals, hashes = unique_hashes(view, batch.header)
    return UniqueBatch(batch, ordinals, keys_of(batch, ordinals, hashes))


def duplicates_of(sent: UniqueBatch, texts: UniqueTexts) -> Duplicates:
    """Return the messages of a new batch that repeat a text, one that is remembered or that of an earlier message."""
    keys = sent.keys
    rows = list(map(texts.by_key.get, keys))
    if not any(rows) and (len(keys) == 1 or len(set(keys)) == len(keys)):
        return {}
    found = dict[int, bytes | int]()
    firsts = dict[bytes, bytes | int]()
    for ordinal, key, row in zip(sent.ordinals.tolist(), keys, rows, strict=True):
        first = firsts.setdefault(key, ordinal if row is None else row)
        if first != ordinal or row is not None:
            found[ordinal] = first
    return found


def left_out_before(sent: UniqueBatch, texts: UniqueTexts, known: RememberedBatch) -> dict[int, bytes] | None:
    """Return the messages that were left out of a batch that is stored already; None where some of its texts are
    forgotten, so nobody knows.
    """
    # No other message has a position of these: a batch has more bytes than messages.
    own = range(known.position, known.position + sent.batch.header.messages)
    found, seen = dict[int, bytes](), set[bytes]()
    for ordinal, key in zip(sent.ordinals.tolist(), sent.keys, strict=True):
        row = texts.by_key.get(key)
        if row is None:
            return None
        position, _, _, partition = UNIQUE_ROW.unpack(row)
        if partition == known.partition and position in own and key not in seen:
            seen.add(key)
        else:
            found[ordinal] = row
    return found


def places_of(duplicates: Mapping[int, bytes]) -> set[RememberedBatch]:
    """Return where the first messages of duplicates are: partitions and positions."""
    rows = map(UNIQUE_ROW.unpack, set(duplicates.values()))
    return {RememberedBatch(partition, position) for position, _, _, partition in rows}


def answer_to(
    command: Send, sent: CheckedBatch, duplicates: Mapping[int, bytes], known: RememberedBatch, stored_at_us: int,
    first_sequences: int | npt.NDArray[np.uint64],
) -> SentDuplicates:  # fmt: skip
    """Return the answer to a batch of which *duplicates* were left out; the rest is stored at *known*, and its runs
    have these first sequences.
    """
    counts = counts_of(sent)
    runs = np.searchsorted(np.cumsum(counts), np.fromiter(duplicates, np.int64), side="right")
    is_stored = counts > np.bincount(runs, minlength=len(counts))
    firsts = np.full(len(counts), NO_SEQUENCE, np.uint64)
    if is_stored.any():
        firsts[is_stored] = first_sequences
    rows = b"".join([ordinal.to_bytes(4, "little") + row for ordinal, row in sorted(duplicates.items())])
    return SentDuplicates(
        command.connection, command.request, known.position, stored_at_us, known.partition, firsts, rows
    )


class UniqueArrival:
    """The texts of a batch that is staged: they are kept once it is written."""

    def __init__(self, texts: UniqueTexts, duplicates: Duplicates, now: Now) -> None:
        """*duplicates* were left out of the batch."""
        self.duplicates = duplicates
        #: Another object that hears of the write.
        self.other: OwnBatch | None = None
        self._texts = texts
        self._now_us = now.monotonic_us
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []

    def stage(self, sent: UniqueBatch, stored: CheckedBatch, batch: StagedBatch, partition: int) -> dict[int, bytes]:
        """Remember where the messages of a staged batch will be; *stored* is what is left of it. Return the UNIQUE_ROW
        of each duplicate, by its ordinal.
        """
        duplicates, firsts = self.duplicates, None if partition == DELAY_PARTITION else batch.first_sequences
        if not duplicates:
            self._keys = sent.keys
            self._rows = rows_of(stored, sent.ordinals, batch.position, batch.stored_at_us, partition, firsts)
            self._texts.stage(self._keys, self._rows)
            return {}
        is_left_out = np.zeros(sent.batch.header.messages, np.bool_)
        is_left_out[list(duplicates)] = True
        kept = ~is_left_out[sent.ordinals]
        ordinals = sent.ordinals[kept] - np.cumsum(is_left_out)[sent.ordinals[kept]]
        self._rows = rows_of(stored, ordinals, batch.position, batch.stored_at_us, partition, firsts)
        self._keys = [key for key, is_kept in zip(sent.keys, kept.tolist(), strict=True) if is_kept]
        self._texts.stage(self._keys, self._rows)
        by_ordinal = dict(zip(sent.ordinals[kept].tolist(), self._rows, strict=True))
        return {
            ordinal: by_ordinal[first] if isinstance(first, int) else first for ordinal, first in duplicates.items()
        }

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Keep the texts."""
        self._texts.keep(self._keys, self._rows, self._now_us)
        if self.other is not None:
            self.other.stored(partition, batch)

    def refused(self, error: QmqError) -> None:
        """Forget the texts."""
        self._texts.drop(self._keys, self._rows)
        if self.other is not None:
            self.other.refused(error)

    def unknown(self, error: QmqError) -> None:
        """Leave the texts taken: the next start finds the batch, or not."""
        if self.other is not None:
            self.other.unknown(error)
