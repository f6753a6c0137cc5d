"""Connections of a simulated world: bytes between two processes, in order, until a connection breaks.

What is on its way when it breaks may arrive all the same, at once or late, when its sender has long said it again on
another connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, Protocol

from tests.sim.world import Process

#: How long (seconds) bytes take at most, and what arrives late.
_LATENCY_S: Final = 0.002
_LATE_S: Final = 3.0
#: What comes after what.
_ORDER_S: Final = 1e-6


class Faults(Protocol):
    """What befalls connections."""

    def befalls(self, end: End) -> str:
        """What befalls a connection whose client is about to write; empty: nothing."""


class End(asyncio.Transport):
    """One end of a connection, as the process there has it."""

    def __init__(self, process: Process, protocol: asyncio.BufferedProtocol, faults: Faults | None) -> None:
        super().__init__()
        self.process = process
        self.protocol = protocol
        self.faults = faults
        self.peer: End
        self.is_over = False  # nothing more comes or goes here
        self._is_paused = False
        self._waiting: list[bytes | None] = []  # what came while it was paused; None: the end
        self._arrives_at = 0.0  # what was written last
        self._is_silent = False  # what is written goes nowhere
        self._is_unheard = False  # not even that its process is gone
        process.at_end.append(self.die)

    # --- for protocols -----------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("10.0.0.7", 51_234) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.process.call_soon(self._arrived, data)

    def write(self, data: Any) -> None:
        if self.is_over or self.process.is_killed:
            return
        content = bytes(data)
        match self.faults.befalls(self) if self.faults is not None else "":
            case "frame lost":
                self.cut()
            case "frame torn":
                self._send(content[: self.process.world.chance.randrange(1, len(content))])
                self.cut()
            case "answer lost":
                self.peer._is_silent = True
                self._send(content)
                self.peer.process.call_at(self._arrives_at, self.peer._cut_behind)
            case "frame doubled":  # it is taken for lost, and said again; then it comes
                late = self.process.world.chance.random() * _LATE_S
                self._send(content, late)
                self._send(None, late)
                self.peer._is_silent = True
                self._over()
            case "gone silent":
                self._is_silent = self.peer._is_silent = True
                self._is_unheard = self.peer._is_unheard = True
            case _:
                self._send(content)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._send(None)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self.is_over:
            self._send(None)
            self._over()

    def abort(self) -> None:
        self.close()

    # --- on the way --------------------------------------------------------------------------------------------------

    def _send(self, data: bytes | None, late: float = 0.0) -> None:
        world = self.process.world
        self._arrives_at = max(self._arrives_at + _ORDER_S, world.now + world.chance.random() * _LATENCY_S + late)
        if not self._is_silent and not self.peer.process.is_killed:
            self.peer.process.call_at(self._arrives_at, self.peer._arrived, data)

    def _arrived(self, data: bytes | None) -> None:
        if self.is_over:
            return
        if self._is_paused:
            self._waiting.append(data)
        elif data is None:
            self.protocol.eof_received()
            self.close()
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.is_over:
            room = self.protocol.get_buffer(len(view))
            size = min(len(room), len(view))
            room[:size] = view[:size]
            view = view[size:]
            self.protocol.buffer_updated(size)

    def _cut_behind(self) -> None:
        self.process.call_soon(self.cut)

    def cut(self) -> None:
        """It breaks, for both sides; what is on its way is lost."""
        for end in (self, self.peer):
            end._is_silent = True
            end._over()

    def _over(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self.die in self.process.at_end:
            self.process.at_end.remove(self.die)
        if not self.process.is_killed:
            self.process.call_soon(self.protocol.connection_lost, None)

    def die(self) -> None:
        """Its process is killed: the other one hears of it behind what was written before. Where it has heard nothing
        more of this one for a fault, it hears that the connection is gone.
        """
        self.is_over = True
        if self._is_silent and not (self._is_unheard or self.peer.process.is_killed):
            self.peer.process.call_soon(self.peer.cut)
        self._send(None)


def connected(
    client: Process,
    protocol: asyncio.BufferedProtocol,
    server: Process,
    served: asyncio.BufferedProtocol,
    faults: Faults,
) -> tuple[End, End]:
    """A connection of a client's protocol to a server's, whose processes it is then to be told to."""
    near, far = End(client, protocol, faults), End(server, served, None)
    near.peer, far.peer = far, near
    return near, far
