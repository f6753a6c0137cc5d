"""Count what the broker does for one message: ``python -m bench.one_message``.

A message is sent, handed to a waiting pull, acked, and the next pull waits: two reads of the server, without sockets,
on the real store. Python calls and opcodes are exact; times are of this machine.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from bench.bare_server import BareServer
from qmq.format.build import RunContent, build_batch
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind, encode_frame, pack_numbers

_PRODUCER: Final = b"p" * 16
_WARM: Final = 200
_ROUNDS: Final = 7


class OneMessage:
    """A server with a producer and a consumer whose pull waits."""

    def __init__(self, directory: Path, *, flush: bool, prefix: str, body: bytes, step_us: int = 137) -> None:
        self.server = BareServer(directory)
        self._flush, self._body, self._step_us = flush, body, step_us
        self.producer, self.consumer = self.server.connect(), self.server.connect()
        self._number = self._request = 0
        meta = frames.pack_meta({"group": "g", "prefixes": [prefix], "consumer": "c", "nonce": b"n", "client": b"c"})
        self.consumer.write(encode_frame(FrameKind.SUBSCRIBE, 2, meta))
        self.server.settle()
        (answer,) = self.consumer.read()
        self._subscription = frames.unpack_meta(answer.meta)["subscription"]
        self.consumer.write(self._pull(3, 0))
        self.server.settle()

    def _pull(self, request: int, expected: int) -> bytes:
        payload = frames.PULL.pack(self._subscription, 1_000, 1, 1 << 20, 20_000, expected)
        return encode_frame(FrameKind.PULL, request, b"", len(payload)) + payload

    def frames(self) -> tuple[bytes, bytes]:
        """Return the next SEND, and the ACK with the PULL behind it."""
        number, self._request = self._number, self._request + 10
        self._number += 1
        parts = build_batch(
            [RunContent("orders.created", [self._body], None)], created_at_us=number, producer_id=_PRODUCER,
            producer_sequence=number,
        )  # fmt: skip
        batch = b"".join(parts)
        flags = frames.FLUSH if self._flush else 0
        send = encode_frame(FrameKind.SEND, self._request, b"", len(batch), flags) + batch
        packed, crc = pack_numbers([number, number + 1])
        payload = frames.ACK.pack(self._subscription, crc) + packed
        ack = encode_frame(FrameKind.ACK, self._request + 1, b"", len(payload), frames.MAY_WAIT) + payload
        return send, ack + self._pull(self._request + 2, number + 1)

    def do(self, send: bytes, ack_and_pull: bytes) -> None:
        """One message, from its SEND until the next pull waits."""
        self.server.advance(self._step_us)
        self.producer.write(send)
        self.server.settle()
        self.server.advance(self._step_us)
        self.consumer.write(ack_and_pull)
        self.server.settle()

    def check(self) -> None:
        """Forget the answers, which must be those of one message."""
        (sent,), (messages,) = self.producer.read(), self.consumer.read()
        assert sent.kind == FrameKind.SENT, sent
        assert messages.kind == FrameKind.MESSAGES, messages
        assert bytes(messages.payload).endswith(self._body)


def _is_counted(code: CodeType) -> bool:
    return "/bench/" not in code.co_filename


def count(stage: OneMessage) -> tuple[int, int, Counter[str]]:
    """Return the Python calls and opcodes of one message, and the opcodes by function. None fall into a timer."""
    opcodes, calls = Counter[str](), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal calls
        if not _is_counted(frame.f_code):
            return None
        if event == "call":
            calls += 1
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            opcodes[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1
        return trace

    found = []
    for _ in range(30):
        stage.server.loop.settle()
        made = stage.frames()
        opcodes.clear()
        calls = 0
        sys.settrace(trace)
        try:
            stage.do(*made)
        finally:
            sys.settrace(None)
        stage.check()
        found.append((sum(opcodes.values()), calls, opcodes.copy()))
    middle = sorted(found, key=lambda one: one[0])[len(found) // 2]  # some fall together with a check of timers
    return middle[1], middle[0], middle[2]


def measure(stage: OneMessage, messages: int) -> float:
    """Return the processor time of one message in microseconds, writes to the file system among it."""
    made = [stage.frames() for _ in range(messages)]
    start = time.process_time()
    for one in made:
        stage.do(*one)
    return (time.process_time() - start) / messages * 1e6


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="show the N functions with most opcodes")
    parser.add_argument("--profile", action="store_true", help="show cProfile's table, C functions among it")
    parser.add_argument("--only", default="", help="append or flush")
    arguments = parser.parse_args()
    print(f"{'rules for one message':34} {'calls':>6} {'opcodes':>8} {'us':>7}")
    for flush in (False, True):
        for prefix in ("orders.created", "orders."):
            mode = "flush" if flush else "append"
            if arguments.only not in (mode, ""):
                continue
            with tempfile.TemporaryDirectory() as directory:
                stage = OneMessage(Path(directory), flush=flush, prefix=prefix, body=b"x" * arguments.size)
                for _ in range(_WARM):
                    stage.do(*stage.frames())
                    stage.check()
                calls, opcodes, functions = count(stage)
                times = [measure(stage, arguments.messages) for _ in range(_ROUNDS)]
                print(f"{mode + ', group follows ' + prefix:34} {calls:6} {opcodes:8} {statistics.median(times):7.1f}")
                for name, used in functions.most_common(arguments.functions):
                    print(f"    {used:6} {name}")
                if arguments.profile:
                    profile = cProfile.Profile()
                    made = [stage.frames() for _ in range(arguments.messages)]
                    profile.enable()
                    for one in made:
                        stage.do(*one)
                    profile.disable()
                    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
