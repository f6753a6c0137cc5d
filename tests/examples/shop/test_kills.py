"""The shop survives: workers that are stopped in the middle of handlers, workers and brokers that are killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import qmq
from examples.shop.store import Store
from tests.broker_process import BrokerProcess, broker_process

_TIMEOUT_S = 60


class Billing:
    """A billing worker in a process of its own."""

    def __init__(self, database: Path, server: str, bank_takes_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.shop.billing"],
            env={
                **os.environ,
                "QMQ_SERVER": server,
                "QMQ_STATE_DIR": str(database.parent / "state"),
                "SHOP_DB": str(database),
                "SHOP_BANK_TAKES_S": str(bank_takes_s),
                "SHOP_BANK_BUSY_SHARE": "0",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def orders(self, step: str) -> list[str]:
        """Return the orders that were begun, or ended."""
        return re.findall(rf" INFO shop.billing: {step} (\S+)$", "\n".join(self.lines), re.MULTILINE)

    def wait_for(self, step: str, count: int) -> None:
        """Wait until that many orders were begun, or ended."""
        assert self._process.stderr is not None
        while len(self.orders(step)) < count:
            line = self._process.stderr.readline()
            assert line, self.lines
            self.lines.append(line.rstrip())

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait until it has ended; return its exit code."""
        _, rest = self._process.communicate(timeout=_TIMEOUT_S)
        self.lines += rest.splitlines()
        return self._process.returncode

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def billing(database: Path, server: str, bank_takes_s: float = 0.05) -> Iterator[Billing]:
    """A worker that is gone in the end."""
    worker = Billing(database, server, bank_takes_s)
    try:
        yield worker
    finally:
        worker.close()


def order(number: int) -> dict[str, object]:
    return {"id": f"order-{number}", "item": "lamp", "cents": 4900 + number}


def payments(store: Store, numbers: range) -> dict[str, int]:
    """The payments of these orders; raises if there are others."""
    found = dict(store.payments())
    assert set(found) <= {f"order-{number}" for number in numbers}
    return found


def test_a_worker_that_is_stopped_cuts_no_handler_and_nothing_is_done_twice(tmp_path: Path) -> None:
    numbers = range(24)
    database = tmp_path / "shop.db"
    store = Store(database)
    with broker_process(tmp_path / "data") as broker:
        with qmq.connect_sync(broker.url) as client:
            for number in numbers:
                client.send("shop.order.created", json=order(number), key=f"order-{number}")
        with billing(database, broker.url, bank_takes_s=1.0) as first:
            first.wait_for("begin", 8)
            first.send_signal(signal.SIGTERM)
            assert first.end() == 0
        assert first.orders("end")  # it was stopped in the middle of eight handlers
        assert sorted(first.orders("end")) == sorted(first.orders("begin"))
        left = len(numbers) - len(first.orders("end"))
        assert left > 0
        with billing(database, broker.url) as second:
            second.wait_for("end", left)  # at once: the first has given back what it had not begun
            second.send_signal(signal.SIGTERM)
            assert second.end() == 0
    assert sorted(first.orders("begin") + second.orders("begin")) == sorted(f"order-{number}" for number in numbers)
    assert payments(store, numbers) == {f"order-{number}": 4900 + number for number in numbers}
    store.close()


async def paid_orders(client: qmq.Client, count: int) -> None:
    """Wait until that many different orders are paid."""
    seen: set[str] = set()
    async with asyncio.timeout(_TIMEOUT_S), client.subscribe("shop.order.paid", group="test") as paid:
        async for message in paid:
            async with message:
                seen.add(message.json()["id"])
            if len(seen) == count:
                return


async def test_brokers_and_a_worker_are_killed_and_every_order_is_charged_once(tmp_path: Path) -> None:
    numbers = range(60)
    database = tmp_path / "shop.db"
    store = Store(database)
    options = {"session_timeout_ms": 2_000}
    with (
        broker_process(tmp_path / "one", **options) as one,
        broker_process(tmp_path / "two", **options) as two,
        billing(database, server := f"{one.url},{two.url.removeprefix('qmq://')}") as doomed,
        billing(database, server),
    ):
        async with qmq.connect(server, failover_after=1) as client:
            waiting = asyncio.create_task(paid_orders(client, len(numbers)))
            await send_and_kill(client, numbers, one, two, doomed)
            await waiting
    assert payments(store, numbers) == {f"order-{number}": 4900 + number for number in numbers}
    store.close()


async def send_and_kill(
    client: qmq.Client, numbers: range, one: BrokerProcess, two: BrokerProcess, worker: Billing
) -> None:
    """Send orders; kill a broker at a third of them and start it later, then a worker, then the other broker."""
    loop = asyncio.get_running_loop()
    third = len(numbers) // 3
    for number in numbers:
        if number == third:
            one.kill()
        elif number == third + 10:
            await loop.run_in_executor(None, one.start)
            worker.send_signal(signal.SIGKILL)
        elif number == 2 * third:
            two.kill()
        await client.send("shop.order.created", json=order(number), key=f"order-{number}")
    await loop.run_in_executor(None, two.start)
