"""A flipped bit in the header of any request never makes another valid request."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest

from qmq.broker.ports import commands
from qmq.broker.transfer.restore import batches_of
from qmq.errors import BadBatch, ProtocolError
from qmq.format.batch import BatchLimits, check_batch
from qmq.net.client.consumer.in_flight import PendingDisposition
from qmq.net.client.consumer.nacks import packed
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind
from qmq.net.protocol.types import Disposition
from qmq.net.server.requests import decode_request
from tests.broker.transfer.test_restore import RUN, frame_of
from tests.net.frames import batch, frame

REQUEST: Final = 7
HANDED_OVER: Final = {"group": "g", "attempt": 1, "disposition": 1, "delay_us": None, "reason": "broke"}
SUBSCRIBED: Final = {"group": "g", "prefixes": ["a."], "consumer": "c", "start": None, "nonce": bytes(16)}
BACK_META, BACK_ROWS = packed(
    [
        PendingDisposition(4, 9, Disposition.NACK, None, "broke"),
        PendingDisposition(10, 11, Disposition.REJECT, None, "no"),
    ],
    5,
)


def ack(*numbers: int) -> bytes:
    pairs, crc = frames.pack_numbers(numbers)
    return frames.ACK.pack(5, crc) + pairs


def of(kind: int, payload: bytes = b"", meta: dict[str, Any] | None = None, flags: int = 0) -> bytes:
    return frame(kind, REQUEST, payload, meta, flags)


FRAMES: Final = {
    "send, append": of(FrameKind.SEND, batch(b"x" * 50, b"y")),
    "send, flush": of(FrameKind.SEND, batch(b"x" * 50, b"y"), flags=frames.FLUSH),
    "subscribe": of(FrameKind.SUBSCRIBE, meta=SUBSCRIBED),
    "pull": of(FrameKind.PULL, frames.PULL.pack(1, 100, 1, 1 << 20, 2_000, 50)),
    "pull, checked": of(FrameKind.PULL, frames.PULL.pack(1, 100, 1, 1 << 20, 2_000, 50), flags=frames.CHECK),
    "withdraw": of(FrameKind.WITHDRAW, frames.WITHDRAW.pack(9)),
    "unsubscribe": of(FrameKind.UNSUBSCRIBE, frames.UNSUBSCRIBE.pack(4)),
    "last sequence": of(FrameKind.LAST_SEQUENCE, bytes(16)),
    "claim": of(FrameKind.CLAIM, bytes(32)),
    "subjects": of(FrameKind.SUBJECTS, meta={"prefix": "a.", "after": 5, "limit": 9}),
    "all subjects": of(FrameKind.SUBJECTS),
    "report": of(FrameKind.REPORT, frames.REPORT.pack(5, 6, 7, 8), meta={"reason": "rot"}),
    "report without a reason": of(FrameKind.REPORT, frames.REPORT.pack(5, 6, 7, 8)),
    "ack": of(FrameKind.ACK, ack(1, 4)),
    "ack that may wait": of(FrameKind.ACK, ack(1, 4), flags=frames.MAY_WAIT),
    "ack of two": of(FrameKind.ACK, ack(1, 4, 9, 10)),
    "ack of four": of(FrameKind.ACK, ack(1, 4, 9, 10, 12, 13, 15, 16)),
    "hand back": of(FrameKind.HAND_BACK, BACK_ROWS, BACK_META),
    "heartbeat": of(FrameKind.HEARTBEAT, frames.HEARTBEAT.pack(bytes(16), 5)),
    "administer": of(FrameKind.ADMINISTER, meta={"action": "delete_group", "group": "g"}),
    "hand over": of(FrameKind.HAND_OVER, batch(b"x" * 50), HANDED_OVER),
    "segments": of(FrameKind.SEGMENTS, frames.SEGMENTS.pack(5, 1)),
    "batches": of(FrameKind.BATCHES, frames.BATCHES.pack(5, 6, 1)),
    "read log": of(FrameKind.READ_LOG, frames.READ_LOG.pack(5, 6, 1)),
    "get": of(FrameKind.GET, bytes(range(16))),
    "find": of(FrameKind.FIND, meta={"prefix": "a.", "key": "k", "after": [5, 6], "upto_us": 7}),
    "find all": of(FrameKind.FIND),
    "trace": of(FrameKind.TRACE, meta={"id": bytes(range(16)), "places": [1, 2, 3, 4]}),
    "restore": of(FrameKind.RESTORE, bytes(frame_of(b"x" * 50, b"y", b"z", batches=3))),
}


def command_of(data: bytes) -> commands.Command | None:
    """Return the command in the first frame, None while it is incomplete. Raises ProtocolError."""
    for found in frames.split_frames(memoryview(data), 1 << 20):
        return decode_request(3, found)
    return None


def check(command: commands.Command) -> None:
    """Raise BadBatch if the broker would refuse the batch for its bytes alone."""
    if isinstance(command, commands.Send | commands.HandOver):
        check_batch(command.batch, BatchLimits())
    elif isinstance(command, commands.Restore):
        batches_of(command.batches, RUN)


@pytest.mark.parametrize("name", FRAMES)
def test_one_flipped_bit_makes_no_other_request(name: str) -> None:
    sound, following = FRAMES[name], FRAMES["heartbeat"] + FRAMES["ack"]
    command = command_of(sound)
    assert command is not None
    check(command)
    outcomes = Counter[str]()
    for bit in range(8 * FRAME_SIZE):
        flipped = bytearray(sound + following)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = command_of(bytes(flipped))
            if found is not None:
                check(found)
        except ProtocolError:
            outcomes["ends the connection"] += 1
            continue
        except BadBatch:
            outcomes["is refused"] += 1
            continue
        if found is None:
            outcomes["waits for more"] += 1
            continue
        outcomes["has another number"] += 1
        assert bit >= 64, f"bit {bit} makes {found}"
        same = {"request": REQUEST} if "request" in found._fields else {}
        assert found._replace(**same) == command
    print(name, dict(outcomes))
    assert outcomes["has another number"] == 64
    assert outcomes["ends the connection"] >= 8
