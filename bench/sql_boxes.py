"""What the outbox, the relay and the inbox cost beside a real PostgreSQL: python -m bench.sql_boxes

Rates come in turns, plain, with one INSERT more, and with the outbox, so that the machine's moods meet all of them.
The server syncs each commit. docs/benchmarks/sql.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

import qmq
from qmq import testing
from qmq.sql import Inbox, Outbox, create_tables
from tests.sql.servers import PostgreSQL

BODY = b"x" * 300


def main() -> None:
    """Measure all, or what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", default=["outbox", "inbox", "latency", "relay"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000, help="that a relay sends")
    chosen = parser.parse_args()
    with PostgreSQL(synced=True) as server, tempfile.TemporaryDirectory() as directory:
        engine = sa.create_engine(server.database().url, pool_size=20)
        create_tables(engine)
        with engine.begin() as tx:
            tx.execute(sa.text("CREATE TABLE orders (id BIGSERIAL PRIMARY KEY, body BYTEA)"))
            tx.execute(sa.text("CREATE TABLE others (LIKE qmq_outbox INCLUDING ALL)"))
            tx.execute(sa.text("CREATE TABLE seen (LIKE qmq_inbox INCLUDING ALL)"))
        if "outbox" in chosen.work:
            outbox_rates(engine, chosen.seconds, chosen.rounds)
        if "inbox" in chosen.work:
            inbox_rates(engine, chosen.seconds, chosen.rounds)
        url = str(engine.url.render_as_string(hide_password=False))
        if "latency" in chosen.work:
            with testing.broker(data_dir=Path(directory, "latency")) as broker:
                asyncio.run(latencies(engine, url, broker.url))
        if "relay" in chosen.work:
            with testing.broker(data_dir=Path(directory, "relay")) as broker:
                relay_rate(engine, url, broker.url, chosen.rows)
        engine.dispose()


ORDER = sa.text("INSERT INTO orders (body) VALUES (:body)")
OTHER = sa.text(
    "INSERT INTO others (uid, shard, state, subject, body, options, created_at_us) "
    "VALUES (:uid, :shard, 0, :subject, :body, :options, :created)"
)
SEEN = sa.text("INSERT INTO seen (group_name, message_id, expires_at_us) VALUES (:group, :id, :expires)")


def outbox_rates(engine: sa.Engine, seconds: float, rounds: int) -> None:
    """Compare transactions with one INSERT more with the same with ``outbox.send``."""
    outbox = Outbox()

    def plain(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})

    def one_more(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})
        tx.execute(OTHER, {"uid": f"{number:032}", "shard": number % 16, "subject": "shop.order.created", "body": BODY,
                           "options": f'{{"keys":["order-{number}"]}}', "created": number})  # fmt: skip

    def sending(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})
        outbox.send(tx, "shop.order.created", BODY, key=f"order-{number}")

    for writers in (1, 8):
        compare(f"outbox, {writers} writers", engine, [plain, one_more, sending], writers, seconds, rounds)
    clear(engine)


def inbox_rates(engine: sa.Engine, seconds: float, rounds: int) -> None:
    """Compare transactions with one INSERT more with the same with ``inbox.first_time``."""
    inbox = Inbox(group="billing")

    def plain(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})

    def one_more(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})
        tx.execute(SEEN, {"group": "billing", "id": f"{time.time_ns():032x}", "expires": number})

    def noting(tx: sa.Connection, number: int) -> None:
        tx.execute(ORDER, {"body": BODY})
        assert inbox.first_time(tx, f"{time.time_ns():032x}")

    for writers in (1, 8):
        compare(f"inbox, {writers} writers", engine, [plain, one_more, noting], writers, seconds, rounds)


