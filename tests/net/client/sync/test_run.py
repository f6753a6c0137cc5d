"""``SyncConsumer.run`` in threads, its end by ``stop`` and by signals, and the dispositions of batches."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("run") / "data") as started:
        yield started


@contextmanager
def consuming(
    broker: BrokerProcess, subject: str, *bodies: bytes, **options: Any
) -> Iterator[tuple[qmq.SyncClient, qmq.SyncConsumer]]:
    """Enter a consumer of a group named as its subject, in which these messages wait."""
    with qmq.connect_sync(broker.url) as client:
        client.send_many(subject, bodies)
        with client.subscribe(subject, group=subject, retry_delays=[0], **options) as consumer:
            yield client, consumer


def left(broker: BrokerProcess, group: str, count: int) -> dict[bytes, int]:
    """Return the *count* messages that the group still has, with the attempt of each."""
    found = dict[bytes, int]()
    with qmq.connect_sync(broker.url) as client, client.subscribe(group, group=group) as consumer:
        while len(found) < count:
            found |= {message.body: message.attempt for message in consumer.pull()}
        return found | {message.body: message.attempt for message in consumer.pull(timeout=0.05)}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_each_message_is_handled_once_and_failures_come_again(broker: BrokerProcess, concurrency: int) -> None:
    subject = f"threads.{concurrency}"
    bodies = [b"%d" % number for number in range(60)]
    seen, failed, threads = list[tuple[bytes, int]](), list[bytes](), set[str]()
    with consuming(broker, subject, *bodies) as (_, consumer):
        consumer.on_failed = lambda message, error: failed.append(message.body)

        def handle(message: qmq.SyncMessage) -> None:
            threads.add(threading.current_thread().name)
            seen.append((message.body, message.attempt))
            if len(seen) == len(bodies) + 6:
                consumer.stop()
            if message.body.endswith(b"7") and message.attempt == 1:
                raise ValueError("no such hotel")

        consumer.run(handle, concurrency=concurrency)
        assert consumer.stopped
        assert consumer.pull() == []
        assert list(consumer) == []
    fail_once = [body for body in bodies if body.endswith(b"7")]
    assert sorted(seen) == sorted([*((body, 1) for body in bodies), *((body, 2) for body in fail_once)])
    assert sorted(failed) == sorted(fail_once)
    assert threads <= {f"qmq-handler-{number}" for number in range(concurrency)}
    assert left(broker, subject, 0) == {}


def test_a_stop_waits_for_handlers_and_releases_the_rest(broker: BrokerProcess) -> None:
    bodies = [b"%d" % number for number in range(20)]
    with consuming(broker, "stops", *bodies) as (_, consumer):
        both, may_end, ended = threading.Barrier(3), threading.Event(), list[bytes]()

        def handle(message: qmq.SyncMessage) -> None:
            both.wait(TIMEOUT_S)
            may_end.wait(TIMEOUT_S)
            ended.append(message.body)

        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"concurrency": 2})
        running.start()
        both.wait(TIMEOUT_S)
        consumer.stop()
        assert running.is_alive()
        may_end.set()
        running.join(TIMEOUT_S)
    assert len(ended) == 2
    assert left(broker, "stops", 18) == {body: 1 for body in bodies if body not in ended}


def test_a_handler_that_does_not_end_does_not_keep_the_run(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()
    with consuming(broker, "stuck", b"1") as (_, consumer):

        def handle(message: qmq.SyncMessage) -> None:
            consumer.stop()
            may_end.wait(TIMEOUT_S)

        consumer.run(handle, drain="10ms")
    assert "goes on in its thread" in caplog.text
    assert left(broker, "stuck", 1) == {b"1": 1}
    may_end.set()


def test_a_stop_ends_what_waits_for_messages(broker: BrokerProcess) -> None:
    with consuming(broker, "waits") as (_, consumer):
        came = list[list[qmq.SyncMessage]]()
        waiting = [
            threading.Thread(target=lambda: came.append(consumer.pull())),
            threading.Thread(target=lambda: came.append(list(consumer))),
        ]
        for thread in waiting:
            thread.start()
        consumer.stop()
        for thread in waiting:
            thread.join(TIMEOUT_S)
    assert came == [[], []]


async def is_async(message: qmq.SyncMessage) -> None:
    """Handle nothing."""


@pytest.mark.parametrize("handle", [is_async, lambda: None, None])
def test_a_handler_that_cannot_be_one_ends_the_run(broker: BrokerProcess, handle: Any) -> None:
    with (
        consuming(broker, f"misuse.{id(handle)}", b"1") as (_, consumer),
        pytest.raises(qmq.UsageError, match="run needs"),
    ):
        consumer.run(handle)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"drain": "soon"}])
def test_wrong_options_are_refused(broker: BrokerProcess, wrong: Any) -> None:
    with consuming(broker, "options") as (_, consumer), pytest.raises(qmq.InvalidOption):
        consumer.run(print, **wrong)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_in_the_main_thread(broker: BrokerProcess, number: int) -> None:
    before = signal.getsignal(number)
    subject = f"signal.{number}"
    with consuming(broker, subject, b"1", b"2", b"3") as (_, consumer):
        ended = list[bytes]()

        def handle(message: qmq.SyncMessage) -> None:
            os.kill(os.getpid(), number)
            while not consumer.stopped:
                time.sleep(0.001)
            ended.append(message.body)

        consumer.run(handle)
        assert ended == [b"1"]
    assert left(broker, subject, 2) == {b"2": 1, b"3": 1}
    assert signal.getsignal(number) is before


# --- in a process of its own -----------------------------------------------------------------------------------------

WORKER = """
import asyncio, os, sys, time
import qmq

