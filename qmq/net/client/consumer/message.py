"""Received messages: thin views over runs. Fields are read from the bytes when they are touched; bodies are made at
once, as nearly everybody wants them, and for a whole run that costs little.

A group's tags, checked by name: the broker goes by their bits, of which several names may have the same.
"""

from __future__ import annotations

import asyncio
import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby, repeat
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload

import numpy as np

from qmq.errors import InvalidOption, ProtocolError, QmqError
from qmq.format.layout import HAS_CREATED_AT, HAS_ORIGIN_ID, MESSAGE_ID, RUN_REPLAYED
from qmq.format.run import Run
from qmq.net.client.consumer.in_flight import PendingDisposition, check_delay, check_reason
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol import frames
from qmq.net.protocol.types import Disposition

if TYPE_CHECKING:
    import pyarrow


def tags_of(meta: dict[str, Any]) -> frozenset[str]:
    """The tags that an answer names. Raises ProtocolError when they were damaged on the way."""
    tags = meta["tags"]
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ProtocolError("an answer names tags that are no texts; it is asked for again")
    if frames.crc_of_texts(tags) != meta.get("tags_crc"):
        raise ProtocolError("an answer names tags that are not what was sent; it is asked for again")
    return frozenset(tags)


def with_tags(runs: list[Run], tags: frozenset[str]) -> list[Run]:
    """Those messages that have one of the tags; the others are acknowledged, as the broker's are that it skips."""
    found = []
    for run in runs:
        wanted = [not tags.isdisjoint(run.header(index).get("t", ())) for index in range(run.count)]
        if all(wanted):
            found.append(run)
            continue
        for is_wanted, places in groupby(enumerate(wanted), itemgetter(1)):
            indexes = [index for index, _ in places]
            start, stop = indexes[0], indexes[-1] + 1
            if is_wanted:
                found.append(run.slice(start, stop))
            elif run.in_flight is not None:
                run.in_flight.ack(run.delivery_sequence + start, run.delivery_sequence + stop)
    return found