def compare(
    name: str, engine: sa.Engine, works: list[Callable[[sa.Connection, int], None]], writers: int, seconds: float,
    rounds: int,
) -> None:  # fmt: skip
    """Print transactions a second of each work, and the medians of the ratios."""
    rates: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, known in zip(works, rates, strict=True):
            known.append(rate_of(engine, work, writers, seconds))
    ratios = [statistics.median(a / b for a, b in zip(rates[2], rates[1], strict=True))]
    medians = [statistics.median(known) for known in rates]
    print(
        f"{name}: plain {medians[0]:,.0f}, one INSERT more {medians[1]:,.0f}, with QMQ {medians[2]:,.0f} "
        f"transactions/s; QMQ is {ratios[0]:.2f} of one INSERT more",
        flush=True,
    )


def rate_of(engine: sa.Engine, work: Callable[[sa.Connection, int], None], writers: int, seconds: float) -> float:
    """Return transactions a second of so many threads."""
    counts = [0] * writers
    until = time.monotonic() + seconds

    def write(writer: int) -> None:
        number = writer
        while time.monotonic() < until:
            with engine.begin() as tx:
                work(tx, number)
            number += writers
            counts[writer] += 1

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - started)


async def latencies(engine: sa.Engine, url: str, broker: str, count: int = 200) -> None:
    """Print how long after a commit its message is delivered, sent by this process, and by a relay alone."""
    clear(engine)
    async with qmq.connect(broker) as client, client.subscribe("latency", group="latency") as consumer:

        async def measure(name: str, outbox: Outbox) -> None:
            times: list[float] = []
            for number in range(count):
                await asyncio.sleep(0.05 + 0.2 * (number % 7) / 7)
                with engine.begin() as tx:
                    outbox.send(tx, "latency", BODY, key=str(number))
                committed = time.perf_counter()
                for message in await consumer.pull(timeout=60):
                    times.append(time.perf_counter() - committed)
                    await message.ack()
            times.sort()
            print(f"commit to delivery, {name}: p50 {1e3 * times[len(times) // 2]:.1f} ms, "
                  f"p99 {1e3 * times[len(times) * 99 // 100]:.1f} ms", flush=True)  # fmt: skip

        async with Outbox(client) as outbox:
            await measure("in-process", outbox)
        command = [str(Path(sys.executable).parent / "qmq"), "outbox", "relay", "--db", url, "--server", broker]
        with subprocess.Popen(  # noqa: ASYNC220  # nothing else runs meanwhile
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as relay:
            assert relay.stdout is not None
            relay.stdout.readline()
            await measure("relay alone", Outbox())
            relay.terminate()


def relay_rate(engine: sa.Engine, url: str, broker: str, rows: int) -> None:
    """Print how many rows a second `qmq outbox relay` sends of a backlog."""
    clear(engine)
    with engine.begin() as tx:
        tx.execute(
            sa.text(
                "INSERT INTO qmq_outbox (uid, shard, state, subject, body, options, created_at_us) "
                "SELECT md5(n::text), n % 16, 0, 'shop.order.created', :body, "
                "'{\"keys\":[\"order-' || n || '\"]}', 0 FROM generate_series(1, :rows) n"
            ),
            {"body": BODY, "rows": rows},
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE qmq_outbox")
    command = [str(Path(sys.executable).parent / "qmq"), "outbox", "relay", "--db", url, "--server", broker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as relay:
        assert relay.stdout is not None
        relay.stdout.readline()
        started, left = time.monotonic(), rows
        while left:
            time.sleep(0.1)
            with engine.begin() as tx:
                left = tx.scalar(sa.text("SELECT count(*) FROM qmq_outbox WHERE state = 0")) or 0
        took = time.monotonic() - started
        relay.terminate()
    print(f"relay: {rows:,} rows of {len(BODY)} bytes in {took:.1f} s, {rows / took:,.0f} rows/s", flush=True)


def clear(engine: sa.Engine) -> None:
    """Delete all rows of the outbox."""
    with engine.begin() as tx:
        tx.exec_driver_sql("TRUNCATE qmq_outbox")


if __name__ == "__main__":
    main()
