"""qmq/net/server/tls.py: whose handshake comes first, and how much of the loop handshakes get."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, cast

from qmq.net.server.accept import ConnectionWarnings
from qmq.net.server.admission import Throttle
from qmq.net.server.tls import Handshakes, TlsChannel


class Handle:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class DrivenLoop:
    """A loop whose time goes on with what it does."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[tuple[float, int, Handle, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> Handle:
        return self.call_later(0, call, *arguments)

    def call_later(self, delay: float, call: Callable[..., object], *arguments: Any) -> Handle:
        handle = Handle()
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, handle, call, arguments))
        return handle

    def step(self) -> bool:
        """Make the next call; return whether there was one."""
        if not self._due:
            return False
        at, _, handle, call, arguments = heapq.heappop(self._due)
        self.now = max(self.now, at)
        if not handle.is_cancelled:
            call(*arguments)
        return True


class Client:
    """A connection whose client has sent its hello. To answer it takes 6 ms."""

    peer = "a client"

    def __init__(self, world: World, name: int) -> None:
        self._world = world
        self.name = name
        self.has_left = False

    def is_gone(self) -> bool:
        return self.has_left

    def shake_hands(self) -> None:
        self._world.loop.now += 0.006
        self._world.answered[self.name] = self._world.loop.now
        self._world.handshakes.spent(0.006)

    def abort(self) -> None:
        self._world.handshakes.forget(cast(TlsChannel, self))


class World:
    def __init__(self) -> None:
        self.loop: Any = DrivenLoop()
        self.frames = 0
        self.answered: dict[int, float] = {}  # when, in order
        self.handshakes = Handshakes(
            self.loop, cast(Any, None), 1_000, 10.0, Throttle(self.loop), ConnectionWarnings(self.loop),
            self.loop.time, lambda: self.frames,
        )  # fmt: skip

    def says_hello(self, name: int) -> Client:
        client = Client(self, name)
        self.handshakes.begin(cast(TlsChannel, client))
        self.handshakes.ready(cast(TlsChannel, client))
        return client

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.loop.step()


def test_the_newest_hello_is_answered_first_and_that_of_a_client_that_has_left_is_not() -> None:
    world = World()
    clients = [world.says_hello(name) for name in range(10)]
    clients[8].has_left = True
    world.run(lambda: len(world.answered) == 2)  # what fits into a turn
    assert list(world.answered) == [9, 7]
    clients[5].has_left = True  # which the loop hears between two turns, or not yet
    world.says_hello(10)
    world.run(lambda: 0 in world.answered)
    assert list(world.answered) == [9, 7, 10, 6, 4, 3, 2, 1, 0]


def test_while_nobody_is_served_handshakes_get_the_whole_loop() -> None:
    world = World()
    for name in range(20):
        world.says_hello(name)
    began = world.loop.now
    world.run(lambda: len(world.answered) == 20)
    assert world.loop.now - began < 20 * 0.006 + 0.001


def shares(*, are_done: bool) -> float:
    """The part of the loop that handshakes get while clients are served."""
    world = World()
    clients = [world.says_hello(name) for name in range(40)]
    began = world.loop.now
    done = 0
    while len(world.answered) < 40:
        world.frames += 1
        assert world.loop.step()
        if are_done:
            for name in list(world.answered)[done:]:
                world.handshakes.done(cast(TlsChannel, clients[name]), 0.006)
                done += 1
    return 40 * 0.006 / (world.loop.now - began)


def test_while_clients_are_served_handshakes_get_a_part_that_depends_on_their_success() -> None:
    assert 0.1 < shares(are_done=False) < 0.15
    assert 0.4 < shares(are_done=True) < 0.8
