"""The sync client in programs of gevent: it works beside greenlets, or says at once what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess, broker_process

#: Seconds that a program has: one whose client waits for a greenlet never ends.
TIMEOUT_S = 60

PROGRAM = """
import sys
from gevent import monkey

monkey.patch_all(thread=sys.argv[2] == "with threads")
import gevent

import qmq

turns = 0


def count():
    global turns
    while True:
        turns += 1
        gevent.sleep(0.01)


gevent.spawn(count)
pool = gevent.get_hub().threadpool


def call(function, *args, **options):
    return pool.apply(function, args, options) if sys.argv[2] == "in a pool" else function(*args, **options)


subject = sys.argv[2].replace(" ", "-")
with qmq.connect_sync(sys.argv[1]) as client:
    call(client.send, subject, b"1")
    with client.subscribe(subject, group=subject) as consumer:
        (message,) = call(consumer.pull, 1)
        message.ack()
        call(consumer.flush)
        before = turns
        call(consumer.pull, 1, timeout=0.5)
        print(message.body.decode(), turns - before > 10)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("gevent") / "data") as started:
        yield started


def run(url: str, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, url, how], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_where_threads_are_greenlets_it_says_what_to_do(broker: BrokerProcess) -> None:
    ended = run(broker.url, "with threads")
    assert ended.returncode == 1
    error = ended.stderr.strip().splitlines()[-1]
    assert error.startswith("qmq.errors.UsageError: gevent has replaced threads")
    assert "patch_all(thread=False)" in error


@pytest.mark.parametrize(("how", "others_run"), [("plainly", False), ("in a pool", True)])
def test_with_threads_it_works(broker: BrokerProcess, how: str, others_run: bool) -> None:
    ended = run(broker.url, how)
    assert (ended.returncode, ended.stdout) == (0, f"1 {others_run}\n"), ended.stderr
