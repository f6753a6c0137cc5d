"""Batches with unique texts as a server hands them in, and what their answers say of each message."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qmq.broker.ports.effects import Effect, Refused, Sent, SentDuplicates
from qmq.format.build import build_flat, make_header, with_unique
from qmq.format.layout import DELAY_PARTITION, NO_SEQUENCE
from qmq.format.unique import hash_of
from tests.broker.harness import PRODUCER, START_US

#: ordinal u32 | position u64 | stored_at_us u64 | sequence u64 | partition u16
_DUPLICATE = struct.Struct("<IQQQH")


class Draft(NamedTuple):
    """A message to send."""

    subject: str
    body: bytes
    text: str | None


class Told(NamedTuple):
    """What an answer says of one message."""

    duplicate: bool
    partition: int
    position: int
    sequence: int


def unique_batch_of(
    drafts: Sequence[Draft], sequence: int, producer_id: bytes = PRODUCER, delay_us: int = 0
) -> memoryview:
    """Return a writable batch of these messages, which are sorted by subject."""
    subjects = sorted({draft.subject for draft in drafts})
    headers = []
    for draft in drafts:
        header = make_header(None, None, None, delay_us)
        headers.append(header if draft.text is None else with_unique(header, hash_of(draft.text)))
    parts = build_flat(
        subjects, [sum(draft.subject == subject for draft in drafts) for subject in subjects],
        [draft.body for draft in drafts], headers, created_at_us=START_US, producer_id=producer_id,
        producer_sequence=sequence, has_unique=True,
    )  # fmt: skip
    return memoryview(bytearray(b"".join(parts)))


def told_of(effect: Effect, drafts: Sequence[Draft]) -> list[Told]:
    """Return what an answer says of each message of a batch."""
    assert isinstance(effect, Sent | SentDuplicates), effect
    left_out = {}
    if isinstance(effect, SentDuplicates):
        for ordinal, position, _, sequence, partition in _DUPLICATE.iter_unpack(effect.duplicates):
            left_out[ordinal] = Told(True, partition, position, sequence)
    subjects = sorted({draft.subject for draft in drafts})
    firsts = dict(zip(subjects, np.atleast_1d(effect.first_sequences).tolist(), strict=True))
    told, position = list[Told](), effect.position
    for ordinal, draft in enumerate(drafts):
        if ordinal in left_out:
            told.append(left_out[ordinal])
            continue
        sequence = NO_SEQUENCE if effect.partition >= DELAY_PARTITION else firsts[draft.subject]
        told.append(Told(False, effect.partition, position, sequence))
        position += 1
        if firsts[draft.subject] != NO_SEQUENCE:
            firsts[draft.subject] += 1
    return told


def answers_in(effects: Sequence[Effect]) -> list[Sent | SentDuplicates | Refused]:
    """Return the answers to sends among effects."""
    return [effect for effect in effects if isinstance(effect, Sent | SentDuplicates | Refused)]
