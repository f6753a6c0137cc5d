"""Golden data directories: what brokers of each set of format versions have left, as after kill -9.

``python -m tests.format.golden_directory`` makes the next one by the present program (see CONTRIBUTING.md). An archive
has the directory ``data`` and ``expected.json``: what is in it, as the program that made it told.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.broker.ports.commands import Now
from qmq.daemon.main import RunningBroker
from qmq.format import layout
from qmq.net.server import clock
from qmq.settings import Settings
from qmq.storage.error_log import item_file, timer_queue

DIRECTORY: Final = Path(__file__).parent / "directories"
#: The versions that a directory is made with.
VERSIONS: Final = (
    "BATCH", "SEGMENT", "DERIVED", "IDENTITY", "CHECKPOINT", "SUBJECTS", "PULL_LOG", "SCHEDULE",
)  # fmt: skip
SETTINGS: Final[dict[str, Any]] = {
    "listen": "127.0.0.1:0",
    "segment_bytes": "72 KiB",
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
}
_FIELDS: Final = ("mode", "follows", "ready", "in_flight", "in_retry", "dead", "skipped", "delayed")


def written_versions() -> dict[str, int]:
    """Return the versions that this program writes, and the last kind of records."""
    found = {name: getattr(layout, f"{name}_VERSION") for name in VERSIONS}
    return {**found, "PULL_RECORD_KINDS": layout.PULL_RECORD_KINDS}


def archives() -> list[Path]:
    """Return the committed archives, the oldest first."""
    return sorted(DIRECTORY.glob("*.tar.gz"), key=lambda path: int(path.name.partition(".")[0]))


@asynccontextmanager
async def serving(data: Path, ahead_us: int = 0, at_us: int | None = None) -> AsyncIterator[RunningBroker]:
    """A broker on *data* whose wall clock shows *at_us* (None: that of this machine) at its start, and *ahead_us*
    more.
    """
    begun = clock()
    start_us = (begun.wall_us if at_us is None else at_us) + ahead_us

    def moved() -> Now:
        now = clock()
        return Now(now.monotonic_us, start_us + now.monotonic_us - begun.monotonic_us)

    broker = RunningBroker(Settings.model_validate({"data_dir": data, **SETTINGS}), clock=moved)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def told(client: qmq.Client) -> dict[str, Any]:
    """Return what a broker tells of its messages and groups."""
    groups = {
        group.name: {name: getattr(group, name) for name in _FIELDS} | {"settings": group.settings}
        for group in await client.admin.groups()
    }
    letters = {
        name: [
            [letter.id, letter.subject, letter.attempts, letter.reason]
            async for letter in client.admin.dead_letters(name)
        ]
        for name in groups
    }
    stored = [
        [
            message.id,
            message.subject,
            message.body.hex(),
            message.keys,
            message.tags,
            message.properties,
            message.order_key,
        ]
        async for message in client.find(limit=None)
    ]
    return {"groups": groups, "dead_letters": letters, "messages": stored}


async def fill(data: Path, copy: Path) -> dict[str, Any]:
    """Fill a new directory in two runs of a broker, copy it while the second one serves, and return what is in it."""
    item_file.MEMORY_ITEMS = timer_queue.MEMORY_ITEMS = 4  # type: ignore[misc]  # so that few make sorted runs
    async with serving(data) as broker, qmq.connect(broker.url) as client:
        await _send(client, 0)
        await client.send_many("shop.large", [bytes(30_000)] * 4, keys=["large"] * 4)  # segments are sealed
        await client.send("shop.late", b"delivered", delay=0.05)
        await client.send("shop.late", b"in a year", delay="365d")
        await _consume(client, 0)
    async with serving(data) as broker, qmq.connect(broker.url) as client:
        await _send(client, 100)
        cancelled = await client.send("shop.late", b"cancelled", delay="100d")
        assert await client.admin.cancel(cancelled.id)
        await _consume(client, 100)
        (letter, *_) = [letter async for letter in client.admin.dead_letters("work")]
        assert await client.admin.redrive("work", [str(letter.id)]) == 1
        await client.admin.seek("once", "new")
        await client.admin.set_group("work", max_unacked=500)
        async with client.subscribe("shop.", group="work", consumer="holder") as consumer:
            held = await _taken(consumer, 3)
            expected = await told(client) | {"made_us": clock().wall_us, "held": [message.id for message in held]}
            expected["unique"] = await _sent_once(client)
            # With messages in flight, and records behind the last checkpoint; a socket cannot be copied.
            shutil.copytree(data, copy, ignore=shutil.ignore_patterns("ping"))
            for message in held:
                message.release()
    return expected


async def _send(client: qmq.Client, first: int) -> None:
    for number in range(first, first + 12):
        body = b"%d" % number * 100
        await client.send("shop.order", body, key=f"order-{number}", tags=["eu"] if number % 2 else ["us"])
        await client.send("shop.mail", body, priority=("high", "normal", "low")[number % 3])
        await client.send("shop.step", body, order_key=f"k{number % 4}", properties={"number": str(number)})
        await client.send(
            "shop.charge", body, unique=f"order-{number}-charge", delay="300d" if number % 6 == 5 else None
        )
    await client.send_many("shop.many", [b"%d" % number for number in range(first, first + 40)], keys=["a"] * 40)
    await client.send("shop.soon", b"expires", expires_in="300d")


async def _sent_once(client: qmq.Client) -> dict[str, str]:
    """Return the ids of the messages with unique texts, by the texts: none of them is stored again."""
    texts = [f"order-{first + number}-charge" for first in (0, 100) for number in range(12)]
    receipts = await client.send_many("shop.charge", [b""] * len(texts), unique=texts)
    assert all(receipt.duplicate for receipt in receipts)
    return {text: receipt.id for text, receipt in zip(texts, receipts, strict=True)}


async def _consume(client: qmq.Client, first: int) -> None:
    """Let each mode of group take some: ack, nack with a reason, reject."""
    settings: Any = {"max_attempts": 4, "retry_delays": ["200d"], "ack_deadline": "1h"}
    async with client.subscribe("shop.", group="work", consumer="worker", **settings) as consumer:
        for index, message in enumerate(await _taken(consumer, 24)):
            with suppress(qmq.Fenced):  # it was taken back, as an earlier one of its order key failed
                if index % 6 == 1:
                    await message.nack(reason=f"no stock of {first + index}")
                elif index % 6 == 2:
                    await message.reject("größe unknown")
                else:
                    await message.ack()
    async with client.subscribe("shop.order", group="eu", tags=["eu"]) as consumer:
        for message in await _taken(consumer, 3):
            await message.ack()
    async with client.subscribe("shop.", group="once", mode="at_most_once") as consumer:
        await _taken(consumer, 5)
    async with client.subscribe("shop.mail", group="all", mode="broadcast", consumer="b1", start="first") as consumer:
        for message in await _taken(consumer, 4):
            await message.ack()


async def _taken(consumer: qmq.Consumer, count: int) -> list[qmq.Message]:
    taken: list[qmq.Message] = []
    while len(taken) < count:
        taken += await consumer.pull(count - len(taken))
    return taken


def pack(root: Path, target: Path) -> None:
    """Write an archive of what is in *root*, without the lock."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if entry.name.endswith("/lock") else entry

    with tarfile.open(target, "w:gz", compresslevel=9) as archive:
        for name in sorted(os.listdir(root)):
            archive.add(root / name, name, filter=kept)


def unpack(path: Path, to: Path) -> dict[str, Any]:
    """Unpack an archive, and return what it should have."""
    with tarfile.open(path) as archive:
        archive.extractall(to, filter="data")
    expected: dict[str, Any] = json.loads((to / "expected.json").read_text())
    return expected


def main() -> None:
    """Make the next archive."""
    number = max((int(path.name.partition(".")[0]) for path in archives()), default=0) + 1
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir()
        expected = asyncio.run(fill(Path(name) / "data", root / "data"))
        expected["versions"] = written_versions()
        (root / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False))
        DIRECTORY.mkdir(exist_ok=True)
        pack(root, DIRECTORY / f"{number}.tar.gz")


if __name__ == "__main__":
    main()
