"""Imports beside kill -9 of the import, of the broker and of the database: every row is stored once, in order.

`python -m tests.sql.importing.kills --kills 100` makes tables by priority in a MariaDB, and imports them while one of
the three is killed at random times; rows come in meanwhile. At the end each row that a group lacks is stored once, and
each group gets exactly its rows.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import qmq
from qmq.sql.importing.state import ImportStateFile
from tests.broker_process import BrokerProcess, broker_process
from tests.sql.importing.tables import commands_of, execute, fill_by_priority
from tests.sql.servers import MariaDB

_PROGRAM = (sys.executable, "-c", "from qmq.cli.main import cli; cli()")
_OFFSETS = {
    "billing": {"high": 15_000, "middle": 1_500, "low": 10},
    "mail": {"high": 15_000, "middle": 12_000, "low": 800},
    "late": {"high": 30, "middle": 20, "low": 5},
}
_ROWS = 20_000


def taken(url: str, group: str) -> list[str]:
    """Return which rows a group gets."""
    with qmq.connect_sync(url) as client, client.subscribe("shop.mail", group=group) as consumer:
        found = list[str]()
        while messages := consumer.pull(1_000, timeout=0.5):
            found += [message.properties["import-id"] for message in messages]
            for message in messages:
                message.ack()
        return found


def one_import(
    directory: Path, dice: random.Random, database: MariaDB, broker: BrokerProcess, kills: Counter[str]
) -> bool:
    """Run the import until it ends, with a kill at a random time; return whether it came to its end."""
    (options, _) = commands_of("import-priorities.md")
    command = [*_PROGRAM, "import", *options, "--server", broker.url]
    victim = dice.choice(["import", "import", "import", "broker", "database", "nobody"])
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            process.wait(dice.uniform(0.3, 1.0))
        except subprocess.TimeoutExpired:
            kills[victim] += victim != "nobody"
            if victim == "import":
                process.send_signal(signal.SIGKILL)
            elif victim == "broker":
                broker.kill()
                broker.start()
            elif victim == "database":
                database.kill()
                database.start()
        _, said = process.communicate(timeout=300)
        if process.returncode not in (0, 1, -signal.SIGKILL):
            raise AssertionError(said.decode())
        return process.returncode == 0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    dice, kills = random.Random(seed), Counter[str]()
    rounds = 0
    while sum(kills.values()) < given.kills:
        rounds += 1
        with tempfile.TemporaryDirectory(prefix="qmq-import-kills-") as name, MariaDB(synced=True) as server:
            directory, database = Path(name), server.database()
            os.environ["QMQ_DB"] = database.url
            fill_by_priority(database.url, _ROWS)
            values = ", ".join(
                f"('{group}', {row_id}, '{priority}')"
                for group, own in _OFFSETS.items()
                for priority, row_id in own.items()
            )
            execute(database.url, f"INSERT INTO offset_t VALUES {values}")
            with broker_process(directory / "data") as broker:
                began, last = time.monotonic(), _ROWS
                while not one_import(directory, dice, server, broker, kills):
                    if dice.random() < 0.5:
                        last += 1
                        execute(database.url, "INSERT INTO msg_high_t (body, timestamp) VALUES ('new', now())")
                one_import(directory, random.Random(0), server, broker, Counter())
                state = ImportStateFile(directory / "shop-mail.state").load()
                while state is None or state.chunk is not None or sum(state.passed.values()) < state.imported:
                    one_import(directory, dice, server, broker, kills)
                    state = ImportStateFile(directory / "shop-mail.state").load()
                ends = {"high": last, "middle": _ROWS, "low": _ROWS}
                with qmq.connect_sync(broker.url) as client:
                    ids = Counter(each.properties["import-id"] for each in client.find(limit=None, stop_after=None))
                rows = {f"{priority}:{number}" for priority, row_id in _OFFSETS["late"].items()
                        for number in range(row_id + 1, ends[priority] + 1)}  # fmt: skip
                assert set(ids) == rows, (len(ids), len(rows))
                assert set(ids.values()) == {1}
                for group, own in _OFFSETS.items():
                    lacks = {f"{each}:{number}" for each in own for number in range(own[each] + 1, ends[each] + 1)}
                    assert Counter(taken(broker.url, group)) == Counter(lacks), group
            took = time.monotonic() - began
            print(f"round {rounds}: {len(rows):,} rows, kills so far {dict(kills)}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
