"""Programs that end without closing their client: what they have queued is sent, or they say what was not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import qmq
from tests.broker_process import BrokerProcess, broker_process

IMPORTS = """
import asyncio, atexit, gc, multiprocessing, os, signal, sys, threading, time, uvloop, qmq
from concurrent.futures import ThreadPoolExecutor
"""
#: Forks for each program, as imports take longer than all else; each ends as Python does.
FORKS = """
import json, qmq.net.client.sync.client
programs, directory = json.loads(sys.argv[1]), sys.argv[2]
pids = {}
for subject, program in programs.items():
    pids[subject] = os.fork()
    if not pids[subject]:
        break
else:
    print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}))
    os._exit(0)
os.dup2(os.open(f"{directory}/{subject}", os.O_WRONLY | os.O_CREAT), 2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def send(client):
    for _ in range(1000):
        client.send_nowait(subject, b"1")
exec(program)
"""
#: Programs by the name of the subject to which each sends 1,000 messages.
PROGRAMS = {
    "end": "client = qmq.connect_sync(linger=20); send(client)",
    "exit": "client = qmq.connect_sync(); send(client); sys.exit(1)",
    "exception": "client = qmq.connect_sync(); send(client); 1 / 0",
    "dropped": "client = qmq.connect_sync(); send(client); del client; gc.collect()",
    "pool": """
client = qmq.connect_sync()
pool = ThreadPoolExecutor(4)
for _ in range(1000):
    pool.submit(client.send_nowait, subject, b"1")
""",
    "thread": """
client = qmq.connect_sync()
threading.Thread(target=lambda: (time.sleep(0.3), send(client))).start()
""",
    "atexit": "client = qmq.connect_sync(); atexit.register(send, client)",
    "process": """
def work():
    global client
    client = qmq.connect_sync()
    send(client)
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
""",
    "returned": """
async def main():
    client = await qmq.connect()
    send(client)
asyncio.run(main())
""",
    "kept": """
async def main():
    global client
    client = await qmq.connect()
    await asyncio.create_task(asyncio.sleep(0))
    send(client)
asyncio.run(main())
""",
    "raised": """
async def main():
    global client
    client = await qmq.connect()
    send(client)
    raise KeyboardInterrupt
asyncio.run(main())
""",
    "task": """
async def worker(client):
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        send(client)
async def main():
    client = await qmq.connect()
    global task
    task = asyncio.create_task(worker(client))
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "uvloop": """
import uvloop
async def main():
    global client
    client = await qmq.connect()
    send(client)
uvloop.run(main())
""",
    "elsewhere": """
async def main():
    global client
    client = await qmq.connect()
    send(client)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(main(), loop).result()
""",
}


def test_what_is_queued_at_the_end_of_a_program_is_sent(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker:
        codes, said = ended(PROGRAMS, tmp_path, broker)
        with qmq.connect_sync(broker.url) as client:
            stored = {subject.name: subject.messages for subject in client.subjects()}
    assert stored == dict.fromkeys(PROGRAMS, 1_000), said
    assert codes == {**dict.fromkeys(PROGRAMS, 0), "exit": 1, "exception": 1, "raised": -signal.SIGINT}
    quiet = PROGRAMS.keys() - {"exception", "raised"}
    assert {name: said[name] for name in quiet} == dict.fromkeys(quiet, "")


STOP = "os.kill(BROKER, signal.SIGSTOP)"
UNHEARD = {
    "end": f"client = qmq.connect_sync(); client.flush(); {STOP}; send(client)",
    "kept": f"""
async def main():
    global client
    client = await qmq.connect()
    {STOP}
    send(client)
asyncio.run(main())
""",
    "closed": f"""
async def main():
    global client
    client = await qmq.connect()
    {STOP}
    send(client)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
""",
}


def test_what_cannot_be_sent_is_counted_on_stderr(tmp_path: Path) -> None:
    brokers = {name: BrokerProcess(tmp_path / f"{name}.data") for name in UNHEARD}
    programs = {}
    try:
        for name, program in UNHEARD.items():
            brokers[name].start()
            programs[name] = f"os.environ['QMQ_SERVER'] = {brokers[name].url!r}\n" + program.replace(
                "BROKER", str(brokers[name].pid)
            )
        begun = time.monotonic()
        codes, said = ended(programs, tmp_path, brokers["end"])
        assert time.monotonic() - begun < 15
    finally:
        for broker in brokers.values():
            os.kill(broker.pid, signal.SIGCONT)
            broker.close()
    assert codes == dict.fromkeys(UNHEARD, 0), said
    for text in said.values():
        assert sum(map(int, re.findall(r"(\d+) messages of send_nowait (?:were|may) not", text))) == 1_000, text
        assert "without closing it" in text


def ended(programs: dict[str, str], directory: Path, broker: BrokerProcess) -> tuple[dict[str, int], dict[str, str]]:
    """Run programs at the same time; return what each exits with, and what it says on stderr."""
    command = [sys.executable, "-c", IMPORTS + FORKS, json.dumps(programs), str(directory)]
    environ = {**os.environ, "QMQ_SERVER": broker.url}
    run = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return json.loads(run.stdout), {name: (directory / name).read_text() for name in programs}
