"""The worker that charges orders: python -m examples.shop.billing. Run as many as you like.

A handler that returns has handled its message. One that raises has failed: the message comes again after the next of
RETRY_DELAYS, and is a dead letter after MAX_ATTEMPTS. The payment, the note that this message was handled (inbox), and
the message that says so (outbox) are one transaction: all three happen, or none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from functools import partial

import qmq
import qmq.sql
from examples.shop.store import Store

MAX_ATTEMPTS = 8
RETRY_DELAYS = ["200ms", "1s", "10s", "5m"]
#: How long the bank takes, in seconds, and how often it is too busy.
BANK_TAKES_S = float(os.environ.get("SHOP_BANK_TAKES_S", "0.05"))
BANK_BUSY_SHARE = float(os.environ.get("SHOP_BANK_BUSY_SHARE", "0.1"))

log = logging.getLogger("shop.billing")
inbox = qmq.sql.Inbox(group="billing")


class BankBusy(Exception):
    """The bank has no time; nothing was charged."""


async def ask_bank(order_id: str) -> None:
    """Wait for the bank's approval. Raises BankBusy now and then."""
    await asyncio.sleep(BANK_TAKES_S)
    if random.random() < BANK_BUSY_SHARE:
        raise BankBusy(f"the bank has no time for order {order_id}")


async def handle(message: qmq.Message, *, store: Store, outbox: qmq.sql.Outbox) -> None:
    """Charge an order once, however often its message comes, and say once that it is paid."""
    order = message.json()
    if order["cents"] > 100_000:
        await message.reject("orders above 1,000 are charged by hand")  # no attempt can succeed: a dead letter
        return
    log.info("begin %s", order["id"])
    if not store.is_paid(order["id"]):
        await ask_bank(order["id"])
        with store.engine.begin() as tx:
            if inbox.first_time(tx, message) and store.charge(tx, order["id"], order["cents"]):
                outbox.send(tx, "shop.order.paid", json=order, key=order["id"])
    log.info("end %s", order["id"])


async def main() -> None:
    """Take orders until SIGTERM; then finish those that were begun, and give back the others."""
    store = Store()
    async with (
        qmq.connect(name="shop-billing", wait=30) as client,
        qmq.sql.Outbox(client) as outbox,
        client.subscribe(
            "shop.order.created", group="billing", max_attempts=MAX_ATTEMPTS, retry_delays=RETRY_DELAYS
        ) as orders,
    ):
        await orders.run(partial(handle, store=store, outbox=outbox), concurrency=8, drain=30)


if __name__ == "__main__":
    qmq.log_to_stderr()
    asyncio.run(main())
