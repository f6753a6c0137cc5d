"""One message by its id, at whichever broker has it."""

from __future__ import annotations

import asyncio

from qmq.errors import BrokersMissed, QmqError, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import MESSAGE_ID
from qmq.net.client.admin.listing import Listing
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers
from qmq.net.client.find.requests import find_page, get_message
from qmq.net.client.find.stored_message import StoredMessage, stored_message
from qmq.net.protocol.selection import Boundary, Selection


async def get(brokers: Brokers, listing: Listing, message_id: str) -> StoredMessage:
    """Return a message: by the place that its id says, else a copy that keeps the id. See ``Client.get``."""
    name = MessageId.parse(message_id)
    timeout = brokers.options.admin_timeout
    links = await listing.begin()
    missed = set(listing.missed)
    found, reason = None, None
    for link in links:
        if link.store_id == name.store_id:
            try:
                found = await get_message(link, timeout, name)
            except TimeoutError:
                missed.add(str(link.address))
            except UnknownMessage as error:
                reason = error
    if found is not None and found.deliver_at_us is None:
        return found
    # A delayed message may have been delivered: then its copy was stored when it fell due.
    since_us = 0 if found is None or found.deliver_at_us is None else found.deliver_at_us
    copies = await asyncio.gather(*(_copy(link, timeout, name, since_us) for link in links), return_exceptions=True)
    failed = None
    for link, copy in zip(links, copies, strict=True):
        if isinstance(copy, StoredMessage):
            return copy
        if isinstance(copy, TimeoutError):
            missed.add(str(link.address))
        elif isinstance(copy, QmqError):
            failed = failed or copy
        elif isinstance(copy, BaseException):
            raise copy
    if found is not None:
        return found
    if failed is not None:
        raise failed
    if missed:
        raise BrokersMissed(f"{listing.no_answer(sorted(missed))}, which may have message {name}; call it again")
    raise reason or UnknownMessage(f"no broker here has message {name}: it is of store {name.store_id.hex()}")


async def _copy(link: Link, timeout: float, name: MessageId, since_us: int) -> StoredMessage | None:
    """Return a copy of a message that keeps its id; None where a broker has none. Raises StorageError, TimeoutError."""
    selection = Selection(since_us=since_us, original=MESSAGE_ID.pack(*name))
    after: Boundary | None = None
    upto_us: int | None = None
    while True:
        page = await find_page(link, timeout, selection, False, after, upto_us, 1)
        if page.runs:
            return stored_message(page.runs[0], 0, str(link.address))
        if page.after is None:
            return None
        after, upto_us = page.after, page.upto_us
