"""Measure `qmq sql`: counts and look-ups over many messages, in a data directory, an archive, and at a running broker.

`python -m bench.sql_query --messages 10000000` fills a broker with messages of 100 bytes, each with a key, of ten
subjects; archives them as segments and as Parquet; and runs each query at each place so many times (`--rounds`), every
time as a command of its own. It prints the median and the range, with what Python takes to start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import qmq
from tests.broker_process import broker_process

_BATCH: Final = 1_000
_SUBJECTS: Final = 10
_QMQ: Final = (sys.executable, "-c", "from qmq.cli.main import cli; cli()")
_QUERIES: Final = {
    "count by subject": "SELECT subject, count(*) FROM messages GROUP BY subject",
    "count of a prefix": "SELECT count(*) FROM messages WHERE subject LIKE 'shop.order.s1%'",
    "bytes of bodies by subject": "SELECT subject, sum(octet_length(body)) FROM messages GROUP BY subject",
    "keys, counted": "SELECT count(DISTINCT key) FROM messages",
    "one key": "SELECT * FROM messages WHERE key = 'order-4421'",
    "one id": "SELECT subject FROM messages WHERE message_id = '{id}'",
}


async def fill(url: str, messages: int) -> str:
    """Store the messages; return the id of one of them."""
    body, some = b"x" * 100, ""
    async with qmq.connect(url, durability="append") as client:
        for sent in range(0, messages, _BATCH * _SUBJECTS):
            calls = []
            for number in range(_SUBJECTS):
                first = sent + number * _BATCH
                keys = [f"order-{at}" for at in range(first, first + _BATCH)]
                calls.append(client.send_many(f"shop.order.s{number}", [body] * _BATCH, keys=keys))
            some = (await asyncio.gather(*calls))[0][0].id
        await client.admin.roll()
    return some


def measured(arguments: list[str], rounds: int) -> str:
    """Run a command so many times; return its seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run([*_QMQ, "sql", *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times):6.2f} s ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where the data goes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qmq-bench-sql-", dir=given.dir) as name:
        path = Path(name)
        with broker_process(path / "data") as broker:
            began = time.perf_counter()
            some = asyncio.run(fill(broker.url, given.messages))
            print(f"{given.messages:,} messages stored in {time.perf_counter() - began:.0f} s")
            for form in ("segments", "parquet"):
                to = str(path / form)
                command = [*_QMQ, "archive", str(path / "data"), "--to", to, "--as", form]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            places = {
                "data directory": ["--data", str(path / "data")],
                "archived segments": ["--archive", str(path / "segments")],
                "archived Parquet": ["--archive", str(path / "parquet")],
                "running broker": ["--server", broker.url],
            }
            print(f"a query without a table: {measured(['SELECT 1', *places['data directory']], given.rounds)}")
            for what, query in _QUERIES.items():
                for place, options in places.items():
                    took = measured([query.format(id=some), *options], given.rounds)
                    print(f"{what:27} {place:18} {took}", flush=True)
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
            print(f"the most memory of a command, with mapped files: {most:,} MiB; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
