"""A consumer in a process of its own, which is killed or stopped. It asks before each step, so whoever kills it knows
what it was given and what it may have done: what it has asked for without an answer has not happened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Final

import qmq
from qmq.net.client.consumer import acks, nacks, order_turns

CHILD_WAYS: Final = ("run", "run 4", "for", "pull", "pull_batch")
SYNC_CHILD_WAYS: Final = ("sync run", "sync run 3", "sync for", "sync pull", "sync pull_batch")
#: What it does with a message.
DECISIONS: Final = ("ack", "ack", "ack awaited", "with", "nack", "error", "keep")
_MODULES: Final = {"acks": acks, "nacks": nacks, "order_turns": order_turns}


@dataclass(frozen=True)
class Told:
    """A message, as its process tells of it."""

    id: str
    subject: str
    body: bytes
    key: str | None
    tags: tuple[str, ...]
    priority: str
    order_key: str | None
    properties: dict[str, str]
    sequence: int
    attempt: int


@dataclass(frozen=True)
class ChildPlan:
    """What a process does until its end."""

    url: str
    way: str
    prefixes: tuple[str, ...]
    #: Those of ``subscribe``.
    options: dict[str, Any]
    seed: str
    state_directory: str
    #: Module, constant and value of the client's waits.
    waits: tuple[tuple[str, str, float], ...]


class Broken(Exception):
    """What a handler raises."""


def live(connection: Connection, plan: ChildPlan) -> None:
    """Consume until the end of the process."""
    logging.disable()
    os.environ["QMQ_STATE_DIR"] = plan.state_directory
    for module, constant, value in plan.waits:
        setattr(_MODULES[module], constant, value)
    child = _Child(connection, plan)
    try:
        if plan.way.startswith("sync"):
            child.consume_sync()
        else:
            asyncio.run(child.consume())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # who has killed it hears it no more
    except Exception as error:
        child.fails(error)
    threading.Event().wait()  # until it is killed


class _Child:
    def __init__(self, connection: Connection, plan: ChildPlan) -> None:
        self._connection = connection
        self._plan = plan
        self._chance = Random(plan.seed)
        self._lock = threading.Lock()

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            self._connection.send(question)
            return self._connection.recv()

    def fails(self, error: Exception) -> None:
        """Tell of an error, unless somebody has deleted the group, or has set what it follows."""
        follows_none = isinstance(error, qmq.InvalidOption) and "does not follow" in str(error)
        if not follows_none and not isinstance(error, qmq.UnknownGroup):
            with suppress(EOFError, BrokenPipeError, ConnectionResetError):
                self._ask("failed", "".join(traceback.format_exception(error)))

    def _took(self, message: qmq.Message | qmq.SyncMessage) -> int:
        number: int = self._ask("took", Told(
            message.id, message.subject, bytes(message.body), message.key, message.tags, message.priority,
            message.order_key, dict(message.properties), message.sequence, message.attempt,
        ))  # fmt: skip
        return number

    def _decides(self, numbers: list[int], state: str) -> bool:
        """Ask whether the messages may be disposed of so; it is noted as done."""
        may: bool = self._ask("decides", numbers, state)
        return may

    def _decision(self, *, is_handler: bool) -> str:
        with self._lock:
            decision = self._chance.choice(DECISIONS)
        return {"nack": "error", "keep": "ack"}.get(decision, decision) if is_handler else decision

    # --- asyncio -----------------------------------------------------------------------------------------------------

    async def consume(self) -> None:
        plan = self._plan
        async with (
            qmq.connect(plan.url, wait=30) as client,
            client.subscribe(*plan.prefixes, **plan.options) as consumer,
        ):
            self._ask("entered", consumer.id)
            while True:
                with suppress(qmq.Fenced):
                    await self._go_on(consumer)

    async def _go_on(self, consumer: qmq.Consumer) -> None:
        match self._plan.way:
            case "run" | "run 4":
                await consumer.run(self._handle, concurrency=4 if self._plan.way == "run 4" else 1)
            case "for":
                async for message in consumer:
                    await self._dispose(message, self._took(message))
            case "pull":
                while True:
                    messages = await consumer.pull(self._chance.choice((1, 3, 20)), timeout=30)
                    numbers = [self._took(message) for message in messages]
                    for message, number in zip(messages, numbers, strict=True):
                        await self._dispose(message, number)
            case "pull_batch":
                while True:
                    batch = await consumer.pull_batch(self._chance.choice((1, 10, 1_000)), timeout=30)
                    numbers = [self._took(message) for message in batch]
                    is_acked = self._chance.random() < 0.7
                    if numbers and self._decides(numbers, "acking" if is_acked else "failing"):
                        await (batch.ack() if is_acked else batch.nack())
                        self._ask("confirmed", numbers)

    async def _handle(self, message: qmq.Message) -> None:
        number = self._took(message)
        await asyncio.sleep(self._chance.choice((0, 0, 0.001)))
        if self._decision(is_handler=True) == "error":
            self._decides([number], "failing")
            raise Broken
        self._decides([number], "acking")

    async def _dispose(self, message: qmq.Message, number: int) -> None:
        match self._decision(is_handler=False):
            case "ack":
                if self._decides([number], "acking"):
                    message.ack()
            case "ack awaited":
                if self._decides([number], "acking"):
                    await message.ack()
                    self._ask("confirmed", [number])
            case "with":
                if self._decides([number], "acking"):
                    async with message:
                        pass
            case "error":
                if self._decides([number], "failing"):
                    with suppress(Broken):
                        async with message:
                            raise Broken
            case "nack":
                if self._decides([number], "failing"):
                    await message.nack()
                    self._ask("confirmed", [number])
            case "keep":
                pass

    # --- without asyncio ---------------------------------------------------------------------------------------------

    def consume_sync(self) -> None:
        plan = self._plan
        with (
            qmq.connect_sync(plan.url, wait=30) as client,
            client.subscribe(*plan.prefixes, **plan.options) as consumer,
        ):
            self._ask("entered", consumer.id)
            while True:
                with suppress(qmq.Fenced):
                    self._go_on_sync(consumer)

    def _go_on_sync(self, consumer: qmq.SyncConsumer) -> None:
        match self._plan.way:
            case "sync run" | "sync run 3":
                consumer.run(self._handle_sync, concurrency=3 if self._plan.way == "sync run 3" else 1)
            case "sync for":
                for message in consumer:
                    self._dispose_sync(message, self._took(message))
            case "sync pull":
                while True:
                    messages = consumer.pull(self._chance.choice((1, 3, 20)), timeout=30)
                    numbers = [self._took(message) for message in messages]
                    for message, number in zip(messages, numbers, strict=True):
                        self._dispose_sync(message, number)
            case "sync pull_batch":
                while True:
                    batch = consumer.pull_batch(self._chance.choice((1, 10, 1_000)), timeout=30)
                    numbers = [self._took(message) for message in batch]
                    is_acked = self._chance.random() < 0.7
                    if numbers and self._decides(numbers, "acking" if is_acked else "failing"):
                        if is_acked:
                            batch.ack(wait=True)
                        else:
                            batch.nack()
                        self._ask("confirmed", numbers)

    def _handle_sync(self, message: qmq.SyncMessage) -> None:
        number = self._took(message)
        if self._decision(is_handler=True) == "error":
            self._decides([number], "failing")
            raise Broken
        self._decides([number], "acking")

    def _dispose_sync(self, message: qmq.SyncMessage, number: int) -> None:
        match self._decision(is_handler=False):
            case "ack":
                if self._decides([number], "acking"):
                    message.ack()
            case "ack awaited":
                if self._decides([number], "acking"):
                    message.ack(wait=True)
                    self._ask("confirmed", [number])
            case "with":
                if self._decides([number], "acking"):
                    with message:
                        pass
            case "error":
                if self._decides([number], "failing"):
                    with suppress(Broken), message:
                        raise Broken
            case "nack":
                if self._decides([number], "failing"):
                    message.nack()
                    self._ask("confirmed", [number])
            case "keep":
                pass
