"""``Consumer.run``: workers that call a handler with each message, until the consumer stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from qmq.errors import InvalidOption, UsageError
from qmq.format.layout import LANE_ORDERED
from qmq.net.client.consumer.feed import MessageFeed
from qmq.net.client.consumer.message import Message, fail, is_dropped, is_open
from qmq.net.client.tasks import begin_task

log = logging.getLogger("qmq.client")

#: Seconds that a cancelled handler has to end before ``run`` returns without it.
CANCEL_GRACE: Final = 5.0

Handler = Callable[[Message], Awaitable[object]]


class HandlerRun:
    """Runs a handler in several workers over one feed.

    Each worker is one task that takes message after message: a task for each message would cost more than many
    handlers do.
    """

    def __init__(self, feed: MessageFeed[Message], handle: Handler, concurrency: int) -> None:
        """Raises InvalidOption."""
        if type(concurrency) is not int or not 1 <= concurrency <= 100_000:
            raise InvalidOption(f"concurrency must be a number of handlers from 1 to 100000, not {concurrency!r:.80}")
        if not callable(handle):
            raise InvalidOption(f"run needs a handler, an async function of one message, not {handle!r:.80}")
        self._feed = feed
        self._filling = asyncio.Lock()
        self._workers = [_Worker(feed, handle, self._filling) for _ in range(concurrency)]

    async def until_stopped(self, drain: float) -> None:
        """Handle messages until the feed stops, then wait *drain* seconds for handlers; cancel those that still run.

        Raises the error that ended a pull, after the same wait.
        """
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        waiting = begin_task(stopped.wait(), loop, "qmq-run")
        self._feed.on_stop.append(stopped.set)
        self._feed.on_dropped.append(self._drop)
        tasks = [worker.start(loop) for worker in self._workers]
        try:
            await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
            self._feed.stop()
            busy = sum(worker.message is not None for worker in self._workers)
            if busy:
                log.info("a consumer stops, and waits up to %g s for %d handler%s", drain, busy, "s" * (busy != 1))
            _, late = await asyncio.wait(tasks, timeout=drain)
            if late:
                log.warning("cancelled %d handler%s: no end within %g s", len(late), "s" * (len(late) != 1), drain)
                self.cut()
                _, late = await asyncio.wait(late, timeout=CANCEL_GRACE)
            for worker in self._workers:
                if worker.task in late:
                    log.error("the handler of %s goes on although it was cancelled", worker.message)
        except BaseException:
            self._feed.stop()
            self.cut()
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
            raise
        finally:
            waiting.cancel()
            self._feed.on_stop.remove(stopped.set)
            self._feed.on_dropped.remove(self._drop)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    def signalled(self) -> None:
        """Stop; at the second call cancel the handlers that still run."""
        if self._feed.stopped:
            self.cut()
        self._feed.stop()

    def cut(self) -> None:
        """Cancel the handlers that run; their messages are released."""
        for worker in self._workers:
            worker.cancel()

    def _drop(self) -> None:
        for worker in self._workers:
            worker.drop()


class _Worker:
    """Handles one message after the other."""

    __slots__ = ("_dropped", "_feed", "_filling", "_handle", "message", "task")

    def __init__(self, feed: MessageFeed[Message], handle: Handler, filling: asyncio.Lock) -> None:
        #: The message in hand; None while the worker waits for one.
        self.message: Message | None = None
        self.task: asyncio.Task[None] | None = None
        self._feed = feed
        self._handle = handle
        self._filling = filling  # held by the one worker that waits for the next messages
        self._dropped = False

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Start the worker's task."""
        self.task = begin_task(self._work(), loop, "qmq-handler")
        self._feed.note(self.task)
        return self.task

    def cancel(self) -> None:
        """Cancel the handler that runs, and the worker with it."""
        if self.task is not None:
            self.task.cancel()

    def drop(self) -> None:
        """Cancel the handler that runs if its message is no longer in flight; the worker goes on."""
        message = self.message
        if message is not None and not self._dropped and is_dropped(message):
            assert self.task is not None
            self._dropped = True
            self.task.cancel()

    async def _work(self) -> None:
        feed, handle = self._feed, self._handle
        while True:
            try:
                for message in feed.ready:  # shared by all workers
                    self.message = message
                    if message._run.lane >= LANE_ORDERED:
                        seconds = feed.begin_turn(message)
                        if seconds is None:
                            await self._handle_in_turn(message)
                        elif seconds:
                            await asyncio.sleep(seconds)
                    else:
                        await handle(message)
                        message.ack()
            except Exception as error:
                self._failed(error)
                continue
            except asyncio.CancelledError as error:
                self._cancelled(error)
                continue
            self._undo_drop()
            self.message = None
            if feed.stopped:
                return
            async with self._filling:
                if not feed.has_ready:
                    await feed.refill()

    async def _handle_in_turn(self, message: Message) -> None:
        """Handle a message with an order key, then those of its slot that came meanwhile."""
        current: Message | None = message
        while current is not None:
            self.message = current
            try:
                if is_open(current):  # else it comes again with an earlier one of its order key
                    await self._handle(current)
                    current.ack()
            except asyncio.CancelledError as error:
                self._cancelled(error)
            except Exception as error:
                self._failed(error)
            current = self._feed.end_turn(current)

    def _failed(self, error: Exception) -> None:
        """Nack the message in hand. Raises UsageError if the handler is none."""
        message = self.message
        if message is None:  # as below
            raise error
        if isinstance(error, TypeError) and _is_of_the_call(error):
            self.message = None
            raise UsageError(
                f"the handler of run must be an async function of one message, not {self._handle!r:.80}: {error}"
            ) from error
        fail(message, error, self._feed.failures)

    def _cancelled(self, error: asyncio.CancelledError) -> None:
        """Go on after a handler that was cancelled because of its message, or by itself; else release the message and
        raise the cancellation.
        """
        assert self.message is not None
        assert self.task is not None
        self._undo_drop()
        if self.task.cancelling():
            self.message.release()
            raise error
        if not is_dropped(self.message):  # the handler awaited something that was cancelled
            fail(self.message, error, self._feed.failures)

    def _undo_drop(self) -> None:
        if self._dropped:
            self._dropped = False
            assert self.task is not None
            self.task.uncancel()


def _is_of_the_call(error: Any) -> bool:
    """Return whether *error* comes from the call of the handler: it takes other arguments, or returns no awaitable."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None
