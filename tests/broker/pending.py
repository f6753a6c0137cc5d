"""The memory of a broker while many delayed messages wait: `python -m tests.broker.pending 10000000`.

Each message is due at a time of its own within a year. It prints RssAnon before the messages are sent, after that,
after a checkpoint, and after a start from that checkpoint; then how long the delivery of some takes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from qmq.broker.ports.commands import Send
from qmq.format.build import RunContent, build_batch, make_header
from tests.broker.harness import PRODUCER, Driven
from tests.fake_disk import FakeDisk

BATCH = 5_000
YEAR_S = 365 * 86_400


def anonymous_mib() -> float:
    """Return the RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1_024


def send(driven: Driven, chance: random.Random) -> None:
    """Return one batch."""
    headers = [make_header(deliver_at=chance.randrange(60, YEAR_S) * 1_000_000) for _ in range(BATCH)]
    parts = build_batch(
        [RunContent("a", [b"x"] * BATCH, headers)],
        created_at_us=1,
        producer_id=PRODUCER,
        producer_sequence=driven.produced,
    )
    driven.produced += BATCH
    driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), False))


def main(messages: int) -> None:
    """Send messages, wait, start the broker again, and deliver all."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        driven = Driven(Path(directory) / "data", disk=FakeDisk())
        before = anonymous_mib()
        begun = time.process_time()
        for _ in range(messages // BATCH):
            send(driven, chance)
            if driven.produced % 500_000 == 0:
                driven.checkpoint()
                print(f"{driven.produced} sent: {anonymous_mib() - before:.0f} MiB", flush=True)
        print(
            f"{driven.produced} wait: {anonymous_mib() - before:.0f} MiB more than {before:.0f} MiB of a broker without"
        )
        print(f"{(time.process_time() - begun) / driven.produced * 1e6:.1f} us of processor time each", flush=True)
        driven.restart()
        print(f"after a start: {anonymous_mib() - before:.0f} MiB", flush=True)
        waiting = sum(driven.broker.delayed().values())
        driven.advance(YEAR_S * 1_000 // 1_000)
        begun, ticks = time.process_time(), 0
        for _ in range(2_000):
            driven.advance(0)
            ticks += 1
        gone = waiting - sum(driven.broker.delayed().values())
        taken = time.process_time() - begun
        each_us = taken / max(gone, 1) * 1e6
        print(f"{gone} delivered in {ticks} turns, {each_us:.0f} us each: {anonymous_mib() - before:.0f} MiB")
        driven.store.close(clean=False)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
