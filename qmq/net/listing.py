"""Lists of all brokers of a client, page by page, and which brokers a list lacks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from qmq.net.link import Link

if TYPE_CHECKING:
    from qmq.net.brokers import Brokers

log = logging.getLogger("qmq.client")

#: Of several brokers each has so long (seconds) to answer, before a call goes on without it.
REACH_TIMEOUT: Final = 5.0

T = TypeVar("T")


class Listing:
    """Of one client."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        #: Which brokers the last list lacks, as they were not reached.
        self.missed: tuple[str, ...] = ()

    async def begin(self) -> list[Link]:
        """Of which brokers a list is now."""
        found = await self._brokers.reached_within(REACH_TIMEOUT)
        self.lacks([str(link.address) for link in self._brokers.links if link not in found])
        return found

    async def page(self, link: Link, asked: Coroutine[Any, Any, T]) -> T | None:
        """A page of one of them; None when that one of several went away: it is missed then, too."""
        if len(self._brokers.links) == 1:
            return await asked
        try:
            return await asyncio.wait_for(asked, REACH_TIMEOUT)
        except TimeoutError:
            self.lacks([*self.missed, str(link.address)])
            return None

    def lacks(self, addresses: Sequence[str]) -> None:
        """The list that is made now lacks these, which the log is told."""
        self.missed = tuple(addresses)
        if addresses:
            log.warning("what is listed lacks %s: not reached within %g s", ", ".join(addresses), REACH_TIMEOUT)