class Message:
    """One received message. Holding it holds the bytes of the pull's answer that it came in."""

    __slots__ = {"_number": None, "_run": None, "body": "The bytes that were sent."}

    body: bytes

    def __init__(self, run: Run, number: int, body: bytes) -> None:
        """*number* is its delivery sequence: one of *run*, whose body that is."""
        self._run = run
        self._number = number
        self.body = body

    @property
    def _index(self) -> int:
        """Which message of its run it is."""
        return self._number - self._run.delivery_sequence

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
        """Which attempt to handle it this is, from 1."""
        return self._run.attempt

    @property
    def replayed(self) -> bool:
        """Whether it was restored from an archive: under the id that it had before."""
        return bool(self._run.run_flags & RUN_REPLAYED)

    @property
    def created_at_us(self) -> int:
        """When its sender made the batch it came in: microseconds since 1970, by the sender's clock."""
        return self._run.created_us(self._index)

    @property
    def created_at(self) -> datetime:
        """When its sender made the batch it came in, UTC, by the sender's clock."""
        return utc_from_us(self._run.created_us(self._index))

    @property
    def stored_at_us(self) -> int:
        """When the broker stored it: microseconds since 1970, UTC."""
        return self._run.stored_at_us

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return utc_from_us(self._run.stored_at_us)

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self) -> None:
        """It is handled: the group does not see it again. Confirmed in the background; ``Consumer.flush`` waits for it.

        Does nothing for who follows alone, and when it has a disposition already. After the consumer's block it changes
        nothing, as the message was handed back when that ended: the first such call is warned of in the log.
        """
        in_flight = self._run.in_flight
        if in_flight is not None:
            number = self._number
            if in_flight.tail == number:
                in_flight.tail = number + 1
            else:
                if in_flight.fenced is not None:
                    in_flight.late("ack()", number, number + 1, self)
                in_flight.ack(number, number + 1)

    async def nack(self, delay: float | None = None, reason: str = "") -> None:
        """It could not be handled: the group gets it again after *delay* seconds (None: the group's own for this
        attempt). Returns once the broker has that durably. Raises InvalidOption, and Fenced where it is not held any
        more, as after the consumer's block.
        """
        await self._hand_back(Disposition.NACK, delay, reason)

    async def reject(self, reason: str) -> None:
        """Nobody can handle it: it goes to the dead letters at once, with the reason. Raises Fenced."""
        await self._hand_back(Disposition.REJECT, None, reason)

    def release(self) -> None:
        """Hand it back unstarted: somebody gets it at once, and it does not count as an attempt. After the consumer's
        block as ``ack``.
        """
        in_flight = self._run.in_flight
        if in_flight is not None:
            if in_flight.fenced is not None:
                in_flight.late("release()", self._number, self._number + 1, self)
            in_flight.owner.release(in_flight, self._number, self._number + 1)

    async def _hand_back(self, disposition: Disposition, delay: float | None, reason: str) -> None:
        in_flight = self._run.in_flight
        if in_flight is None:
            raise InvalidOption("who follows alone, or takes part in an at_most_once group, has nothing to hand back")
        number, whole = self._number, (self._run, self._index)
        back = PendingDisposition(number, number + 1, disposition, check_delay(delay), check_reason(reason), whole)
        await in_flight.owner.hand_back(in_flight, back)

    async def __aenter__(self) -> Self:
        in_flight = self._run.in_flight
        if in_flight is not None:
            if in_flight.fenced is not None:
                in_flight.late("`async with message`", self._number, self._number + 1, self)
            in_flight.begin(asyncio.current_task())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Acknowledge it; or hand it back, when the block has raised: an Exception counts as an attempt, and is
        swallowed. ``raise qmq.Retry(after=...)`` picks the delay. What ends tasks and programs releases it.

        When it is not in flight any more, the block is cancelled and left, and the program goes on behind it.
        """
        in_flight = self._run.in_flight
        if in_flight is None:
            return False
        task = asyncio.current_task()
        assert task is not None
        if in_flight.end(task):
            return await _go_on(task, error)
        if error is None:
            self.ack()
            return False
        if not isinstance(error, Exception):
            in_flight.owner.release(in_flight, self._number, self._number + 1)
            return False
        await in_flight.owner.failed(in_flight, self._number, error, (self._run, self._index))
        return True

    def __repr__(self) -> str:
        return f"<Message {self.id} {self.subject!r} sequence {self.sequence}, {len(self.body)} bytes>"


async def _go_on(task: asyncio.Task[Any], error: BaseException | None) -> bool:
    """A task was cancelled because the message is not in flight any more: take that back; whether *error* is
    swallowed.
    """
    if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
        return False
    is_cancelled = isinstance(error, asyncio.CancelledError)
    if not is_cancelled:
        try:
            await asyncio.sleep(0)  # it may be on its way yet
        except asyncio.CancelledError:
            is_cancelled = True
    if task.uncancel() and is_cancelled:
        raise asyncio.CancelledError  # somebody else cancels it too
    return True


M = TypeVar("M", bound=Message)


def delivery_sequences_of(run: Run) -> range:
    """The delivery sequences of its messages."""
    return range(run.delivery_sequence, run.delivery_sequence + run.count)


def messages_of(runs: Sequence[Run], kind: type[M] = Message) -> list[M]:  # type: ignore[assignment]  # M is Message then
    """One view a message, run after run."""
    messages: list[M] = []
    # All of them live on, so the collector would find nothing: it looked at each two or three times as they are made.
    collects = gc.isenabled()
    gc.disable()
    try:
        for run in runs:
            messages += map(kind, repeat(run), delivery_sequences_of(run), run.bodies())
    finally:
        if collects:
            gc.enable()
    return messages


def each_message(runs: Iterable[Run], kind: type[M] = Message) -> Iterator[M]:  # type: ignore[assignment]  # M is Message then
    """The same views, each made when it is come to."""
    return chain.from_iterable(map(kind, repeat(run), delivery_sequences_of(run), run.bodies()) for run in runs)


class MessageBatch(Sequence[Message]):
    """What one ``pull_batch`` brought: columns, and views of single messages on demand. Nothing is decoded ahead."""

    __slots__ = ("_runs", "_starts", "_total")

    _kind: ClassVar[type[Message]] = Message

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
        run, index = self._runs[number], index - self._starts[number]
        return self._kind(run, run.delivery_sequence + index, run.body(index))

    def __iter__(self) -> Iterator[Message]:
        return each_message(self._runs, self._kind)

    def ack(self) -> None:
        """All of them are handled, as ``Message.ack``."""
        in_flight, start, end = None, 0, 0
        for run in self._runs:  # what goes on from the run before is acknowledged with it
            if run.in_flight is not in_flight or run.delivery_sequence != end:
                if in_flight is not None:
                    in_flight.ack(start, end)
                in_flight, start = run.in_flight, run.delivery_sequence
            end = run.delivery_sequence + run.count
        if in_flight is not None:
            in_flight.ack(start, end)

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
                "attempt": pa.array(self._per_message("attempt"), pa.uint32()),
                "created_at": pa.array(self._created_us(), pa.int64()).cast(us),
                "stored_at": pa.array(self._per_message("stored_at_us"), pa.int64()).cast(us),
            }
        )

    def _ids(self) -> list[str]:
        pack = MESSAGE_ID.pack
        ids = list[str]()
        for run in self._runs:
            if run.flags & HAS_ORIGIN_ID:
                ids += [str(run.id(index)) for index in range(run.count)]
                continue
            first = run.position + run.ordinal
            ids += [pack(run.store_id, run.partition, position).hex() for position in range(first, first + run.count)]
        return ids

    def _created_us(self) -> Any:
        values, start = self._per_message("created_at_us"), 0
        for run in self._runs:
            column = run.column(HAS_CREATED_AT)
            if column is not None:
                values[start : start + run.count] = column
            start += run.count
        return values

    def _per_message(self, field: str, count_up: bool = False) -> Any:
        """A field of the runs for each message: int64[n]; with *count_up* it grows by one within a run."""
        counts = np.array([run.count for run in self._runs], np.int64)
        values = np.repeat(np.array([getattr(run, field) for run in self._runs], np.int64), counts)
        if count_up:
            values += np.arange(self._total) - np.repeat(np.cumsum(counts) - counts, counts)
        return values

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._total} messages>"
