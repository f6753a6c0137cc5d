"""Received messages: thin views over runs. A field is read from the bytes when it is touched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from qmq.errors import QmqError
from qmq.format.layout import MESSAGE_ID
from qmq.format.pieces import Run
from qmq.net.receipts import utc_from_us

if TYPE_CHECKING:
    import pyarrow


class Message:
    """One received message. Holding it holds the bytes of the pull's answer that it came in."""

    __slots__ = ("_index", "_run")

    def __init__(self, run: Run, index: int) -> None:
        self._run = run
        self._index = index

    @property
    def id(self) -> str:
        """The message's id, 32 hex digits: its name for good."""
        return str(self._run.id(self._index))

    @property
    def subject(self) -> str:
        """The subject it was sent to."""
        return self._run.subject

    @property
    def sequence(self) -> int:
        """Its number among the messages of its subject."""
        return self._run.first_sequence + self._index

    @property
    def body(self) -> bytes:
        """The bytes that were sent."""
        return self._run.body(self._index)

    @property
    def key(self) -> str | None:
        """The key it was sent with, if any."""
        keys = self._run.header(self._index).get("k")
        return keys[0] if keys else None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags it was sent with."""
        return tuple(self._run.header(self._index).get("t", ()))

    @property
    def properties(self) -> dict[str, str]:
        """The properties it was sent with; a dict of the caller's own."""
        return dict(self._run.header(self._index).get("p", ()))

    @property
    def attempt(self) -> int:
        """Which hand-out this is, from 1."""
        return 1

    @property
    def created_at_us(self) -> int:
        """When its sender made the batch it came in: microseconds since 1970, by the sender's clock."""
        return self._run.created_at_us

    @property
    def created_at(self) -> datetime:
        """When its sender made the batch it came in, UTC, by the sender's clock."""
        return utc_from_us(self._run.created_at_us)

    @property
    def stored_at_us(self) -> int:
        """When the broker stored it: microseconds since 1970, UTC."""
        return self._run.stored_at_us

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return utc_from_us(self._run.stored_at_us)

    def __repr__(self) -> str:
        return f"<Message {self.id} {self.subject!r} sequence {self.sequence}, {len(self.body)} bytes>"


def messages_of(runs: Sequence[Run]) -> list[Message]:
    """One view a message, run after run."""
    if len(runs) == 1:
        return list(_views_of(runs[0]))
    return [Message(run, index) for run in runs for index in range(run.count)]


def each_message(runs: Iterable[Run]) -> Iterator[Message]:
    """The same views, each made when it is come to."""
    return chain.from_iterable(map(_views_of, runs))


def _views_of(run: Run) -> Iterator[Message]:
    return map(Message, repeat(run), range(run.count))


def runs_of(messages: Iterable[Message]) -> list[Run]:
    """The runs that these views lie in, cut to what they show. Views of one run stand together and in order."""
    runs = []
    for run, views in groupby(messages, key=_run_of):
        indexes = [view._index for view in views]
        runs.append(run if len(indexes) == run.count else run.slice(indexes[0], indexes[-1] + 1))
    return runs


def _run_of(message: Message) -> Run:
    return message._run


class MessageBatch(Sequence[Message]):
    """What one ``pull_batch`` brought: columns, and views of single messages on demand. Nothing is decoded ahead."""

    __slots__ = ("_runs", "_starts", "_total")

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._starts: list[int] = []  # made when a message is asked for by number
        self._total = sum(run.count for run in runs)

    def __len__(self) -> int:
        return self._total

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if index < 0:
            index += self._total
        if not 0 <= index < self._total:
            raise IndexError(f"message {index} of {self._total}")
        if not self._starts:
            counts = np.array([run.count for run in self._runs], np.int64)
            self._starts = (np.cumsum(counts) - counts).tolist()
        number = bisect_right(self._starts, index) - 1
        return Message(self._runs[number], index - self._starts[number])

    def __iter__(self) -> Iterator[Message]:
        return each_message(self._runs)

    @property
    def subjects(self) -> list[str]:
        """The subject of each message."""
        subjects: list[str] = []
        for run in self._runs:
            subjects += [run.subject] * run.count
        return subjects

    @property
    def bodies(self) -> list[bytes]:
        """The body of each message."""
        bodies: list[bytes] = []
        for run in self._runs:
            bodies += run.bodies()
        return bodies

    def to_arrow(self) -> pyarrow.Table:
        """The messages as a pyarrow Table, one column a field of Message. Raises QmqError when pyarrow is missing."""
        try:
            import pyarrow as pa
        except ImportError:
            raise QmqError("to_arrow needs pyarrow, which is not installed; run: pip install 'qmq[arrow]'") from None
        us = pa.timestamp("us", tz="UTC")
        text_list, text_map = pa.list_(pa.string()), pa.map_(pa.string(), pa.string())
        headers = [run.header(index) for run in self._runs for index in range(run.count)]
        return pa.table(
            {
                "id": pa.array(self._ids(), pa.string()),
                "subject": pa.array(self.subjects, pa.string()),
                "sequence": pa.array(self._per_message("first_sequence", count_up=True), pa.uint64()),
                "body": pa.array(self.bodies, pa.large_binary()),
                "key": pa.array([header["k"][0] if "k" in header else None for header in headers], pa.string()),
                "tags": pa.array([header.get("t", ()) for header in headers], text_list),
                "properties": pa.array([list(header.get("p", {}).items()) for header in headers], text_map),
                "attempt": pa.array([1] * self._total, pa.uint32()),
                "created_at": pa.array(self._per_message("created_at_us"), pa.int64()).cast(us),
                "stored_at": pa.array(self._per_message("stored_at_us"), pa.int64()).cast(us),
            }
        )

    def _ids(self) -> list[str]:
        pack = MESSAGE_ID.pack
        return [
            pack(run.store_id, run.partition, position).hex()
            for run in self._runs
            for position in range(run.position + run.ordinal, run.position + run.ordinal + run.count)
        ]

    def _per_message(self, field: str, count_up: bool = False) -> Any:
        """A field of the runs for each message: int64[n]; with *count_up* it grows by one within a run."""
        counts = np.array([run.count for run in self._runs], np.int64)
        values = np.repeat(np.array([getattr(run, field) for run in self._runs], np.int64), counts)
        if count_up:
            values += np.arange(self._total) - np.repeat(np.cumsum(counts) - counts, counts)
        return values

    def __repr__(self) -> str:
        return f"<MessageBatch of {self._total} messages>"
