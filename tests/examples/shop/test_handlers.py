"""The handlers of the shop, without a broker and with one: as a user would test them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from examples.shop import analytics, billing, office, reminders, web
from examples.shop.store import Store
from qmq.sql import Outbox
from qmq.testing import LocalBroker, message


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty database; the programs of the shop find it too."""
    monkeypatch.setenv("SHOP_DB", str(tmp_path / "shop.db"))
    made = Store()
    yield made
    made.close()


ORDER = {"id": "order-1", "item": "lamp", "cents": 4900}


# --- billing ---------------------------------------------------------------------------------------------------------


async def test_an_order_is_charged_once_however_often_its_message_comes(
    store: Store, qmq_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing, "BANK_BUSY_SHARE", 0)
    async with qmq.connect() as client:
        async with Outbox(client) as outbox:
            for attempt in (1, 2):
                await billing.handle(message(json=ORDER, attempt=attempt), store=store, outbox=outbox)
        paid = [subject.messages async for subject in client.subjects("shop.order.paid")]
    assert store.payments() == [("order-1", 4900)]
    assert paid == [1]


async def test_a_large_order_is_rejected(store: Store) -> None:
    large = message(json={**ORDER, "cents": 100_001})
    await billing.handle(large, store=store, outbox=Outbox())
    assert (large.disposition, large.reason) == ("reject", "orders above 1,000 are charged by hand")
    assert store.payments() == []


async def test_a_busy_bank_is_asked_again(
    store: Store, qmq_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing, "BANK_BUSY_SHARE", 1)
    with pytest.raises(billing.BankBusy):
        await billing.handle(message(json=ORDER), store=store, outbox=Outbox())
    assert store.payments() == []


# --- reminders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paid", [True, False])
async def test_a_reminder_is_for_orders_that_are_not_paid_and_comes_once(is_paid: bool, store: Store) -> None:
    if is_paid:
        with store.engine.begin() as tx:
            store.charge(tx, "order-1", 4900)
    await reminders.handle(message(json=ORDER), store=store)
    assert store.remind("order-1") is is_paid  # otherwise it was done before


async def test_a_reminder_waits_for_a_day(qmq_broker: LocalBroker) -> None:
    async with qmq.connect() as client, client.subscribe("shop.reminder", group="reminders") as due:
        await client.send("shop.reminder", json=ORDER, delay=web.REMIND_AFTER)
        assert await due.pull(timeout=0) == []
        qmq_broker.clock.advance("1d")
        (reminder,) = await due.pull(timeout=10)
        reminder.ack()


# --- analytics -------------------------------------------------------------------------------------------------------


async def test_sales_are_counted_once(store: Store, qmq_broker: LocalBroker) -> None:
    async with qmq.connect() as client, client.subscribe("shop.order.paid", group="analytics") as paid:
        for number in (1, 2, 2):
            await client.send("shop.order.paid", json={**ORDER, "id": f"order-{number}"})
        batch = await paid.pull_batch(min_count=3, timeout=10)
        store.record_sales(zip(*analytics.sales_of(batch).to_pydict().values(), strict=True))
        batch.ack()
    assert store.revenue() == {"lamp": 9800}


# --- the front and the back office -----------------------------------------------------------------------------------


class Watched(dict[str, int]):
    """Prices that say when one has changed."""

    def __init__(self, prices: dict[str, int]) -> None:
        super().__init__(prices)
        self.changed = asyncio.Event()

    def __setitem__(self, item: str, cents: int) -> None:
        super().__setitem__(item, cents)
        self.changed.set()


async def test_a_front_hears_of_new_prices(store: Store, qmq_broker: LocalBroker) -> None:
    prices = Watched(store.prices())
    async with (
        qmq.connect() as client,
        client.subscribe("shop.price.changed", group="shop-web", mode="broadcast") as changes,
    ):
        following = asyncio.create_task(web.follow_prices(changes, prices))
        page = office.make_app().test_client()
        answer = await asyncio.to_thread(page.post, "/prices", data={"item": "lamp", "cents": "4500"})
        assert answer.status_code == 303
        async with asyncio.timeout(10):
            await prices.changed.wait()
        changes.stop()
        await following
    assert prices["lamp"] == store.prices()["lamp"] == 4500


def test_the_office_shows_and_redrives_dead_letters(store: Store, qmq_broker: LocalBroker) -> None:
    with qmq.connect_sync() as client:
        client.send("shop.order.created", json=ORDER)
        with client.subscribe("shop.order.created", group="billing") as orders:
            (order,) = orders.pull(timeout=10)
            order.reject("the bank says no")
            page = office.make_app().test_client()
            assert "the bank says no" in page.get("/").text
            assert page.post("/redrive").status_code == 303
            (again,) = orders.pull(timeout=10)
            again.ack()
