"""Compare what the broker does for a message with and without tokens: ``python -m bench.rights``.

Messages go one by one the short way, and in batches the general way, through the real server and store without sockets.
Runs with and without tokens take turns; processor time is compared, as the machine may be busy. The Python calls and
opcodes of one message are exact.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench.bare_server import BareConnection, BareServer
from qmq.broker.ports.rights import Rights
from qmq.format.build import RunContent, build_batch
from qmq.format.source import new_source
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind, encode_frame
from qmq.net.server.login.logins import Token

_PRODUCER: Final = b"p" * 16
_WARM: Final = 200
_COUNTED: Final = 31
_SECRET: Final = "a secret of the benchmark"
_RIGHTS: Final = Rights("bench", [f"other{number}." for number in range(8)] + ["orders."])


class Sender:
    """A server with one connection that sends, with or without a token."""

    def __init__(self, directory: Path, messages: int, *, has_tokens: bool) -> None:
        self._server = BareServer(directory)
        if has_tokens:
            digest = hashlib.sha256(_SECRET.encode()).digest()
            self._server.server.set_tokens({_RIGHTS.name: Token(_RIGHTS, (digest,))})
        self._connection = BareConnection(self._server.server)
        token = {"token": f"{_RIGHTS.name}:{_SECRET}"} if has_tokens else {}
        hello = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "bench", **token})
        self._connection.write(encode_frame(FrameKind.HELLO, 1, hello))
        self._server.settle()
        self._bodies = [b"x" * 100] * messages
        self._source = new_source("bench", len(_RIGHTS.name) if has_tokens else 0)
        self._made = 0

    def frame(self) -> bytes:
        """Return the next SEND."""
        parts = build_batch(
            [RunContent("orders.created", self._bodies, None)], created_at_us=1, producer_id=_PRODUCER,
            producer_sequence=self._made * len(self._bodies), source=self._source,
        )  # fmt: skip
        payload = b"".join(parts)
        self._made += 1
        return encode_frame(FrameKind.SEND, self._made + 1, b"", len(payload)) + payload

    def send(self, frame: bytes) -> None:
        """Let a frame arrive, and the broker do all that follows."""
        self._connection.write(frame)
        self._server.settle()


def sent_in(batches: int, messages: int, *, has_tokens: bool) -> float:
    """Return the processor seconds for so many batches of so many messages each."""
    with tempfile.TemporaryDirectory() as directory:
        sender = Sender(Path(directory), messages, has_tokens=has_tokens)
        ready = [sender.frame() for _ in range(batches)]
        began = time.process_time()
        for frame in ready:
            sender.send(frame)
        return time.process_time() - began


def pair(batches: int, messages: int, *, with_first: bool) -> tuple[float, float]:
    """Return the processor seconds without and with tokens; which of them runs first makes a difference, too."""
    seconds = {
        has_tokens: sent_in(batches, messages, has_tokens=has_tokens) for has_tokens in (with_first, not with_first)
    }
    return seconds[False], seconds[True]


def counted(*, has_tokens: bool) -> tuple[int, int]:
    """Return the Python calls and opcodes of one message that goes the short way."""
    with tempfile.TemporaryDirectory() as directory:
        sender = Sender(Path(directory), 1, has_tokens=has_tokens)
        for _ in range(_WARM):
            sender.send(sender.frame())
        found = [sum_of(partial(sender.send, sender.frame())) for _ in range(_COUNTED)]
    return sorted(found)[_COUNTED // 2]  # some fall together with a check of timers


def sum_of(call: Callable[[], None]) -> tuple[int, int]:
    """Return the Python calls and opcodes of a call, without those of the benchmark."""
    calls = opcodes = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal calls, opcodes
        if "/bench/" in frame.f_code.co_filename:
            return None
        if event == "call":
            calls += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            opcodes += 1
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return calls, opcodes


def main() -> None:
    """Print how fast the broker is with tokens, as a part of its speed without."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for has_tokens in (False, True):
        calls, opcodes = counted(has_tokens=has_tokens)
        print(f"one message {'with' if has_tokens else 'without'} tokens: {calls} calls, {opcodes} opcodes")
    for name, batches, messages in (("one by one", 6_000, 1), ("batches of 500", 400, 500)):
        pairs = [pair(batches, messages, with_first=bool(number % 2)) for number in range(arguments.rounds)]
        without, within = (min(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(first / second for first, second in pairs)
        each = 1e6 / (batches * messages)
        print(f"{name}: {without * each:.2f} us without, {within * each:.2f} us with tokens; speed x {ratio:.3f}")


if __name__ == "__main__":
    main()
