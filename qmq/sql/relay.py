"""The relay: sends the committed rows of an outbox to a broker, each once.

A row is sent with its uid as the unique text, so a row that was sent and not noted, because something was killed
between the two, is stored once all the same. Rows are claimed by their state, shard by shard.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from qmq import Client, SyncClient
from qmq.errors import DatabaseFailed, QmqError, SendFailed, SendUnknown, UsageError
from qmq.sql import shards
from qmq.sql.rows import SHARDS, OutboxRow, send_options, unique_of
from qmq.sql.shards import Backlog, ClaimedRows, Executor, Owner, RowOutcomes

log = logging.getLogger("qmq.sql")

T = TypeVar("T")

#: How long, in seconds, a relay looks for the rows of a commit after it was woken: the commit may still be under way.
_LOOKS: Final = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
#: Sends that have no answer for so long give their shard back.
HOLD_S: Final = 2.0
_MOST_UNNOTED: Final = 10_000
#: How long it waits after an error.
_LEAST_BACKOFF_S: Final = 0.1
_MOST_BACKOFF_S: Final = 5.0
#: Options that messages of one call may each have of their own.
_SHARED: Final = {"keys", "order_key"}
#: Errors of a client that say nothing about the row.
_OF_THE_CLIENT: Final = frozenset({"unauthorized", "tls_failed", "unsupported_version", "protocol_error"})
_WARN_EVERY_S: Final = 30.0


class OpenDatabase(Protocol):
    """A connection to a database, for one round of a relay."""

    async def run(self, action: Callable[[Executor], T]) -> T:
        """Run *action* with the connection. Raises DatabaseFailed."""


class RelayDatabase(Protocol):
    """The database that has the outbox."""

    def connect(self, lease: float) -> AbstractAsyncContextManager[OpenDatabase]:
        """Open a connection. Raises DatabaseFailed. The database ends transactions that stand still for *lease*."""


class Sender(Protocol):
    """Sends rows to brokers."""

    most: int

    async def send(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
        """Send rows in their order; return for each None or its error."""


@dataclass
class RelayCounts:
    """The counts of a relay since its start."""

    sent: int = 0
    parked: int = 0
    failed: int = 0
    cleaned: int = 0
    rounds: int = 0
    database_errors: int = 0
    #: The last error of the broker or the database; empty once all went well again.
    last_error: str = ""
    last_sent_at: float | None = None
    started_at: float = field(default_factory=time.time)


class ClientSender:
    """Sends by an asyncio client: all rows at once, which the client keeps in order."""

    most = 500

    def __init__(self, client: Client, hold: float) -> None:
        """*hold*: seconds after which sends that have no answer count as failed."""
        self._client = client
        self._hold = hold

    async def send(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
        """Send rows in their order; return for each None or its error."""
        drafts = [_Draft(row, send_options(row, time.time())) for row in rows]
        runs = [list(run) for _, run in groupby(drafts, _Draft.kind)]
        tasks = [asyncio.ensure_future(self._send_run(run)) for run in runs]
        try:
            await asyncio.wait(tasks, timeout=self._hold)
        finally:
            late = [task for task in tasks if not task.done()]
            for task in late:
                task.cancel()  # they may still be stored: then the next try is a duplicate
            if late:
                await asyncio.wait(late)
        outcomes: list[BaseException | None] = []
        for run, task in zip(runs, tasks, strict=True):
            if task.cancelled():
                outcomes += [TimeoutError("no answer in time")] * len(run)
            elif (error := task.exception()) is not None:
                outcomes += [error] * len(run)
            else:
                outcomes += task.result()
        return outcomes

    async def _send_run(self, run: list[_Draft]) -> list[BaseException | None]:
        """Send rows of one kind by one call, which is a fifth of the work of a call for each."""
        if len(run) == 1:
            return [await self._send(run[0])]
        is_ordered = "order_key" in run[0].options
        try:
            await self._client.send_many(
                run[0].row.subject,
                [draft.row.body for draft in run],
                keys=[draft.options.get("keys") for draft in run],
                order_keys=[draft.options["order_key"] for draft in run] if is_ordered else None,
                unique=[unique_of(draft.row.uid) for draft in run],
            )
        except SendFailed as error:
            outcomes: list[BaseException | None] = [None] * len(run)
            for failure in error.failures:
                outcomes[failure.ticket] = type(error)(str(failure.error), [failure])
            return outcomes if error.failures else [error] * len(run)
        except (TypeError, ValueError):  # one of them is at fault, and nothing was sent
            return [await self._send(draft) for draft in run]
        return [None] * len(run)

    async def _send(self, draft: _Draft) -> BaseException | None:
        row = draft.row
        try:
            await self._client.send(row.subject, row.body, unique=unique_of(row.uid), **draft.options)
        except Exception as error:
            return error
        return None


class _Draft(NamedTuple):
    """A row, and the options with which it is sent."""

    row: OutboxRow
    options: dict[str, Any]

    def kind(self) -> tuple[object, ...]:
        """Return what is the same for rows that may go by one call; of its own for one with more options than keys."""
        names = self.options.keys()
        if names <= _SHARED:
            return self.row.subject, "order_key" in names
        return (self.row.id,)


class SyncClientSender:
    """Sends by a client without asyncio: one row after the other, in a thread."""

    most = 64

    def __init__(self, client: SyncClient, hold: float) -> None:
        """*hold*: seconds after which no further row is tried."""
        self._client = client
        self._hold = hold

    async def send(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
        """Send rows in their order; return for each None or its error."""
        return await asyncio.to_thread(self._send_all, rows)

    def _send_all(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
        outcomes: list[BaseException | None] = []
        until = time.monotonic() + self._hold
        for row in rows:
            if time.monotonic() > until:
                outcomes.append(TimeoutError("no answer in time"))
                continue
            try:
                options = send_options(row, time.time())
                self._client.send(row.subject, row.body, unique=unique_of(row.uid), **options)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes


class Relay:
    """Sends rows until it is stopped. Use ``run`` in a task."""

    def __init__(
        self,
        database: RelayDatabase,
        sender: Sender,
        *,
        lease: float = 15.0,
        poll: float = 1.0,
        keep: float = 86_400.0,
        remembered: float = 1_800.0,
        is_guest: bool = False,
        cleans: bool = True,
        counts: RelayCounts | None = None,
    ) -> None:
        """Times are in seconds. *lease*: how long a shard stays with a relay that is silent. *poll*: how often it looks
        for rows though nobody woke it. *keep*: how long sent rows are kept; 0: not at all. *remembered*: how long after
        a try the broker surely knows a row again, which is less than its ``unique_for``. A *guest* in another program
        keeps no connection while it waits. Who *cleans* deletes old rows. *counts* may be shared with other relays.
        """
        self._database = database
        self._sender = sender
        self._owner = Owner(f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(6)}", lease)
        self._poll = poll
        self._keep = keep
        self._remembered_us = int(remembered * 1e6)
        self._is_guest = is_guest
        self._woken = asyncio.Event()
        self._stops = False
        self._looks = 0
        self._backoff = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Rows that were sent, while the database did not take the note.
        self._unnoted: set[str] = set()
        self._warned_at = -_WARN_EVERY_S
        self._was_cleaned_at = 0.0
        self._cleans = cleans and not is_guest
        self.counts = counts or RelayCounts()

    def wake(self) -> None:
        """[any thread] Look for rows now, and for a moment."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            pass  # it has ended

    def stop(self) -> None:
        """Finish what is under way, and end. In the thread of the loop."""
        self._stops = True
        self._woken.set()

    def stop_soon(self) -> None:
        """[any thread] As ``stop``."""
        self._stops = True
        self.wake()

    async def check(self) -> None:
        """Raise DatabaseFailed if the database cannot be reached, or has no tables, or those of another version."""
        async with self._database.connect(self._owner.lease) as connection:
            await connection.run(shards.check_tables)

    async def backlog(self, *, counts_sent: bool = False) -> Backlog:
        """Count what waits. Raises DatabaseFailed."""
        async with self._database.connect(self._owner.lease) as connection:
            return await connection.run(lambda executor: shards.backlog(executor, counts_sent=counts_sent))

    async def run(self) -> None:
        """Send rows until ``stop``. Errors of the database and the broker are logged, and tried again."""
        self._loop = asyncio.get_running_loop()
        while not self._stops:
            try:
                async with self._database.connect(self._owner.lease) as connection:
                    is_held_up = await self._send_while_it_goes_well(connection)
            except DatabaseFailed as error:
                self.counts.database_errors += 1
                self._warn(str(error))
                is_held_up = True
            if is_held_up:
                self._backoff = min(max(_LEAST_BACKOFF_S, 2 * self._backoff), _MOST_BACKOFF_S)
                await self._pause(self._backoff)
            elif self._is_guest and await self._wait(self._next_look()):
                self._looks = 0
        if self._is_guest:  # its program ends: what it committed last goes, too
            try:
                async with asyncio.timeout(HOLD_S), self._database.connect(self._owner.lease) as connection:
                    await self._round(connection)
            except (DatabaseFailed, TimeoutError) as error:
                log.info("rows of the outbox are left to another relay: %s", error)

    async def drain(self) -> bool:
        """Send what waits now, then return; False if the broker did not take all of it. Raises DatabaseFailed."""
        async with self._database.connect(self._owner.lease) as connection:
            while True:
                has_sent, is_held_up = await self._round(connection)
                if is_held_up or not has_sent:
                    return not is_held_up

    async def _send_while_it_goes_well(self, connection: OpenDatabase) -> bool:
        """Send rows by one connection; return whether to pause, as the broker takes none."""
        while not self._stops:
            self._woken.clear()
            has_sent, is_held_up = await self._round(connection)
            self.counts.rounds += 1
            if has_sent:
                self._backoff = 0.0
                self._looks = 0
            if is_held_up:
                return True
            self._backoff = 0.0
            if has_sent:
                continue
            if self._is_guest:
                return False
            if await self._wait(self._next_look()):
                self._looks = 0
        return False

    def _next_look(self) -> float:
        self._looks += 1
        return min(_LOOKS[self._looks - 1], self._poll) if self._looks <= len(_LOOKS) else self._poll

    async def _pause(self, seconds: float) -> None:
        """Wait, whoever wakes it, unless it stops."""
        until = time.monotonic() + seconds
        while not self._stops and (left := until - time.monotonic()) > 0:
            self._woken.clear()
            await self._wait(left)
        self._looks = 0

    async def _wait(self, seconds: float) -> bool:
        """Wait; return whether it was woken."""
        if self._stops:
            return True
        try:
            await asyncio.wait_for(self._woken.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _round(self, connection: OpenDatabase) -> tuple[bool, bool]:
        """Send what waits, some of each shard; return whether anything was sent, and whether some could not be."""
        has_sent = has_failed = False
        for shard in await connection.run(shards.busy_shards):
            outcome = await self._send_some(connection, shard)
            if outcome is None:
                continue
            settled, failed = outcome
            has_sent, has_failed = has_sent or settled > 0, has_failed or failed > 0
            if failed and not settled:
                break  # the broker is away; where there are several, another one may have taken some
        if self._cleans and not has_failed:
            await self._clean(connection)
        return has_sent, has_failed

    async def _send_some(self, connection: OpenDatabase, shard: int) -> tuple[int, int] | None:
        """Send rows of one shard; return how many were settled, and how many failed; None if there are none for it."""
        now_us = _now_us()
        taken = await connection.run(
            lambda executor: shards.claim(
                executor, shard, self._owner, self._sender.most, self._remembered_us, now_us
            )
        )  # fmt: skip
        if taken is None:
            return None
        outcomes = await self._outcomes_of(taken)
        try:
            await connection.run(
                lambda executor: shards.finish(
                    executor, taken, outcomes, self._owner,
                    keeps=self._keep > 0, first_try_us=now_us, now_us=_now_us(),
                )
            )  # fmt: skip
        except DatabaseFailed:
            sent = set(outcomes.sent)
            self._unnoted.update(row.uid for row in taken.rows if row.id in sent)
            raise
        if self._unnoted:
            self._unnoted.difference_update([row.uid for row in taken.rows])
            if len(self._unnoted) > _MOST_UNNOTED:  # others have noted them
                self._unnoted.clear()
        counts = self.counts
        counts.sent += len(outcomes.sent)
        counts.parked += len(outcomes.refused)
        counts.failed += len(outcomes.failed)
        if outcomes.sent:
            counts.last_sent_at = time.time()
        if not outcomes.failed:
            counts.last_error = ""
        return len(outcomes.sent) + len(outcomes.refused), len(outcomes.failed)

    async def _outcomes_of(self, taken: ClaimedRows) -> RowOutcomes:
        outcomes = RowOutcomes([], {}, [])
        rows: list[OutboxRow] = []
        for row in taken.rows:
            if row.uid in self._unnoted:
                outcomes.sent.append(row.id)
            elif row.id in taken.doubtful:
                outcomes.refused[row.id] = (
                    "it was tried so long ago that the broker may have it, and would not know it again: look for the "
                    "message, then `qmq outbox retry`, or delete the row"
                )
            else:
                rows.append(row)
        for row, error in zip(rows, await self._sender.send(rows) if rows else [], strict=True):
            if error is None:
                outcomes.sent.append(row.id)
            elif (reason := _final_reason(error)) is not None:
                outcomes.refused[row.id] = reason
                log.warning("row %d of the outbox, for %s, is parked: %s", row.id, row.subject, reason)
            else:
                outcomes.failed.append(row.id)
                self._warn(str(error) or repr(error))
        return outcomes

    async def _clean(self, connection: OpenDatabase) -> None:
        """Delete sent rows that are old, a few of each shard, about once a second."""
        now = time.time()
        if now < self._was_cleaned_at + 1:
            return
        count = 0
        if self._keep > 0:
            before_us, now_us = int((now - self._keep) * 1e6), _now_us()
            for shard in range(SHARDS):
                count += await connection.run(
                    lambda executor, shard=shard: shards.clean(  # type: ignore[misc]
                        executor, shard, self._owner, sent_before_us=before_us, now_us=now_us
                    )
                )
        count += await connection.run(lambda executor: shards.clean_inbox(executor, _now_us()))
        self.counts.cleaned += count
        if not count:
            self._was_cleaned_at = now  # else there is more

    def _warn(self, reason: str) -> None:
        self.counts.last_error = reason
        now = time.monotonic()
        if now >= self._warned_at + _WARN_EVERY_S:
            self._warned_at = now
            log.warning("rows of the outbox wait: %s", reason)


def _now_us() -> int:
    return time.time_ns() // 1_000


def _final_reason(error: BaseException) -> str | None:
    """Return why a row can never be sent; None if another try may help."""
    if isinstance(error, SendUnknown | TimeoutError):
        return None
    cause: Any = error
    if isinstance(error, SendFailed) and error.failures:
        cause = error.failures[0].error
    if isinstance(cause, QmqError):
        if cause.retryable or cause.code in _OF_THE_CLIENT or (type(cause) is UsageError and "client" in str(cause)):
            return None
        return f"{cause.code}: {cause}"
    if isinstance(cause, TypeError | ValueError | KeyError):
        return f"{type(cause).__name__}: {cause}"
    return None
