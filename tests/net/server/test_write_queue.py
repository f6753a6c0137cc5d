"""Large answers are written in pieces, and others come in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.ports import commands, effects
from qmq.errors import ProtocolError
from qmq.net.protocol.frames import FrameKind
from qmq.net.server.connection import ClientConnection, Hub
from qmq.net.server.write_queue import PIECE_BYTES, UnsentBytes, WriteQueue
from tests.net.frames import RawClient, batch, frame, on_uvloop, pull
from tests.net.server.rules import serving


@given(st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=5), st.integers(1, 30))
def test_unsent_bytes_come_in_order_and_in_pieces(parts: list[list[bytes]], most: int) -> None:
    rest = UnsentBytes()
    for part in parts:
        rest.add([*part], sum(map(len, part)))
    wanted = b"".join(b"".join(part) for part in parts)
    pieces = []
    while rest.size:
        pieces.append(b"".join(rest.take(most)))
    assert b"".join(pieces) == wanted
    assert all(len(piece) == most for piece in pieces[:-1])


def test_unsent_bytes_can_be_dropped() -> None:
    rest = UnsentBytes()
    rest.add([b"abc"], 3)
    rest.clear()
    assert (rest.size, rest.take(10)) == (0, [])


class Turns:
    """Makes the scheduled calls, one per turn."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.writing = WriteQueue(self.calls.append)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


class Scripted:
    """Has a number of pieces to write; may fail at the last one."""

    number = 5

    def __init__(self, turns: Turns, name: str, pieces: int, said: list[str], *, fails: bool = False) -> None:
        self._turns, self._name, self._pieces, self._said, self._fails = turns, name, pieces, said, fails

    def write_on(self) -> None:
        self._pieces -= 1
        if self._fails and not self._pieces:
            raise OSError(f"{self._name} is gone")
        self._said.append(self._name)
        if self._pieces:
            self._turns.writing.add(self)

    def abort(self) -> None:
        self._said.append(f"no {self._name}")


def test_writers_of_large_answers_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns()
    said: list[str] = []
    for writer in (
        Scripted(turns, "a", 3, said),
        Scripted(turns, "b", 2, said, fails=True),
        Scripted(turns, "c", 1, said),
    ):
        turns.writing.add(writer)
        turns.writing.add(writer)  # once is enough
    assert len(turns.calls) == 1
    turns.run()
    assert said == ["a", "b", "c", "a", "no b", "a"]
    assert "b is gone" in caplog.text


class Hubs:
    """Implements Hub for a connection whose transport takes *room* bytes."""

    max_inflight_bytes = 64 << 20

    def __init__(self, room: int) -> None:
        self.room = room
        self.written: list[int] = []
        self.unread_sizes: list[int] = []
        self.turns = Turns()
        self.connection = ClientConnection(cast(Hub, self), 1)
        self.connection._transport = cast(Any, self)

    # --- called by the server ---

    def write_soon(self, connection: ClientConnection) -> None:
        self.turns.writing.add(connection)

    def unread(self, connection: ClientConnection, size: int) -> None:
        self.unread_sizes.append(size)

    def leave(self, connection: ClientConnection) -> None:
        pass

    lingers = large_answer = leave

    # --- called by the transport ---

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, buffers: list[bytes]) -> None:
        size = sum(map(len, buffers))
        self.written.append(size)
        self.room -= size
        if self.room < 0:
            self.connection.pause_writing()

    def get_extra_info(self, name: str) -> object:
        return None  # it has no socket

    def get_write_buffer_size(self) -> int:
        return max(-self.room, 0)

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass

    write_eof = resume_reading


def test_a_large_answer_goes_in_pieces_as_the_system_takes_them() -> None:
    hub = Hubs(PIECE_BYTES + 1_000)
    hub.connection.answers += [bytes(PIECE_BYTES), bytes(PIECE_BYTES), b"end"]
    hub.connection.write()
    assert hub.written == []
    hub.turns.run()
    assert hub.written == [PIECE_BYTES, PIECE_BYTES]
    assert hub.connection.unread_bytes() == PIECE_BYTES - 1_000 + 3 == hub.unread_sizes[-1]
    hub.connection.answers.append(b"more")
    hub.connection.write()
    hub.turns.run()
    assert hub.unread_sizes[-1] == PIECE_BYTES - 1_000 + 7
    hub.room = PIECE_BYTES
    hub.connection.resume_writing()
    hub.turns.run()
    assert hub.written == [PIECE_BYTES, PIECE_BYTES, 7]
    assert (hub.connection.unread_bytes(), hub.unread_sizes[-1]) == (0, 0)


def test_the_last_frame_comes_after_unsent_answers() -> None:
    hub = Hubs(64 << 20)
    hub.connection.answers += [bytes(3 * PIECE_BYTES)]
    hub.connection.write()
    hub.connection.end(ProtocolError("nonsense"))
    assert len(hub.written) == 1
    assert hub.written[0] > 3 * PIECE_BYTES
    hub.turns.run()
    assert len(hub.written) == 1


@on_uvloop
async def test_small_answers_are_written_beside_a_large_one() -> None:
    answer = bytes(8 << 20)
    async with serving() as s:
        s.rules.answer = lambda command: (
            effects.PulledMessages(command.connection, command.request, [answer], len(answer), 1)
            if isinstance(command, commands.Pull)
            else None
        )
        large, small = await RawClient.connect(s.address), await RawClient.connect(s.address)
        large.send(pull(1, 1))
        for request in range(1, 30):
            small.send(frame(FrameKind.SEND, request, batch(b"x")))
            assert (await small.read()).request == request
        got = await large.read()
        assert (got.kind, got.request, len(got.payload)) == (FrameKind.MESSAGES, 1, len(answer))
        await large.close()
        await small.close()
