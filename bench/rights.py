"""Compare what the broker does for a message with and without tokens: ``python -m bench.rights``.

Messages go one by one the short way, and in batches the general way, through the real server and store without sockets.
Runs with and without tokens take turns; processor time is compared, as the machine may be busy.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Final

from bench.bare_server import BareConnection, BareServer
from qmq.broker.ports.rights import Rights
from qmq.format.build import RunContent, build_batch
from qmq.format.source import new_source
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind, encode_frame
from qmq.net.server.login.logins import Token

_PRODUCER: Final = b"p" * 16
_SECRET: Final = "a secret of the benchmark"
_RIGHTS: Final = Rights("bench", [f"other{number}." for number in range(8)] + ["orders."])


def sent_in(batches: int, messages: int, *, has_tokens: bool) -> float:
    """Return the processor seconds for so many batches of so many messages each."""
    with tempfile.TemporaryDirectory() as directory:
        server = BareServer(Path(directory))
        if has_tokens:
            digest = hashlib.sha256(_SECRET.encode()).digest()
            server.server.set_tokens({_RIGHTS.name: Token(_RIGHTS, (digest,))})
        connection = BareConnection(server.server)
        token = {"token": f"{_RIGHTS.name}:{_SECRET}"} if has_tokens else {}
        hello = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "bench", **token})
        connection.write(encode_frame(FrameKind.HELLO, 1, hello))
        server.settle()
        bodies, source = [b"x" * 100] * messages, new_source("bench", len(_RIGHTS.name))
        ready = []
        for number in range(batches):
            parts = build_batch(
                [RunContent("orders.created", bodies, None)], created_at_us=1, producer_id=_PRODUCER,
                producer_sequence=number * messages, source=source,
            )  # fmt: skip
            payload = b"".join(parts)
            ready.append(encode_frame(FrameKind.SEND, number + 2, b"", len(payload)) + payload)
        began = time.process_time()
        for frame in ready:
            connection.write(frame)
            server.settle()
        return time.process_time() - began


def main() -> None:
    """Print how fast the broker is with tokens, as a part of its speed without."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for name, batches, messages in (("one by one", 3_000, 1), ("batches of 500", 400, 500)):
        pairs = [
            (sent_in(batches, messages, has_tokens=False), sent_in(batches, messages, has_tokens=True))
            for _ in range(arguments.rounds)
        ]
        without, within = (min(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(first / second for first, second in pairs)
        each = 1e6 / (batches * messages)
        print(f"{name}: {without * each:.2f} us without, {within * each:.2f} us with tokens; speed x {ratio:.3f}")


if __name__ == "__main__":
    main()
