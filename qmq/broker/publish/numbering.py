"""The numbers of the subjects that a batch has messages of; those that are new are registered."""

from __future__ import annotations

import numpy as np

from qmq.broker.publish.staging import Numbers
from qmq.format.batch import CheckedBatch
from qmq.format.private import PRIVATE
from qmq.names import check_subject
from qmq.storage.store import Store


class Numbering:
    """Of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, batch: CheckedBatch, *, forced: bool = False) -> int | Numbers:
        """The subject number of each run; new subjects are registered, *forced* also beyond their limit.

        Raises what check_subject and Store.add_subject do.
        """
        if self._store.has_private and PRIVATE in "".join(batch.names):
            for name in batch.names:
                check_subject(name)
        if batch.run is not None:
            name = batch.names[batch.run[0]]
            number = self._store.subject_number(name)
            return self._add(name, forced) if number is None else number
        assert batch.runs is not None
        known = self._store.subject_numbers(batch.names)
        if None in known:
            for name, number in zip(batch.names, known, strict=True):
                if number is None:
                    check_subject(name)  # all of them before any is registered
            known = [
                self._add(name, forced) if number is None else number
                for name, number in zip(batch.names, known, strict=True)
            ]
        by_run: Numbers = np.array(known, np.int64)[batch.runs["subject"]]
        return by_run

    def _add(self, name: str, forced: bool) -> int:
        """Register a subject; a table may name it twice."""
        number = self._store.subject_number(name)
        return self._store.add_subject(check_subject(name), forced=forced) if number is None else number
