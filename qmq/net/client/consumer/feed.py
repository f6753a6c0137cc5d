"""The messages that a loop has taken from the broker and not reached yet, and how many it takes at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import chain
from operator import length_hint
from typing import Any, Final, Generic
from weakref import WeakKeyDictionary, ref

from qmq.durations import Duration
from qmq.errors import Fenced
from qmq.format.layout import LANE_ORDERED
from qmq.format.run import Run
from qmq.net.client.brokers import OpenConsumer
from qmq.net.client.consumer.in_flight import PendingDisposition
from qmq.net.client.consumer.message import M, delivery_sequences_of
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.nacks import FailureLog
from qmq.net.client.consumer.order_turns import OrderTurns
from qmq.net.client.consumer.pull import Puller, release
from qmq.net.protocol.types import Disposition

#: Seconds after which a loop that reaches no message releases those that it has taken: its handler may take forever.
STUCK_AFTER: Final = 1.0

#: Seconds of work that a loop takes at a time.
PREFETCH_SECONDS: Final = 0.1
#: A solo consumer takes no messages from others, so it begins with more than one.
FIRST_SOLO_PREFETCH: Final = 16
MAX_PREFETCH: Final = 32_768


class Prefetch:
    """Decides how many messages one loop takes from the broker at a time. No I/O; time is an argument.

    Other consumers of the group do not get messages that this one has received. So the loop takes about as many as it
    handled in PREFETCH_SECONDS before, and at least one: a slow consumer keeps none waiting, and a fast one seldom
    pulls.
    """

    def __init__(self, is_solo: bool) -> None:
        self._count = FIRST_SOLO_PREFETCH if is_solo else 1
        self._last_count = 0
        self._last_at = 0.0

    def wanted(self, now: float) -> int:
        """Return how many messages to take next, by the time that the last ones took."""
        if not self._last_count:
            return self._count
        took = now - self._last_at
        fits = max(int(self._last_count * PREFETCH_SECONDS / took), 1) if took > 0 else MAX_PREFETCH
        if fits < self._count:
            self._count = fits
        elif self._last_count > self._count // 2:  # a batch comes as a whole, so the count is rarely the one asked for
            self._count = min(2 * self._count, fits, MAX_PREFETCH)
        return self._count

    def record(self, count: int, now: float) -> None:
        """Record that *count* messages were received at *now*."""
        self._last_count, self._last_at = count, now

    def set_aside(self) -> None:
        """Note that one of the messages that were received last was not handled."""
        self._last_count = max(self._last_count - 1, 0)


class MessageFeed(Generic[M]):
    """Holds the messages that a loop has taken from the broker and has not reached yet."""

    def __init__(self, puller: Puller | MultiBrokerPuller, kind: type[M], consumers: set[OpenConsumer]) -> None:
        """*consumers*: those of the client that have subscribed."""
        #: The next messages. Messages that are removed from the feed do not come out of it.
        self.ready: Iterator[M] = iter(())
        self._puller = puller
        self._consumers = consumers
        self._kind = kind
        self._prefetch = Prefetch(puller.is_solo)
        self._runs: deque[Run] = deque()
        self._is_over = True  # whether ``ready`` has come to its end
        # The run that is handed out, and an iterator over its next messages. A loop in another thread may advance it.
        self._current: tuple[Run | None, Iterator[int]] = None, iter(())
        self._turns = OrderTurns[M]()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Whether ``stop`` was called: no more messages are taken.
        self.stopped = False
        #: Functions to call when the feed stops, and when messages of the program are no longer in flight.
        self.on_stop: list[Callable[[], object]] = []
        self.on_dropped: list[Callable[[], object]] = []
        # How many refused acks each task or thread has been told of that takes messages, and anybody.
        self._reported: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._reported_to_any = 0
        # The last that was noted: a task that has ended keeps the messages that it returned.
        self._taker: Callable[[], object] = lambda: None
        self._waiting: set[asyncio.Task[Any]] = set()  # tasks that wait for messages
        self._ended: set[asyncio.Task[Any]] = set()  # those of them that ``stop`` has cancelled
        for ack_sender in puller.ack_senders:
            ack_sender.on_dropped.append(self._drop)

    async def refill(self) -> None:
        """Wait for the next messages and put them into ``ready``: few if the last ones took long to handle, and none
        once the feed stops.
        """
        loop = self._loop
        if loop is None:  # to ask for it each time is a system call
            loop = self._loop = asyncio.get_running_loop()
        runs = await self._until_stopped(self._puller.pull(self._prefetch.wanted(loop.time()), 1, None))
        self._prefetch.record(runs[0].count if len(runs) == 1 else sum(run.count for run in runs), loop.time())
        self._runs += runs
        if self._is_over:
            # Else somebody may be in the middle of ``ready``, which goes on: two of them would mix up the order.
            self._is_over = False
            self.ready = chain.from_iterable(self._views())
        if self._timer is None and not self._puller.is_solo:
            self._watch(loop)

    async def pull(self, max_count: int, min_count: int, timeout: Duration | None, max_bytes: int) -> list[Run]:
        """Pull as ``Puller.pull`` does, and return the messages that the loop has not reached first."""
        left = self.take_rest()
        if left:
            self._puller.put_back(left)
        return await self._until_stopped(self._puller.pull(max_count, min_count, timeout, max_bytes))

    async def _until_stopped(self, pulling: Coroutine[Any, Any, list[Run]]) -> list[Run]:
        """Return what *pulling* returns; nothing once the feed stops.

        ``stop`` cancels the pull as a program would, which loses no message, and the cancellation ends here.
        """
        if self.stopped:
            pulling.close()
            await asyncio.sleep(0)  # a loop over pulls must not keep the event loop
            return []
        task = asyncio.current_task(self._loop)
        assert task is not None
        if task is not self._taker():
            self._taker = ref(task)
            self.note(task)
        others = task.cancelling()
        self._waiting.add(task)
        try:
            return await pulling
        except asyncio.CancelledError:
            if task in self._ended and task.cancelling() == others + 1:
                return []
            raise
        finally:
            self._waiting.discard(task)
            if task in self._ended:
                self._ended.discard(task)
                task.uncancel()

    def stop(self) -> None:
        """Take no more messages, release those that the loop has not reached, and end the pulls that wait.

        In an at_most_once group it releases none, because no other consumer would get them: the loop still gives them.
        """
        if self.stopped:
            return
        self.stopped = True
        for ack_sender in self._puller.ack_senders:
            ack_sender.stop()
        if not self._puller.is_solo:
            release([run for run in self.take_rest() if run.in_flight.fenced is None])
        elif not self._puller.is_at_most_once:
            self.take_rest()
        for call in tuple(self.on_stop):
            call()
        for task in self._waiting:
            self._ended.add(task)
            task.cancel()

    # --- order keys ---------------------------------------------------------------------------------------------------

    def begin_turn(self, message: M) -> float | None:
        """[any thread] Return None if a worker may handle a message with an order key now, as no other has its slot.
        Else the message waits, here or for a while at the broker, and the worker goes on after so many seconds.
        """
        in_flight = message._run.in_flight
        seconds = self._turns.begin(message, time.monotonic(), goes_back=in_flight is not None)
        if seconds is None:
            return None
        self._prefetch.set_aside()
        if seconds and in_flight is not None:
            self._give_back(message, seconds)
            return 0.0
        return seconds

    def end_turn(self, message: M) -> M | None:
        """[any thread] Note that the handler of a message with an order key has ended; return the next of its slot."""
        return self._turns.end(message, time.monotonic())

    def _give_back(self, message: M, seconds: float) -> None:
        """[any thread] Release a message that waits for its slot, and what follows it there."""
        in_flight, number = message._run.in_flight, message._number
        back = PendingDisposition(number, number + 1, Disposition.RELEASE, int(seconds * 1e6))
        in_flight.owner.call_from_thread(lambda: in_flight.owner.hand_back_soon(in_flight, back))

    # --- refused acks ------------------------------------------------------------------------------------------------

    def note(self, taker: object) -> None:
        """[any thread] Note that a task or thread takes messages: its flushes report all refusals from now on."""
        if taker not in self._reported:
            self._reported[taker] = self._refused()

    async def flush(self, taker: object) -> None:
        """Wait until every ack so far is confirmed. Raises Fenced with how many were refused that this task or thread
        has not been told of; of one that takes no messages, that nobody has been told of.
        """
        before = self._reported.get(taker, self._reported_to_any)
        await self._puller.flush()
        refused = self._refused()
        self._reported_to_any = refused
        if taker in self._reported:
            self._reported[taker] = refused
        if refused > before:
            raise Fenced(
                f"{refused - before} acks of consumer {self._puller.id} were refused: their messages are no longer in "
                "flight, and are delivered again"
            )

    def _refused(self) -> int:
        return sum(ack_sender.refused for ack_sender in self._puller.ack_senders)

    @property
    def failures(self) -> FailureLog:
        """The log of failures that no nack tells a broker of."""
        return self._puller.pullers[0].failures

    @property
    def has_ready(self) -> bool:
        """Whether the loop has messages to reach."""
        return self._left() > 0

    async def enter(self) -> None:
        """Subscribe, as ``Puller.enter``. The client leaves if the program does not."""
        await self._puller.enter()
        self._consumers.add(self)

    async def leave(self, error: BaseException | None, *, closes: bool = False) -> None:
        """Have the puller leave. An Exception as *error* fails the messages given out without a disposition. *closes*:
        the client closes its connections next, so the broker's answer is not waited for.
        """
        self._consumers.discard(self)
        if isinstance(error, Exception) and not self._puller.is_solo:
            release(self.take_rest())
        try:
            await self._puller.leave(error, closes=closes)
        finally:
            self.take_rest()
            self._current, self.ready = (None, iter(())), iter(())  # a kept message leads here

    def take_rest(self) -> list[Run]:
        """Return the messages that the loop has not reached, and remove them from it."""
        run, coming = self._current
        left = list(coming)
        rest = [message._run.with_body(message._index, message.body) for message in self._turns.take()]
        if run is not None and left:
            rest.append(run.slice(left[0] - run.delivery_sequence, run.count))
        while self._runs:
            rest.append(self._runs.popleft())
        return rest

    def _views(self) -> Iterator[Iterator[M]]:
        while self._runs:
            run = self._runs.popleft()
            if run.in_flight is not None and run.in_flight.fenced is not None:
                continue
            coming = iter(delivery_sequences_of(run))
            self._current = run, coming
            if run.lane >= LANE_ORDERED and run.in_flight is not None:
                yield self._open_messages(run, coming)
            else:
                envelopes, bodies = run.views()
                yield map(self._kind, envelopes, coming, bodies)
        self._current = None, iter(())  # the last run is not kept until more messages come
        self._is_over = True

    def _open_messages(self, run: Run, coming: Iterator[int]) -> Iterator[M]:
        """Yield the messages of a run, without those that go back because an earlier one of their slot does."""
        parts, bodies = run.views()
        # Another thread may empty ``coming``.
        for envelopes, number, body in zip(parts, coming, bodies, strict=False):
            if not run.in_flight.goes_back(number):
                yield self._kind(envelopes, number, body)

    def _drop(self) -> None:
        """Remove the messages of the current run from the loop if they are no longer in flight."""
        run, coming = self._current
        if run is not None and run.in_flight.fenced is not None:
            deque(coming, maxlen=0)
        for call in tuple(self.on_dropped):
            call()

    def _left(self) -> int:
        return length_hint(self._current[1]) + sum(run.count for run in list(self._runs))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._left() + self._turns.count
        self._timer = loop.call_later(STUCK_AFTER, self._look, loop, left) if left else None

    def _look(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """Release the messages that the loop has not reached, if it has reached none since the last look."""
        self._timer = None
        if self._left() + self._turns.count == before:
            release([run for run in self.take_rest() if run.in_flight.fenced is None])
        for message, seconds in self._turns.surplus(time.monotonic()) if not self._puller.is_solo else ():
            self._give_back(message, seconds)
        self._watch(loop)
