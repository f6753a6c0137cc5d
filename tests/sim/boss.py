"""Who changes a group at all brokers of a simulated world: what is missed is named, and the same call completes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, Protocol

import qmq
from qmq.errors import BrokersMissed, ConnectionLost, UnknownGroup, UnknownMessage
from qmq.net.client.admin.admin import AdminOfOne
from tests.sim.copies import Book, Copies
from tests.sim.machine import Machine

GROUP: Final = "bossed"


class Scene(Protocol):
    """Where that is done."""

    book: Book
    url: str
    machines: Sequence[Machine]


async def administer(scene: Scene, seed: int) -> None:
    """Change that group again and again."""
    chance = random.Random(seed)
    while True:
        try:
            async with qmq.connect(scene.url, admin_timeout=1) as client:
                while True:
                    await _change(scene, client, chance)
                    await asyncio.sleep(chance.random())
        except ConnectionLost:
            await asyncio.sleep(0.2)


async def _change(scene: Scene, client: qmq.Client, chance: random.Random) -> None:
    async with client.subscribe("", group=GROUP, consumer="boss", start="new") as consumer:
        await consumer.pull(1, 1, 0.2)
    kind, attempts = chance.random(), chance.randrange(2, 100)
    began_at = asyncio.get_running_loop().time()
    try:
        if kind < 0.5:
            await _everywhere(scene, lambda: client.admin.set_group(GROUP, max_attempts=attempts))
            _check(scene, began_at, lambda group: group.ledger.settings.max_attempts == attempts)
        elif kind < 0.8:
            await _everywhere(scene, lambda: client.admin.seek(GROUP, chance.choice(("first", "new"))))
        else:
            await _everywhere(scene, lambda: client.admin.delete_group(GROUP))
            _check(scene, began_at, lambda group: False)
    except UnknownGroup:
        scene.book.count["unknown group"] += 1


async def _everywhere(scene: Scene, call: Any) -> None:
    """With the same call again until all have done it."""
    while True:
        began_at, down = asyncio.get_running_loop().time(), [one for one in scene.machines if not one.is_up]
        try:
            await call()
        except BrokersMissed as error:
            missed = str(error).partition("no answer")[2]
            scene.book.count["brokers missed"] += 1
        else:
            scene.book.count["changed everywhere"] += 1
            return
        for machine in down:
            assert f"world:{machine.number}" in missed or machine.started_at >= began_at, missed
        await asyncio.sleep(0.5)


def _check(scene: Scene, began_at: float, is_right: Any) -> None:
    """Where the group is, it is so; unless its broker has lost power meanwhile."""
    for machine in scene.machines:
        if machine.is_up and machine.power_lost_at < began_at:
            group = machine.broker.groups.get(GROUP)
            assert group is None or is_right(group), f"broker {machine.number} has not done what it said it had"


async def redrive(scene: Scene, groups: Sequence[Copies], seed: int) -> None:
    """Have dead letters of one broker handed out again, now and then, and look at one of them before."""
    chance = random.Random(seed)
    while True:
        try:
            async with qmq.connect(scene.url, admin_timeout=1) as client:
                while True:
                    await asyncio.sleep(2 * chance.random())
                    try:
                        await _redrive(scene, client, chance.choice(groups), chance)
                    except (BrokersMissed, TimeoutError, UnknownGroup, UnknownMessage):
                        scene.book.count["redrive failed"] += 1
        except ConnectionLost:
            await asyncio.sleep(0.2)


async def _redrive(scene: Scene, client: qmq.Client, copies: Copies, chance: random.Random) -> None:
    # At one broker: what goes through all of them is a generator, which nobody closes where a process is killed.
    admin = AdminOfOne(chance.choice(client._brokers.links))
    letters = [one for one in (await admin.dead_letters(copies.group, 0))[0] if one.id is not None]
    some = chance.sample(letters, min(len(letters), chance.choice((1, 3, 10))))
    if not some:
        return
    await check_letter(scene.book, client, str(some[0].id))
    for letter in some:
        copies.redriving(str(letter.id))
    numbers = [letter.number for letter in some]
    scene.book.count["redriven"] += await admin.change_dead("redrive", copies.group, numbers)


async def check_letter(book: Book, client: qmq.Client, message_id: str) -> None:
    """A dead letter has the priority and the order key that it was sent with."""
    found = await client.get(message_id)
    sent = book.sent[int(found.body.rstrip(b"."))]
    assert (found.subject, found.priority, found.order_key) == (sent.subject, sent.priority, sent.order_key), found
    book.count[f"dead: {sent.kind}"] += 1