url, kind = sys.argv[1:]

def say(message, what):
    os.write(1, f"{what} {message.body.decode()} {message.attempt}\\n".encode())  # whole lines, from any thread

async def asynchronous():
    async def handle(message):
        say(message, "began")
        await asyncio.sleep(0.05)
        say(message, "ended")
    async with qmq.connect(url) as client, client.subscribe("term." + kind, group=kind) as consumer:
        await consumer.run(handle, concurrency=4)

def synchronous():
    def handle(message):
        say(message, "began")
        time.sleep(0.05)
        say(message, "ended")
    with qmq.connect_sync(url) as client, client.subscribe("term." + kind, group=kind) as consumer:
        consumer.run(handle, concurrency=4)

if kind == "async":
    asyncio.run(asynchronous())
else:
    synchronous()
print("returned", flush=True)
"""


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_workers_that_are_terminated_cut_no_handler_and_repeat_none(broker: BrokerProcess, kind: str) -> None:
    bodies = {str(number) for number in range(120)}
    began, ended, attempts = list[str](), list[str](), set[str]()
    with qmq.connect_sync(broker.url) as client:
        client.send_many(f"term.{kind}", [body.encode() for body in bodies])
    while len(ended) < len(bodies):
        command = [sys.executable, "-c", WORKER, broker.url, kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            returned, asked = False, False
            for line in worker.stdout:
                what, *about = line.split()
                if what == "returned":
                    returned = True
                    continue
                attempts.add(about[1])
                (began if what == "began" else ended).append(about[0])
                if not asked and (len(ended) % 40 == 39 or len(ended) == len(bodies)):
                    asked = True
                    worker.send_signal(signal.SIGTERM)
        assert (worker.returncode, returned) == (0, True)
        assert sorted(began) == sorted(ended), "no handler was cut"
    assert attempts == {"1"}
    assert sorted(began) == sorted(ended) == sorted(bodies), "each once"


# --- dispositions ----------------------------------------------------------------------------------------------------


def test_acks_and_releases_may_be_waited_for(broker: BrokerProcess) -> None:
    with consuming(broker, "confirmed", b"1", b"2", b"3", b"4") as (client, consumer):
        messages = consumer.pull_batch(4, 4)
        messages[0].ack(wait=True)
        messages[1].release(wait=True)
        assert consumer.pull(1, timeout=30)[0].body == b"2"
        messages[2:3].release(wait=True)
        messages[3:].ack(wait=True)
        (group,) = client.admin.groups("confirmed")
        assert group.in_flight == 1


def test_a_batch_has_dispositions(broker: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "qmq.client")
    with consuming(broker, "batch", *[b"%d" % number for number in range(10)], max_attempts=2) as (client, consumer):
        batch = consumer.pull_batch(10, 10)
        assert type(batch[2:4]) is qmq.SyncMessageBatch
        batch[np.array([number < 2 for number in range(10)])].ack()
        batch[2:4].reject("bad address")
        batch[4:6].nack("1h", "later")
        with pytest.raises(ValueError, match="no such hotel"), batch[:8]:
            raise ValueError("no such hotel")
        batch.release()
        consumer.flush()
        again = dict[bytes, int]()
        while len(again) < 4:
            again |= {message.body: message.attempt for message in consumer.pull()}
        assert again == {b"6": 2, b"7": 2, b"8": 1, b"9": 1}
        (group,) = client.admin.groups("batch")
        assert (group.ready, group.in_flight, group.in_retry, group.dead) == (0, 4, 2, 2)
    rejected, failed = (record for record in caplog.records if hasattr(record, "messages"))
    assert rejected.getMessage().endswith("were rejected, and are dead letters now: bad address")
    assert failed.getMessage().endswith("failed, they come again at once: ValueError: no such hotel")
    assert (rejected.exc_info, failed.exc_info is None) == (None, False)
