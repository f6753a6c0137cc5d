"""A disk that answers no sync any more, under a broker process: all that does not wait for it goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

import qmq
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess
from tests.faults.brokers import until
from tests.faults.ledger import Entry, Ledger, drain

#: Runs qmq on a disk whose syncs take as long as a file exists, those of threads and those that the system is told to
#: begin, if it is; how many wait is told by files beside it.
_STALLING = """
import os, pathlib, sys, time
from qmq.storage.disk.aio import AioSyncs
from qmq.storage.disk.disk import Disk
how, mark, sync, begin = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1)), os.fdatasync, AioSyncs.begin
def stall(fd):
    if mark.exists() and how == "thread":
        mark.with_suffix(f".{fd}").touch()
    while mark.exists():
        time.sleep(0.01)
    sync(fd)
def stall_begun(self, fd, number):
    if mark.exists():
        mark.with_suffix(f".{fd}").touch()
    else:
        begin(self, fd, number)
os.fdatasync, AioSyncs.begin = stall, stall_begun
if how == "thread":
    Disk.aside = lambda self: None
from qmq.cli.main import cli
cli()
"""


async def send(client: qmq.Client, ledger: Ledger, durability: qmq.Durability) -> Entry:
    entry = ledger.open("orders.created")
    receipt = await client.send(entry.subject, entry.body, durability=durability)
    ledger.acknowledged([entry], [receipt])
    return entry


@pytest.mark.parametrize("how", ["thread", "begun"])
async def test_a_broker_whose_disk_has_stalled_serves_and_stops(tmp_path: Path, how: str) -> None:
    mark = tmp_path / "stalled"

    def start(arguments: list[str], stderr: IO[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _STALLING, how, str(mark), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)

    broker = BrokerProcess(tmp_path / "data", start, checkpoint_ms=50)
    ledger = Ledger()
    try:
        url = await asyncio.to_thread(broker.start)
        async with qmq.connect(url, send_timeout=120) as client, qmq.connect(url) as other:
            for _ in range(2):
                await send(client, ledger, "flush")
            async with other.subscribe("orders.", group="g") as consumer:  # it waits for the disk to be made
                (message,) = await consumer.pull(max_count=1, timeout=60)
                assert ledger.entry_of(message).number == 0
                mark.touch()
                waiting = asyncio.create_task(send(client, ledger, "flush"))
                await until(lambda: bool(list(tmp_path.glob("stalled.*"))), "a sync has stalled")
                (message,) = await consumer.pull(max_count=1, timeout=60)
                assert ledger.entry_of(message).number == 1
            await send(other, ledger, "append")
            assert not waiting.done()
            assert await asyncio.to_thread(broker.stop) == 1
            assert "the disk did not answer within" in broker.log()
            mark.unlink()
            await asyncio.to_thread(broker.start)
            await waiting
        assert ledger.count("acknowledged") == 4
        ledger.check(await drain(url, "after"))
        assert broker.stop() == 0
    finally:
        mark.unlink(missing_ok=True)
        print(broker.log())
        broker.close()
    report = verify(tmp_path / "data", Disk())
    assert report.is_good, report.findings
