"""The verdicts of a consumer of a group, brought to the broker: acknowledgements in the background, others at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from qmq.errors import Fenced, QmqError, Retry
from qmq.net import wire
from qmq.net.connection import Answer, Connection
from qmq.net.holding import Holding, Verdict, check_delay
from qmq.net.wire import Kind

log = logging.getLogger("qmq.client")

#: Acknowledgements wait so long for more, or for a pull that takes them along.
ACK_DELAY: Final = 0.05
_WARN_EVERY: Final = 10.0

Subscribed = tuple[Connection, int]


class Holder(Holding):
    """Of one consumer. *subscribed* gives connection and subscription, as soon as there are any."""

    def __init__(self, consumer: str, subscribed: Callable[[], Awaitable[Subscribed]]) -> None:
        super().__init__(self._later)
        self._consumer = consumer
        self._subscribed = subscribed
        #: Where all of this runs, once it does.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned_at = -_WARN_EVERY
        #: Called with what a handler raised.
        self.on_error: Callable[[Exception], object] | None = None

    # --- acknowledgements --------------------------------------------------------------------------------------------

    def _later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ACK_DELAY, self._due)

    def _due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # where it is not this timer that calls
            self._timer = None
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_soon(), name="qmq-acks")

    async def _send_soon(self) -> None:
        try:
            self.send(await self._subscribed())
        except QmqError as error:
            log.debug("consumer %s could not send acknowledgements: %s", self._consumer, error)
            self._tell()

    def send(self, subscribed: Subscribed) -> None:
        """Send what is acknowledged and was not sent yet."""
        self.loop = asyncio.get_running_loop()
        connection, subscription = subscribed
        while intervals := self.take_acks():
            packed, crc = wire.pack_numbers(intervals)
            payload = wire.ACK.pack(subscription, crc) + packed
            connection.ask(Kind.ACK, self._confirmer(intervals), payload=payload)

    def _confirmer(self, intervals: list[int]) -> Callable[[Answer | QmqError], None]:
        def answered(answer: Answer | QmqError) -> None:
            if isinstance(answer, Answer):
                (refused,) = wire.ACKED.unpack(answer.payload)
                self.confirm(intervals, refused)
            elif isinstance(answer, Fenced):
                self.fence(answer)
            elif not answer.retryable:
                self.confirm(intervals, sum(intervals[1::2]) - sum(intervals[::2]))
                log.warning("consumer %s: acknowledgements were refused: %s", self._consumer, answer)
            else:  # the connection is gone: they are sent again with the next one
                self._later()
            if not self.unconfirmed:
                self._tell()

        return answered

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced with how many were not."""
        while self.unconfirmed:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._due()
            await waiter
            if self.unconfirmed:
                await asyncio.sleep(ACK_DELAY)
        refused, self.refused = self.refused, 0
        if refused:
            raise Fenced(
                f"{refused} acknowledgements of consumer {self._consumer} were refused: what they were for is not held "
                "by it any more, and is handed out again"
            )

    # --- other verdicts ----------------------------------------------------------------------------------------------

    async def hand_back(self, start: int, end: int, verdict: Verdict, delay_us: int | None, reason: str) -> None:
        """Hand messages back; returns once the broker has that durably. Raises Fenced."""
        self.take_back(start, end)
        place, tried = self.place, False
        while True:
            connection, subscription = await self._subscribed()
            if self.place is not None and place is not None and self.place.incarnation != place.incarnation:
                raise Fenced(str(self.fenced or "what this consumer held is handed out again"))
            delay = wire.OWN_DELAY if delay_us is None else delay_us
            payload = wire.HAND_BACK.pack(subscription, verdict, b"", start, end, delay)
            try:
                await connection.request(Kind.HAND_BACK, {"reason": reason[:300]}, payload)
                return
            except Fenced:
                if tried:  # the answer to the first try was lost, and that try had been taken
                    return
                raise
            except QmqError as error:
                if not error.retryable:
                    raise
            tried = True
            await asyncio.sleep(ACK_DELAY)

    def release(self, start: int, end: int) -> None:
        """Hand messages back unstarted, in the background."""
        task = asyncio.get_running_loop().create_task(self._release(start, end), name="qmq-release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, start: int, end: int) -> None:
        try:
            await self.hand_back(start, end, Verdict.RELEASE, None, "")
        except QmqError as error:
            log.debug("consumer %s: a release was refused: %s", self._consumer, error)

    async def failed(self, sequence: int, error: Exception) -> None:
        """A handler has raised: its message comes again."""
        after = error.after if isinstance(error, Retry) else None
        if not isinstance(error, Retry):
            self._warn(error)
        try:
            reason = f"{type(error).__name__}: {error}"
            await self.hand_back(sequence, sequence + 1, Verdict.NACK, check_delay(after), reason)
        except Fenced as fenced:
            log.debug("consumer %s: %s", self._consumer, fenced)

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_EVERY:
            self._warned_at = now
            log.warning("consumer %s: a handler has failed", self._consumer, exc_info=error)
        if self.on_error is not None:
            try:
                self.on_error(error)
            except Exception:
                log.exception("consumer %s: on_error has failed", self._consumer)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self, timeout: float) -> None:
        """Have what is on the way arrive, as far as there is time."""
        try:
            async with asyncio.timeout(timeout):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                await self.flush()
        except (QmqError, TimeoutError) as error:
            log.debug("consumer %s: %s", self._consumer, error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in (*self._tasks, *([self._sending] if self._sending is not None else [])):
                task.cancel()
