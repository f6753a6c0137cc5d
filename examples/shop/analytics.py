"""The worker that counts sales, thousands of messages at a time: python -m examples.shop.analytics. Needs pyarrow.

A batch becomes an Arrow table without an object for each message.
"""

from __future__ import annotations

import asyncio
import io
import logging
import signal

import pyarrow as pa
import pyarrow.json

import qmq
from examples.shop.store import Store

log = logging.getLogger("shop.analytics")
SALE = pa.schema([("id", pa.string()), ("item", pa.string()), ("cents", pa.int64())])


def sales_of(batch: qmq.MessageBatch | qmq.SyncMessageBatch) -> pa.Table:
    """Return the sales of a batch: one row for each message, whose bodies are JSON."""
    lines = io.BytesIO(b"\n".join(batch.bodies))
    return pa.json.read_json(
        lines, parse_options=pa.json.ParseOptions(explicit_schema=SALE, unexpected_field_behavior="ignore")
    )


async def count_sales(paid: qmq.Consumer, store: Store) -> None:
    """Record batch after batch until the consumer stops. A batch that comes twice is recorded once."""
    while not paid.stopped:
        batch = await paid.pull_batch(max_count=10_000)
        if not batch:  # stopped meanwhile
            break
        store.record_sales(zip(*sales_of(batch).to_pydict().values(), strict=True))
        batch.ack()
        log.info("%d sales; revenue is now %s", len(batch), store.revenue())


async def main() -> None:
    """Count sales until SIGTERM, which ends the pull that waits."""
    store = Store()
    async with (
        qmq.connect(name="shop-analytics", wait=30) as client,
        client.subscribe("shop.order.paid", group="analytics") as paid,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, paid.stop)
        await count_sales(paid, store)


if __name__ == "__main__":
    qmq.log_to_stderr()
    asyncio.run(main())
