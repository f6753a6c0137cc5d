"""A process that pulls from a broker whose derived files have been cut short beneath it.

    python -m tests.broker.cut_files DIRECTORY SUFFIX PREFIX

A read behind the end of a mapped file ends a process (SIGBUS), as a bad sector does. It prints how many messages came.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.broker.harness import Driven

BATCHES, SUBJECTS = 300, 6


def main(directory: Path, suffix: str, prefix: str) -> None:
    """Store messages, read all once, cut every other file of sealed rows, and pull all."""
    driven = Driven(directory, segment_bytes=64 << 10, max_frame_bytes=32 << 10)
    for _ in range(BATCHES):
        driven.do(driven.send_command({f"a.{number}": [b"body" * 40] for number in range(SUBJECTS)}, flush=False))
    driven.checkpoint()
    driven.restart()
    for first in ("a.", "a.3"):
        pull(driven, driven.subscribe(first, group="before"))
    files = sorted(directory.glob(f"consumer-log/0/*.{suffix}"))
    sealed = [path for path in files if path.with_suffix(".order").exists()]
    assert len(sealed) >= 5
    good = {path: path.read_bytes() for path in sealed[::2]}
    for path in good:
        with path.open("r+b") as opened:
            opened.truncate(0)
    print(pull(driven, driven.subscribe(prefix, group="after")))
    repaired = sum(path.read_bytes() == content for path, content in good.items())
    assert repaired == len(good), (repaired, len(good))
    driven.close()


def pull(driven: Driven, subscription: int) -> int:
    """Return everything that is left for a subscription."""
    came = 0
    while runs := driven.pull(subscription):
        came += sum(run.count for run in runs)
    return came


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
