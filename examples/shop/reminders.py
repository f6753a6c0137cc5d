"""The worker that reminds customers who have not paid: python -m examples.shop.reminders.

The front sends a reminder with each order, to be delivered later. The broker keeps it until then; no cron looks for it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import qmq
from examples.shop.store import Store

log = logging.getLogger("shop.reminders")


async def handle(message: qmq.Message, *, store: Store) -> None:
    """Remind the customer, unless the order is paid or its message comes a second time."""
    order_id = message.json()["id"]
    if not store.is_paid(order_id) and store.remind(order_id):
        log.info("order %s is not paid: a mail was sent", order_id)


async def main() -> None:
    """Take reminders that are due until SIGTERM."""
    store = Store()
    async with (
        qmq.connect(name="shop-reminders", wait=30) as client,
        client.subscribe("shop.reminder", group="reminders") as due,
    ):
        await due.run(partial(handle, store=store))


if __name__ == "__main__":
    qmq.log_to_stderr()
    asyncio.run(main())
