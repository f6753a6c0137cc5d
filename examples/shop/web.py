"""The shop's front: uvicorn examples.shop.web:app. It takes orders, and answers before anybody has handled them.

Each front has all prices in memory. A broadcast tells every one of them when a price has changed.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Header, HTTPException, Request
from pydantic import BaseModel, Field

import qmq
from examples.shop.store import Store

REMIND_AFTER = os.environ.get("SHOP_REMIND_AFTER", "1d")


class Cart(BaseModel):
    """The goods that a customer orders."""

    item: str
    quantity: int = Field(ge=1, le=100)


async def follow_prices(changes: qmq.Consumer, prices: dict[str, int]) -> None:
    """Keep *prices* up to date until the consumer stops."""
    async for message in changes:
        async with message:
            change = message.json()
            prices[change["item"]] = change["cents"]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Have a client, and the prices, as long as the front runs."""
    app.state.store = store = Store()
    async with (
        qmq.connect(name="shop-web", wait=30) as client,
        client.subscribe("shop.price.changed", group="shop-web", mode="broadcast") as changes,
    ):
        app.state.client = client
        app.state.prices = store.prices()  # read after the subscription has begun, so no change is missed
        following = asyncio.create_task(follow_prices(changes, app.state.prices))
        yield
        changes.stop()
        await following


app = FastAPI(title="Shop", lifespan=lifespan)


@app.get("/prices")
async def prices(request: Request) -> dict[str, int]:
    """Return all prices in cents."""
    known: dict[str, int] = request.app.state.prices
    return known


@app.post("/orders", status_code=202)
async def order(cart: Cart, request: Request, idempotency_key: str | None = Header(default=None)) -> dict[str, str]:
    """Take an order. It is safe once this returns: the broker has it on disk. The workers do the rest.

    A customer's program that repeats a request with its Idempotency-Key is charged once.
    """
    cents = request.app.state.prices.get(cart.item)
    if cents is None:
        raise HTTPException(404, f"there is no {cart.item}")
    order_id = idempotency_key or uuid.uuid4().hex
    taken = {"id": order_id, "item": cart.item, "cents": cents * cart.quantity}
    client: qmq.Client = request.app.state.client
    await asyncio.gather(
        client.send("shop.order.created", json=taken, key=order_id),
        client.send("shop.reminder", json=taken, key=order_id, delay=REMIND_AFTER),
    )
    return {"order": order_id}


@app.get("/orders/{order_id}")
async def state_of(order_id: str, request: Request) -> dict[str, bool]:
    """Say whether an order is paid."""
    return {"paid": request.app.state.store.is_paid(order_id)}
