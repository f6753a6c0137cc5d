"""The group of an inbox, how long the inbox remembers messages, and whether that is long enough. No database."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, Final, overload

from qmq import Client, Duration, GroupInfo, Message, SyncClient, SyncMessage
from qmq.durations import duration_text, seconds_of
from qmq.errors import InvalidOption, UnknownGroup
from qmq.names import check_group

_COLUMNS: Final = "qmq_inbox (group_name, message_id, expires_at_us) VALUES (:group, :id, :expires)"
#: Notes a message; the count of rows is 0 if it is there already. A second transaction waits for the first one.
NOTE: Final = f"INSERT INTO {_COLUMNS} ON CONFLICT DO NOTHING"
NOTE_IN_MYSQL: Final = f"INSERT IGNORE INTO {_COLUMNS}"
FORGET: Final = "DELETE FROM qmq_inbox WHERE group_name = :group AND message_id = :id"


class InboxRules:
    """The group of an inbox, and how long it remembers a message."""

    def __init__(self, group: str, *, keep: Duration = "30d") -> None:
        self.group = check_group(group)
        self.keep = seconds_of("keep", keep)
        if not self.keep:
            raise InvalidOption("keep must be above 0 seconds: an inbox that remembers nothing lets all repeats pass")

    def values_of(self, message: Message | SyncMessage | str) -> dict[str, Any]:
        """Return the values of NOTE for a message, or its id."""
        message_id = message if isinstance(message, str) else message.id
        return {"group": self.group, "id": message_id, "expires": int((time.time() + self.keep) * 1e6)}

    @overload
    def check(self, client: SyncClient, *, longest_delay: Duration = 0) -> None: ...

    @overload
    def check(self, client: Client, *, longest_delay: Duration = 0) -> Coroutine[Any, Any, None]: ...

    def check(self, client: Client | SyncClient, *, longest_delay: Duration = 0) -> Coroutine[Any, Any, None] | None:
        """Raise InvalidOption if the inbox forgets a message before its group may get it for the last time.

        Counts the attempts of the group with their delays and ack deadlines, *longest_delay* for each (what handlers
        give to ``nack`` and ``Retry``), and the age of the oldest dead letter, which may be redriven. Raises
        UnknownGroup. Await the call for an asyncio client.
        """
        delay = seconds_of("longest_delay", longest_delay)
        if isinstance(client, Client):
            return self._check_async(client, delay)
        groups = client.admin.groups(self.group)
        times = [letter.died_at.timestamp() for letter in client.admin.dead_letters(self.group)]
        self._compare(groups, delay, min(times, default=None))
        return None

    async def _check_async(self, client: Client, delay: float) -> None:
        groups = await client.admin.groups(self.group)
        times = [letter.died_at.timestamp() async for letter in client.admin.dead_letters(self.group)]
        self._compare(groups, delay, min(times, default=None))

    def _compare(self, groups: list[GroupInfo], delay: float, oldest_dead: float | None) -> None:
        if not groups:
            raise UnknownGroup(f"there is no group {self.group}; it begins with its first consumer")
        for group in groups:
            longest = longest_retry(group.settings, delay)
            if longest > self.keep:
                raise InvalidOption(
                    f"the inbox of group {self.group} keeps {duration_text(self.keep)}, but a message may come again "
                    f"up to {duration_text(longest)} after its first attempt: raise keep, or lower the group's "
                    "max_attempts, retry_delays or ack_deadline"
                )
        age = 0.0 if oldest_dead is None else time.time() - oldest_dead
        if age > self.keep:
            raise InvalidOption(
                f"the inbox of group {self.group} keeps {duration_text(self.keep)}, but the group has a dead letter "
                f"that is {duration_text(round(age))} old, which may be redriven: raise keep, or delete it"
            )


def longest_retry(settings: dict[str, Any], longest_delay: float) -> float:
    """Return for how many seconds after its first attempt a message may come again, by the settings of its group."""
    attempts = max(int(settings.get("max_attempts") or 1), 1)
    delays = [float(delay) for delay in settings.get("retry_delays") or [0.0]]
    last = len(delays) - 1
    # the last delay repeats: max_attempts may be large
    waits = sum(max(delay, longest_delay) for delay in delays[: attempts - 1])
    waits += max(attempts - 1 - len(delays), 0) * max(delays[last], longest_delay)
    return waits + attempts * float(settings.get("ack_deadline") or 0.0)
