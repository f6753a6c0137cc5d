"""``make soak MINUTES=60``: everything at half load for an hour, with kills, and whether anything was lost or grew.

Ends with 1 when a message was lost, came again though its acknowledgement was confirmed, or cannot be accounted for,
when a data directory is not sound, a fault did not strike once, or something did not stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.flatness import judge, table
from tests.soak.plots import draw
from tests.soak.running import FAULTS, Soak, Wanted


def main() -> int:
    """Run a soak and say what it showed."""
    parser = argparse.ArgumentParser(prog="make soak", description="Everything at half load, with kills: flat, whole?")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--brokers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--rate", type=float, default=0.0, help="messages a second; default: half of what is measured")
    parser.add_argument("--out", type=Path, help="a directory that is not there yet; default: a temporary one")
    given = parser.parse_args()
    path = given.out or Path(tempfile.mkdtemp(prefix="qmq-soak-")) / "soak"
    path.mkdir(parents=True)
    path = path.resolve()
    (path / "logs").mkdir()
    logging.basicConfig(filename=path / "logs" / "soak.log", format="%(asctime)s %(name)s %(message)s")
    # What clients keep on this machine is of this soak.
    os.environ["QMQ_STATE_DIR"] = str(path / "state")
    print(f"seed {given.seed}; samples, logs and data in {path}", flush=True)
    soak = Soak(path, Wanted(given.minutes * 60, given.brokers, given.seed, given.rate))
    account = asyncio.run(soak.run())
    judgements = [judge(series, soak.wanted.seconds) for series in soak.all_series()]
    grown = [one.name for one in judgements if not one.is_flat]
    struck = ", ".join(f"{soak.struck[fault]:,} times {fault}" for fault in FAULTS)
    more = ", ".join(f"{count:,} {what}" for what, count in sorted(soak.struck.items()) if what not in FAULTS)
    verdict = f"not flat: {', '.join(grown)}" if grown else "everything stayed flat"
    report = "\n\n".join(
        [
            table(judgements),
            f"faults: {struck}\nalso: {more}",
            str(account),
            "\n".join([*(f"FAULT {fault}" for fault in soak.faults), verdict]),
        ]
    )
    print(report)
    (path / "report.txt").write_text(report + "\n")
    if draw(path):
        print(f"drawn in {path / 'soak.png'}")
    if soak.faults or grown or not account.is_good:
        again = f"MINUTES={given.minutes:g} BROKERS={given.brokers} SEED={given.seed} RATE={soak.rate:.0f}"
        print(f"its files are in {path}; again: make soak {again}")
        return 1
    for kept in [*path.glob("broker-*"), path / "ledger"]:
        shutil.rmtree(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
