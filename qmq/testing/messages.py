"""Messages without a broker, for unit tests of handlers: real ones, made of the bytes that a broker would send."""

from __future__ import annotations

import json as json_module
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

from qmq.errors import InvalidOption
from qmq.format.batch import BatchLimits, check_batch, stamp
from qmq.format.build import RunContent, build_batch, either_of, make_header
from qmq.format.ids import MessageId
from qmq.format.layout import PRODUCER_ID_SIZE, RUN_REPLAYED
from qmq.format.pieces import read_answer
from qmq.format.run import Envelopes, Run
from qmq.names import check_subject
from qmq.net.client.consumer.in_flight import FailedAttempt, InFlightWindow, PendingDisposition
from qmq.net.client.consumer.message import Message
from qmq.net.client.options import Priority, body_of, lane_of
from qmq.net.client.sync.consumer import SyncMessage
from qmq.net.protocol.types import ConsumerState, Disposition

DispositionName = Literal["ack", "nack", "release", "reject"]

_NAMES: Final[dict[Disposition, DispositionName]] = {
    Disposition.NACK: "nack",
    Disposition.RELEASE: "release",
    Disposition.REJECT: "reject",
}
_SECRET: Final = bytes(16)

M = TypeVar("M", bound=Message)


class DispositionRecorder:
    """Takes the disposition of one message in place of a consumer, and records the first one."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self.name: DispositionName | None = None
        self.delay: float | None = None
        self.reason = ""
        self.refused = 0
        self.has_left = False
        self.hands_over = False
        self.loop: Any = self
        self.failures = self
        self.thread_dispositions = self.waiting = self
        self.is_due = True

    def record(self, name: DispositionName, delay_us: int | None = None, reason: str = "") -> None:
        """Record a disposition, unless there is one."""
        if self.name is None:
            self.name, self.reason = name, reason
            self.delay = None if delay_us is None else delay_us / 1e6

    def want_send(self) -> None:
        """Record an ack: the window wants to send it."""
        self.record("ack")

    def call_soon_threadsafe(self, call: Callable[..., object], *arguments: object) -> None:
        """Call it now: there is no thread of a client."""
        call(*arguments)

    def append(self, ack: int) -> None:
        """Record an ack of a message without asyncio."""
        self.record("ack")

    def call_from_thread(self, dispose: Callable[[], object]) -> bool:
        """Give a disposition now: there is no thread of a client."""
        dispose()
        return True

    def create_task(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Run a wait for a disposition to its end: the recorder waits for nothing."""
        with suppress(StopIteration):
            waiting.send(None)

    def hand_back(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> Awaitable[object]:
        """Record a nack or reject."""
        for back in backs:
            self.hand_back_soon(in_flight, back)
        return _Nothing()

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Record a disposition."""
        self.record(_NAMES[back.disposition], back.delay_us, back.reason)

    def release(self, run: Envelopes, start: int, end: int, delay_us: int | None) -> None:
        """Record a release."""
        self.record("release", delay_us)

    def cancelled(
        self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition], fail: Callable[[], FailedAttempt]
    ) -> None:
        """Record the nack of a handler that was cancelled, as by a consumer that goes on."""
        self.hand_back_soon(in_flight, backs[0].of(fail()))

    def return_early(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Do nothing: a single message follows no other one of its order key."""

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int, *, acked: bool = True) -> None:
        """Do nothing: a disposition is recorded at once."""

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """Do nothing: a test may drop a message without a disposition."""

    def late(self, call: str, shown: object) -> None:
        """Do nothing: there is no block that could have ended."""

    def add_batch(self, messages: object, error: BaseException, delay_us: int | None) -> None:
        """Do nothing: the test sees the error itself."""

    def delay_after(self, attempt: int) -> int | None:
        """Return the group's delay: there is no group."""
        return None

    def add_rejected(self, messages: object, reason: str) -> None:
        """Do nothing: the disposition is recorded."""

    def is_last(self, attempt: int) -> bool:
        """Return whether no attempt follows this one."""
        return attempt >= self._max_attempts


