"""Lists of all brokers of one client, and the brokers that a list lacks."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from qmq.errors import BrokersMissed
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers

log = logging.getLogger("qmq.client")

T = TypeVar("T")


class Listing:
    """Lists of all brokers of one client, page by page, and the brokers that the last list lacks."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        #: The brokers that the last list lacks, as they did not answer.
        self.missed: tuple[str, ...] = ()

    async def begin(self) -> list[Link]:
        """Return the links of a new list: those that are connected within ``admin_timeout``, without those of brokers
        that are away if others are connected. Raises BrokersMissed if there is none.
        """
        found = await self._brokers.reached_within(self._brokers.options.admin_timeout, leaves_out_away=True)
        missed = [str(link.address) for link in self._brokers.links if link not in found]
        if not found:
            raise BrokersMissed(self.no_answer(missed))
        self._lacks(missed, f"no connection to {', '.join(missed)}")
        return found

    async def page(self, link: Link, asked: Coroutine[Any, Any, T]) -> T | None:
        """Return a page of one broker; None, and count it as missed, if this one of several does not answer. Raises
        BrokersMissed if it is the only one.
        """
        try:
            return await asked
        except TimeoutError:
            if len(self._brokers.links) == 1:
                raise BrokersMissed(self.no_answer([str(link.address)])) from None
            self.lacks([*self.missed, str(link.address)])
            return None

    def no_answer(self, addresses: Sequence[str]) -> str:
        """Return the text that these brokers did not answer in time."""
        return f"no answer within {self._brokers.options.admin_timeout:g} s from {', '.join(addresses)}"

    def lacks(self, addresses: Sequence[str]) -> None:
        """Note, and log, that the present list lacks these brokers, as they did not answer in time."""
        self._lacks(addresses, self.no_answer(addresses))

    def _lacks(self, addresses: Sequence[str], reason: str) -> None:
        self.missed = tuple(addresses)
        if addresses:
            log.warning("the list lacks %s: %s", ", ".join(addresses), reason)
