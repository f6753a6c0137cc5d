"""``SyncConsumer.run``: threads that call a handler with each message, until the consumer stops."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from qmq.errors import InvalidOption, UsageError
from qmq.format.layout import LANE_ORDERED
from qmq.net.client.consumer.feed import MessageFeed
from qmq.net.client.consumer.message import fail, is_open
from qmq.net.client.sync.loop_thread import ClientThread

log = logging.getLogger("qmq.client")


class ThreadRun:
    """Runs a handler in several threads over one feed, whose loop runs in the client's thread."""

    def __init__(
        self,
        client: ClientThread,
        feed: MessageFeed[Any],
        handle: Callable[[Any], object],
        concurrency: int,
    ) -> None:
        """Raises InvalidOption and UsageError."""
        if type(concurrency) is not int or not 1 <= concurrency <= 10_000:
            raise InvalidOption(f"concurrency must be a number of threads from 1 to 10000, not {concurrency!r:.80}")
        if not callable(handle) or inspect.iscoroutinefunction(handle):
            raise UsageError(f"run needs a handler, a plain function of one message, not {handle!r:.80}")
        self._client = client
        self._feed = feed
        self._handle = handle
        self._taking = threading.Lock()  # held by the one thread that takes the next message, or waits for it
        self._threads = [
            threading.Thread(target=self._work, name=f"qmq-handler-{number}", daemon=True)
            for number in range(concurrency)
        ]
        self._left = concurrency
        self._stopped = threading.Event()
        self._done = threading.Event()  # all threads have ended, or need not be waited for
        self._in_hand: dict[threading.Thread, Any] = {}
        self._error: BaseException | None = None

    def until_stopped(self, drain: float) -> None:
        """Handle messages until the feed stops, then wait *drain* seconds for handlers. Raises the error that ended a
        pull, after the same wait.
        """
        self._client.call(self._watch)
        try:
            for thread in self._threads:
                thread.start()
            self._stopped.wait()
            busy = len(self._in_hand)
            if busy:
                log.info("a consumer stops, and waits up to %g s for %d handler%s", drain, busy, "s" * (busy != 1))
            self._done.wait(min(drain, threading.TIMEOUT_MAX))
        finally:
            self._client.call(self._feed.stop)
            self._client.call(self._unwatch)
        for message in tuple(self._in_hand.values()):
            log.error("the handler of %s goes on in its thread: it did not end within %g s", message, drain)
        if self._error is not None:
            raise self._error

    def signalled(self) -> None:
        """Stop; at the second call wait no longer for handlers."""
        if self._feed.stopped:
            self._done.set()
        self._client.call_soon(self._feed.stop)

    def _watch(self) -> None:
        if self._feed.stopped:
            self._stopped.set()
        self._feed.on_stop.append(self._stopped.set)

    def _unwatch(self) -> None:
        self._feed.on_stop.remove(self._stopped.set)

    def _work(self) -> None:
        thread = threading.current_thread()
        self._feed.note(thread)
        try:
            while (message := self._next()) is not None:
                self._in_hand[thread] = message
                if message._run.lane >= LANE_ORDERED:
                    self._handle_in_turn(thread, message)
                else:
                    self._handle_one(message)
                del self._in_hand[thread]
        except BaseException as error:  # also what ends a thread, such as SystemExit
            self._in_hand.pop(thread, None)
            self._error = self._error or error
            self._client.call_soon(self._feed.stop)
            self._stopped.set()
        finally:
            with self._taking:
                self._left -= 1
                if not self._left:
                    self._done.set()

    def _next(self) -> Any:
        """Return the next message; wait while there is none. None: the feed has stopped."""
        with self._taking:
            while True:
                for message in self._feed.ready:
                    if message._run.lane < LANE_ORDERED:
                        return message
                    seconds = self._feed.begin_turn(message)
                    if seconds is None:
                        return message
                    if seconds:
                        self._stopped.wait(seconds)
                if self._feed.stopped:
                    return None
                self._client.run(self._feed.refill())

    def _handle_in_turn(self, thread: threading.Thread, message: Any) -> None:
        """Handle a message with an order key, then those of its slot that came meanwhile."""
        while message is not None:
            self._in_hand[thread] = message
            if self._client.run(_is_open(message)):  # also: the failure of the one before has reached the loop
                self._handle_one(message)
            message = self._feed.end_turn(message)

    def _handle_one(self, message: Any) -> None:
        try:
            self._handle(message)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise UsageError(f"run needs a handler of one message, not {self._handle!r:.80}: {error}") from error
            fail(message, error, self._feed.failures, from_thread=True)
        except Exception as error:
            fail(message, error, self._feed.failures, from_thread=True)
        except BaseException:
            message.release()
            raise
        else:
            message.ack()


async def _is_open(message: Any) -> bool:
    return is_open(message)