class _Nothing:
    """A wait that is over."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


class Recorded:
    """The disposition of a message of a unit test."""

    __slots__ = ()

    _run: Envelopes

    @property
    def disposition(self) -> DispositionName | None:
        """The first disposition that the message was given: "ack", "nack", "release", "reject"; None: none yet."""
        return self._recorder.name

    @property
    def in_flight(self) -> bool:
        """Whether it was given no disposition."""
        return self._recorder.name is None

    @property
    def delay(self) -> float | None:
        """The seconds that a nack or release, or ``raise qmq.Retry(after=...)``, asked for; None: the group's delay, or
        for a release none.
        """
        return self._recorder.delay

    @property
    def reason(self) -> str:
        """The reason of a nack or reject; after an exception its type and text."""
        return self._recorder.reason

    @property
    def _recorder(self) -> DispositionRecorder:
        owner: DispositionRecorder = self._run.in_flight.owner
        return owner


class RecordedMessage(Recorded, Message):
    """A ``qmq.Message`` of a unit test: ``qmq.testing.message`` makes it."""

    __slots__ = ()


class RecordedSyncMessage(Recorded, SyncMessage):
    """A ``qmq.SyncMessage`` of a unit test: ``qmq.testing.sync_message`` makes it."""

    __slots__ = ()


class MessageFields(NamedTuple):
    """The arguments of ``qmq.testing.message``."""

    body: bytes
    subject: str
    json: object
    key: str | None
    keys: Sequence[str] | None
    tags: Sequence[str]
    properties: Mapping[str, str] | None
    priority: Priority | None
    order_key: str | None
    attempt: int
    max_attempts: int
    sequence: int
    id: str | None
    stored_at: datetime | None
    replayed: bool


def recorded(kind: type[M], fields: MessageFields) -> M:
    """Return a message with these fields. Raises UsageError."""
    for name, least in (("attempt", 1), ("max_attempts", 1), ("sequence", 0)):
        if type(number := getattr(fields, name)) is not int or number < least:
            raise InvalidOption(f"{name} must be a whole number from {least}, not {number!r:.80}")
    run = _stored(fields)
    run.attempt = fields.attempt
    run.in_flight = InFlightWindow(DispositionRecorder(fields.max_attempts), ConsumerState(1, 1, 0, 1, 1, 0))
    return kind(run, 0, run.body(0))


def _stored(fields: MessageFields) -> Run:
    """Return the run of one message, read from a batch as a broker stores it."""
    if fields.json is not None and fields.body:
        raise InvalidOption("give either body or json, not both")
    body, properties = body_of(fields.body), dict(fields.properties or {})
    if fields.json is not None:
        body = json_module.dumps(fields.json, separators=(",", ":")).encode()
        properties.setdefault("content-type", "application/json")
    lane = lane_of(fields.priority)
    keys = either_of(fields.key, fields.keys)
    header = make_header(keys, fields.tags, properties, lane=lane, order_key=fields.order_key)
    where = MessageId(os.urandom(6), 0, int.from_bytes(os.urandom(5), "little"))
    if fields.id is not None:
        where = MessageId.parse(fields.id)
    now_us = time.time_ns() // 1_000 if fields.stored_at is None else round(fields.stored_at.timestamp() * 1_000_000)
    parts = build_batch(
        [RunContent(check_subject(fields.subject), [body], [header], header.lane)],
        created_at_us=now_us, producer_id=bytes(PRODUCER_ID_SIZE), producer_sequence=0,
    )  # fmt: skip
    view = memoryview(bytearray(b"".join(parts)))
    checked = check_batch(view, BatchLimits())
    stamp(
        view, checked, position=where.position, stored_at_us=now_us, partition=where.partition,
        store_id=where.store_id, secret=_SECRET, first_sequences=fields.sequence,
    )  # fmt: skip
    (run,), _ = read_answer(view)
    if fields.replayed:
        run.run_flags |= RUN_REPLAYED
    return run
