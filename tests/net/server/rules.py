"""A stand-in for the broker: it records the server's calls, and answers as a test asks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from qmq.broker.ports import commands, effects
from qmq.broker.ports.commands import Command, Now
from qmq.broker.ports.effects import Effect
from qmq.net.server import Server, ServerOptions
from qmq.net.server.accept import bind
from qmq.net.server.certificates import ServerCertificates
from tests.certificates import active

STORE = b"store!"
OPTIONS = ServerOptions(
    store_id=STORE,
    version="1.2.3",
    max_frame_bytes=1 << 20,
    max_batch_bytes=1 << 20,
    max_message_bytes=1 << 19,
    producer_window=64,
    producer_ttl_ms=3_600_000,
    unique_for_ms=3_600_000,
    max_pull_count=1_000,
    max_pull_bytes=1 << 20,
    session_timeout_ms=30_000,
    max_waiting_pulls=100,
    max_connections=50,
    max_inflight_bytes=1 << 20,
    max_buffered_bytes=64 << 20,
    first_frame_timeout_ms=10_000,
)


class StandIn:
    """Answers each SEND with SENT at the end of its turn, and other commands by ``answer``."""

    short_way = None

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.turns: list[int] = []  # batches by turn
        self.batches: list[bytes] = []
        self.deadline_us: int | None = None
        self.answer: Callable[[Any], Effect | None] = lambda command: None
        self.on_turn: Callable[[], None] = lambda: None
        self._staged: list[commands.Send] = []
        self.effects: list[Effect] = []

    def handle(self, command: Command, now: Now) -> None:
        self.commands.append(command)
        if isinstance(command, commands.Send):
            command.batch[:0] = b""  # writable
            self._staged.append(command)
        effect = self.answer(command)
        if effect is not None:
            self.effects.append(effect)

    def turn(self, now: Now) -> None:
        staged, self._staged = self._staged, []
        if staged:
            self.turns.append(len(staged))
        for send in staged:
            self.batches.append(bytes(send.batch))
            self.effects.append(effects.Sent(send.connection, send.request, len(self.batches), 1, 0, 0))
        self.on_turn()

    def tick(self, now: Now) -> int | None:
        if self.deadline_us is not None and self.deadline_us <= now.monotonic_us:
            self.deadline_us = None
        return self.deadline_us

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def take_syncs(self) -> list[effects.SyncWanted]:
        wanted = [effect for effect in self.effects if isinstance(effect, effects.SyncWanted)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, effects.SyncWanted)]
        return wanted

    def of(self, kind: type) -> list[Any]:
        """Return the commands of one kind so far."""
        return [command for command in self.commands if isinstance(command, kind)]


class Serving:
    """A server over a StandIn."""

    def __init__(self, rules: StandIn, server: Server, address: tuple[str, int]) -> None:
        self.rules = rules
        self.server = server
        self.address = address
        self.synced: list[effects.SyncWanted] = []


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Serving]:
    """A server, over TLS where tests run so."""
    rules, files = StandIn(), active()
    certificates = None if files is None else ServerCertificates(files.server.cert, files.server.key)
    logging.getLogger("qmq.server").setLevel(logging.DEBUG)
    sockets, address = bind("127.0.0.1", 0)
    synced: list[effects.SyncWanted] = []
    tls = None if certificates is None else certificates.context
    server = Server(rules, OPTIONS._replace(**options), synced.append, lambda looked: None, tls=tls)
    server.listen(sockets)
    serving = Serving(rules, server, address)
    serving.synced = synced
    try:
        yield serving
    finally:
        server.stop_reading()
        await server.close(0.05)
