"""The messages of a run that have a key, or that are copies of one message."""

from __future__ import annotations

import numpy as np

from qmq.errors import BadBatch
from qmq.format.hashing import hash_bytes, key_hash
from qmq.format.layout import HAS_KEY_HASH, HAS_MORE_KEYS, HAS_ORIGIN_ID
from qmq.format.run import Run
from qmq.net.protocol.selection import Selection


class MessageMatcher:
    """Finds the messages of single batches that a selection takes, by hash first, then by the real key."""

    def __init__(self, selection: Selection) -> None:
        self._key = selection.key
        if selection.key is not None:
            value = key_hash(selection.key)
        else:
            value = 0 if selection.original is None else hash_bytes(selection.original)
        #: The hash by which the key index has the messages.
        self.value = value
        self._hash = np.uint64(value)
        self._raw_key = b"" if selection.key is None else selection.key.encode()
        self._original = None if selection.original is None else np.frombuffer(selection.original, "V16")[0]

    @property
    def flags(self) -> int:
        """The columns without which no message of a batch is taken."""
        return (HAS_KEY_HASH if self._key is not None else 0) | (HAS_ORIGIN_ID if self._original is not None else 0)

    def matches(self, run: Run) -> list[int]:
        """Return the messages of a run that are taken, ascending."""
        if run.flags & self.flags != self.flags:
            return []
        found: list[int]
        if self._original is not None:
            originals = run.column(HAS_ORIGIN_ID)
            assert originals is not None
            found = np.flatnonzero(originals == self._original).tolist()
        else:
            hashes = run.column(HAS_KEY_HASH)
            assert hashes is not None
            found = np.flatnonzero(hashes == self._hash).tolist()
            if run.flags & HAS_MORE_KEYS and bytes(run.payload).find(self._raw_key) >= 0:
                found = list(range(run.count))  # the column has the first key of each message only
        return found if self._key is None else [index for index in found if self._has_key(run, index)]

    def _has_key(self, run: Run, index: int) -> bool:
        """Return whether a message has the key itself: other keys may have the same hash."""
        try:
            return self._key in run.header(index).get("k", ())
        except BadBatch:  # its sender packed something else
            return False
