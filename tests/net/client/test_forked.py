"""Children of a fork that live on after their parent: they hold nothing of its clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qmq
from tests.broker_process import broker_process

SYNC = """
import os, sys, time, qmq
client = qmq.connect_sync(producer="p", name="parent")
client.send("a.b", b"1")
consumer = client.subscribe("a.", group="g").__enter__()
consumer.pull(1)
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    client.send("a.c", b"1")
    os._exit(0)
time.sleep(600)
"""
ASYNCIO = """
import asyncio, os, sys, qmq, RUNNER
async def main():
    client = await qmq.connect(producer="p", name="parent")
    await client.send("a.b", b"1")
    consumer = await client.subscribe("a.", group="g").__aenter__()
    await consumer.pull(1)
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    await asyncio.sleep(600)
RUNNER.run(main())
"""


@pytest.mark.parametrize(
    "program", [SYNC, ASYNCIO.replace("RUNNER", "asyncio"), ASYNCIO.replace("RUNNER", "uvloop")],
    ids=["sync", "asyncio", "uvloop"],
)  # fmt: skip
def test_a_producer_and_a_consumer_of_a_process_that_ended_are_free(tmp_path: Path, program: str) -> None:
    with broker_process(tmp_path / "data") as broker:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "QMQ_SERVER": broker.url},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        with qmq.connect_sync(broker.url) as other:
            process.kill()  # the parent alone
            process.wait(timeout=30)
            with qmq.connect_sync(broker.url, producer="p") as again:
                again.send("a.b", b"2")
            (info,) = other.admin.info()
            assert [one.name for one in info.connections].count("parent") == 0
        process.stdin.close()
        assert process.stdout.read() == ""  # the child has ended
        process.stdout.close()
