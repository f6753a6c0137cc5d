"""``client.admin`` without asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Unpack

from qmq.net.client.admin.admin import Admin
from qmq.net.client.admin.broker_info import BrokerInfo
from qmq.net.client.admin.resend import OnProgress
from qmq.net.client.admin.results import ConsumerInfo, DeadLetter, GroupInfo, ResendCount, SealedLog, TokenRights
from qmq.net.client.admin.statistics import BrokerStats
from qmq.net.client.group_settings import ChangedSettings

_AT_ONCE: Final = 500


class SyncAdmin:
    """The calls of ``Admin``, without ``await``: the attribute ``admin`` of a ``SyncClient``."""

    def __init__(self, run: Callable[[Callable[[Admin], Coroutine[Any, Any, Any]]], Any]) -> None:
        """*run* calls a function with the admin of this process's client, and waits for its result."""
        self._run = run

    @property
    def missed(self) -> tuple[str, ...]:
        """The brokers that the last list lacks. See ``Admin.missed``."""

        async def missed(admin: Admin) -> tuple[str, ...]:
            return admin.missed

        found: tuple[str, ...] = self._run(missed)
        return found

    def info(self) -> list[BrokerInfo]:
        """Return the state of each broker. See ``Admin.info``."""
        found: list[BrokerInfo] = self._run(lambda admin: admin.info())
        return found

    def rights(self) -> list[TokenRights]:
        """Return what this client may do at each broker. See ``Admin.rights``."""
        found: list[TokenRights] = self._run(lambda admin: admin.rights())
        return found

    def stats(self) -> list[BrokerStats]:
        """Return the statistics of each broker. See ``Admin.stats``."""
        found: list[BrokerStats] = self._run(lambda admin: admin.stats())
        return found

    def groups(self, name: str | None = None) -> list[GroupInfo]:
        """Return the groups. See ``Admin.groups``."""
        found: list[GroupInfo] = self._run(lambda admin: admin.groups(name))
        return found

    def consumers(self, group: str) -> list[ConsumerInfo]:
        """Return the consumers of a group. See ``Admin.consumers``."""
        found: list[ConsumerInfo] = self._run(lambda admin: admin.consumers(group))
        return found

    def set_group(
        self, group: str, *, follows: Sequence[str] | None = None, **settings: Unpack[ChangedSettings]
    ) -> dict[str, Any]:
        """Change the settings of a group. See ``Admin.set_group``."""
        found: dict[str, Any] = self._run(lambda admin: admin.set_group(group, follows=follows, **settings))
        return found

    def seek(self, group: str, to: Literal["first", "new"] | datetime | int, *, clear_retries: bool = False) -> None:
        """Move a group to another message. See ``Admin.seek``."""
        self._run(lambda admin: admin.seek(group, to, clear_retries=clear_retries))

    def delete_group(self, group: str) -> None:
        """Delete a group. See ``Admin.delete_group``."""
        self._run(lambda admin: admin.delete_group(group))

    def dead_letters(self, group: str) -> Iterator[DeadLetter]:
        """Yield the dead letters of a group. See ``Admin.dead_letters``."""
        letters: list[AsyncIterator[DeadLetter]] = []

        async def some(admin: Admin) -> list[DeadLetter]:
            if not letters:
                letters.append(admin.dead_letters(group))
            found: list[DeadLetter] = []
            while len(found) < _AT_ONCE and (letter := await anext(letters[0], None)) is not None:
                found.append(letter)
            return found

        while page := self._run(some):
            yield from page

    def redrive(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Hand out dead letters again. See ``Admin.redrive``."""
        return int(self._run(lambda admin: admin.redrive(group, ids, all=all)))

    def delete_dead(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Delete dead letters. See ``Admin.delete_dead``."""
        return int(self._run(lambda admin: admin.delete_dead(group, ids, all=all)))

    def resend(
        self,
        *,
        ids: Iterable[str] | None = None,
        prefix: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        group: str | None = None,
        all_groups: bool = False,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> ResendCount:
        """Have stored messages handed out again. See ``Admin.resend``. *on_progress* is called in another thread."""
        found: ResendCount = self._run(
            lambda admin: admin.resend(
                ids=ids, prefix=prefix, key=key, since=since, until=until, group=group, all_groups=all_groups,
                dry_run=dry_run, on_progress=on_progress,
            )
        )  # fmt: skip
        return found

    def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message. See ``Admin.cancel``."""
        return bool(self._run(lambda admin: admin.cancel(message_id)))

    def roll(self) -> list[SealedLog]:
        """Roll the segments. See ``Admin.roll``."""
        found: list[SealedLog] = self._run(lambda admin: admin.roll())
        return found
