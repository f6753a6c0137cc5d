"""Lists of all brokers of a client, page by page, and which brokers a list lacks."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from qmq.errors import BrokersMissed
from qmq.net.client.broker_link import Link

if TYPE_CHECKING:
    from qmq.net.client.cluster import Brokers

log = logging.getLogger("qmq.client")

T = TypeVar("T")


class Listing:
    """Of one client."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        #: Which brokers the last list lacks, as they were not reached.
        self.missed: tuple[str, ...] = ()

    async def begin(self) -> list[Link]:
        """Of which brokers a list is now. Raises BrokersMissed when none is reached."""
        found = await self._brokers.reached_within(self._brokers.options.admin_timeout)
        missed = [str(link.address) for link in self._brokers.links if link not in found]
        if not found:
            raise BrokersMissed(self.no_answer(missed))
        self.lacks(missed)
        return found

    async def page(self, link: Link, asked: Coroutine[Any, Any, T]) -> T | None:
        """A page of one of them; None when that one of several does not answer: it is missed then, too. Raises
        BrokersMissed when it is the only one.
        """
        try:
            return await asked
        except TimeoutError:
            if len(self._brokers.links) == 1:
                raise BrokersMissed(self.no_answer([str(link.address)])) from None
            self.lacks([*self.missed, str(link.address)])
            return None

    def no_answer(self, addresses: Sequence[str]) -> str:
        """Say that these brokers did not answer in time."""
        return f"no answer within {self._brokers.options.admin_timeout:g} s from {', '.join(addresses)}"

    def lacks(self, addresses: Sequence[str]) -> None:
        """The list that is made now lacks these, which the log is told."""
        self.missed = tuple(addresses)
        if addresses:
            log.warning("what is listed lacks %s: %s", ", ".join(addresses), self.no_answer(addresses))
