"""The time that a new connection has for its HELLO, by a clock that is set."""

from __future__ import annotations

from fuzz.core import Core, Wire
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, MAX_HELLO_BYTES, FrameKind

MANY = 100
#: What Core gives, in seconds.
TIME_S = 10_000 / 1_000
#: Seconds from one byte to the next.
PACE = 0.1


def test_a_hello_byte_by_byte_has_its_time_and_no_more() -> None:
    core = Core()
    hello = frames.FRAME.pack(MAX_HELLO_BYTES, FrameKind.HELLO, 0, MAX_HELLO_BYTES - FRAME_SIZE, 1)
    wires = [Wire(core) for _ in range(MANY)]
    began, sent = core.loop.time(), 0
    while core.loop.time() + PACE < began + TIME_S:
        for wire in wires:
            wire.send(hello[sent : sent + 1] or b"\0")
        core.run()
        assert not any(wire.said for wire in wires), "nobody is told before the time is over"
        core.loop.advance(PACE)
        sent += 1
    assert sent > FRAME_SIZE
    core.loop.advance(1.0)
    for wire in wires:
        (answer,) = wire.frames()
        fields = frames.unpack_meta(answer.meta)
        assert fields["code"] == "protocol_error"
        assert f"no HELLO within {TIME_S:g} s" in fields["message"]
        wire.hang_up()
    core.run()
    core.close()
