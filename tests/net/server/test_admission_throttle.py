"""Connections that send invalid frames wait, one after another; others do not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fuzz.core import Core, TurnLoop, Wire
from fuzz.wire import GoodClient
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.server.admission import Throttle
from qmq.net.server.connection import READ_S, THROTTLED, ClientConnection
from tests.net.frames import HELLO, batch, frame

WRONG = frame(FrameKind.SEND, 2, bytes(100))


class Waiting:
    """Stands in for a connection: records when it is read from."""

    def __init__(self) -> None:
        self.reasons = 0

    def stop_reading(self, why: int) -> None:
        self.reasons |= why

    def read_on(self, why: int) -> None:
        self.reasons &= ~why


def test_each_waits_until_what_was_charged_before_is_paid() -> None:
    loop = TurnLoop()
    throttle = Throttle(cast(asyncio.AbstractEventLoop, loop))
    one, other = Waiting(), Waiting()
    throttle.charge(0.000_5)
    throttle.wait(cast(ClientConnection, one))
    assert not throttle.much
    throttle.charge(0.002)
    throttle.wait(cast(ClientConnection, other))
    assert throttle.much
    loop.advance(0.021)  # a fortieth of the time is theirs
    assert (one.reasons, other.reasons) == (0, THROTTLED)
    loop.advance(0.08)
    assert (other.reasons, throttle.much) == (0, False)
    loop.advance(100)
    throttle.charge(0.000_5)
    throttle.wait(cast(ClientConnection, one))
    loop.advance(0.021)
    assert one.reasons == 0


def test_large_costs_are_forgiven_in_the_end() -> None:
    loop = TurnLoop()
    throttle = Throttle(cast(asyncio.AbstractEventLoop, loop))
    one = Waiting()
    for _ in range(100):
        throttle.charge(1.0)
    throttle.wait(cast(ClientConnection, one))
    loop.advance(10.01)
    assert one.reasons == 0


def test_a_connection_is_read_from_again_after_invalid_frames_and_others_all_the_while() -> None:
    core = Core()
    good = GoodClient(core, HELLO)
    liar = Wire(core)
    liar.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO) + WRONG * 1_000)
    for _ in range(100):
        core.run()
        assert not liar.reading
        good.check()
        core.loop.advance(10)
        if liar.reading:
            break
    answers: list[Any] = list(liar.frames())
    assert [answer.kind for answer in answers] == [FrameKind.WELCOME] + [FrameKind.ERROR] * 1_000
    core.close()


def test_a_frame_in_parts_costs_each_read() -> None:
    core = Core()
    liar = Wire(core)
    liar.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
    lie = frame(FrameKind.SEND, 2, bytes(40_000))
    for start in range(0, len(lie), 1_000):
        liar.send(lie[start : start + 1_000])
    assert liar.protocol.took_s >= len(lie) // 1_000 * READ_S
    core.run()
    core.loop.advance(10)
    liar.send(WRONG)
    assert liar.protocol.took_s < len(lie) // 1_000 * READ_S, "what was paid for is not charged again"
    core.close()


def test_new_connections_many_small_frames_and_invalid_ones_are_read_in_small_parts() -> None:
    core = Core()
    one = Wire(core)

    def part() -> int:
        return len(one.protocol.get_buffer(-1))

    one.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
    assert part() == 4_096
    one.send(frame(FrameKind.SEND, 2, batch(*[bytes(1_000)] * 200)))
    core.run()
    assert part() >= 65_536
    one.send(frame(FrameKind.WITHDRAW, 2, bytes(8)) * 20_000)
    assert 4_096 <= part() <= 16_384
    one.send(WRONG)
    core.run()
    assert part() == 4_096
    assert [answer.kind for answer in one.frames()] == [FrameKind.WELCOME, FrameKind.SENT, FrameKind.ERROR]
    core.close()
