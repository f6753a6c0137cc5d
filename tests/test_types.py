"""What a type checker tells users of the client: ``reveal_type`` of its calls, in a program of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

import qmq

#: Nothing of qmq runs.
pytestmark = pytest.mark.no_cover

ROOT = Path(__file__).parent.parent

#: A program and, after each ``reveal_type``, what must be revealed.
PROGRAM = """
import datetime
import qmq

async def asynchronous() -> None:
    async with qmq.connect("qmq://127.0.0.1:1", durability="append") as client:
        reveal_type(client)                                             # qmq.net.client.client.Client
        receipt = await client.send("a", b"1", key="k", tags=["t"], properties={"p": "v"})
        reveal_type(receipt)                                            # qmq.net.client.producer.receipts.Receipt
        await client.send("a", json={"a": 1}, delay="5m", expires_in=datetime.timedelta(days=1))
        await client.send_many("a", [b"1"], keys=["k"], tags=["t"])
        receipts = await client.send_many("a", [b"1"])
        reveal_type(receipts)                                           # qmq.net.client.producer.receipts.Receipts
        reveal_type(receipts[0].sequence)                               # int | None
        reveal_type(client.send_nowait("a", b"1"))                      # int
        reveal_type(await client.last_sequence("p"))                    # int | None
        async with client.subscribe("a.", "b.", group="g", start="first") as consumer:
            reveal_type(consumer)                                       # qmq.net.client.consumer.consumer.Consumer
            async for message in consumer:
                reveal_type(message)                                    # qmq.net.client.consumer.message.Message
                reveal_type(message.body)                               # bytes
                reveal_type(message.key)                                # str | None
                reveal_type(message.properties)                         # dict[str, str]
            reveal_type(await consumer.pull(max_count=1, timeout=2.0))  # list[qmq.net.client.consumer.message.Message]
            batch = await consumer.pull_batch(max_count=1)
            reveal_type(batch)                                          # qmq.net.client.consumer.message.MessageBatch
            reveal_type(batch[0])                                       # qmq.net.client.consumer.message.Message
            reveal_type(batch[1:])                                      # qmq.net.client.consumer.message.MessageBatch
            reveal_type(batch[[True]])                                  # qmq.net.client.consumer.message.MessageBatch
            async def handle(message: qmq.Message) -> None:
                reveal_type(message.json())                             # Any
                reveal_type(message.last_attempt)                       # bool
                await message.ack()
            await consumer.run(handle, concurrency=8, drain="30s")
            handler: qmq.Handler = handle
            await consumer.run(handler)
        settings: qmq.GroupSettings = {"max_attempts": 5, "retry_delays": ["200ms", "1s", "5m"]}
        mode: qmq.Mode = "broadcast"
        on_difference: qmq.OnDifference = "apply"
        async with client.subscribe("a.", group="g", mode=mode, on_difference=on_difference, **settings):
            pass
            changed: qmq.ChangedSettings = {"tags": ["vip"]}
            await client.admin.set_group("g", **changed)
            consumer.on_failed = lambda message, error: reveal_type(error) # BaseException
        async for subject in client.subjects("a."):
            reveal_type(subject.messages)                               # int
        reveal_type(await client.admin.set_group("g", tags=["t"], retry_delays=[1.5])) # dict[str, Any]

def synchronous() -> None:
    with qmq.connect_sync() as client:
        reveal_type(client)                                             # qmq.net.client.sync.client.SyncClient
        reveal_type(client.send("a", b"1"))                             # qmq.net.client.producer.receipts.Receipt
        with client.subscribe("a", group="g") as consumer:
            reveal_type(consumer.pull())                                # list[qmq.net.client.sync.consumer.SyncMessage]
            sync_batch = consumer.pull_batch()
            reveal_type(sync_batch)                                     # qmq.net.client.sync.consumer.SyncMessageBatch
            reveal_type(sync_batch[0])                                  # qmq.net.client.sync.consumer.SyncMessage
            reveal_type(sync_batch[:2])                                 # qmq.net.client.sync.consumer.SyncMessageBatch
            reveal_type(next(iter(sync_batch)).nack())                  # None
            reveal_type(next(reversed(sync_batch)))                     # qmq.net.client.sync.consumer.SyncMessage
            for message in consumer:
                reveal_type(message)                                    # qmq.net.client.sync.consumer.SyncMessage
            consumer.run(lambda message: message.ack(wait=True), concurrency=2)

def administered(client: qmq.SyncClient) -> None:
    reveal_type(client.admin)                                           # qmq.net.client.sync.admin.SyncAdmin
    reveal_type(client.admin.set_group("g", tags=["t"], max_attempts=3)) # dict[str, Any]
    reveal_type(client.admin.cancel("00"))                              # bool
    reveal_type(client.admin.delete_dead("g", all=True))                # int

def options(durability: qmq.Durability) -> None:
    reveal_type(durability)                                             # Literal['flush'] | Literal['append']

def errors(error: qmq.SendFailed) -> None:
    reveal_type(error.retryable)                                        # bool
    reveal_type(error.failures)                                         # list[qmq.errors.SendFailure]
"""

MISUSE = """
import qmq

async def wrong(client: qmq.Client) -> None:
    await client.send("a", "a string")
    await client.send("a", b"1", durability="maybe")
    client.subscribe("a", group=7)
    client.subscribe("a", start="last")
    client.send_nowait("a", b"1", propertys={})
    await client.admin.set_group("g", max_atempts=3)
    await client.admin.set_group("g", max_attempts=None)
    client.sned("a", b"1")
    qmq.conect()
    try:
        await client.flush()
    except qmq.SendTimeout:
        pass
"""


def fresh(directory: Path, name: str) -> Path:
    """A module name that no run had before: of a known one the cache gives the errors under the path they had then."""
    return directory / f"{name}_{uuid4().hex}.py"


def mypy(path: Path, program: str) -> list[str]:
    path.write_text(program, "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--hide-error-context", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def test_calls_reveal_their_types(tmp_path: Path) -> None:
    path = fresh(tmp_path, "program")
    wanted = [
        f'{path}:{number}: note: Revealed type is "{line.rpartition("# ")[2]}"'
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "reveal_type" in line
    ]
    *revealed, closing = mypy(path, PROGRAM)
    assert revealed == wanted
    assert closing.startswith("Success")


def test_misuse_is_found(tmp_path: Path) -> None:
    path = fresh(tmp_path, "misuse")
    found = mypy(path, MISUSE)
    lines = {int(line.removeprefix(f"{path}:").split(":")[0]) for line in found[:-1]}
    assert lines == {5, 6, 7, 8, 9, 10, 11, 12, 13, 16}


def test_every_exported_name_is_known(tmp_path: Path) -> None:
    path = fresh(tmp_path, "exported")
    found = mypy(path, "import qmq\n" + "".join(f"qmq.{name}\n" for name in qmq.__all__))
    assert found[-1].startswith("Success"), found
