"""qmq/cli/manage/ping.py: it reports whether a broker answers, to people and to programs."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.cli.manage import ping
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq, qmq_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("ping")) as broker:
        yield broker


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return an address on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{one.getsockname()[1]}"


def test_a_broker_that_is_there_says_its_version(broker: BrokerProcess) -> None:
    done = qmq("ping", server=broker.url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(r"127\.0\.0\.1:\d+: qmq 0\.\d+\.\d+, \d+\.\d\d ms\n", done.stdout)
    row = json.loads(qmq("ping", "--json", server=broker.url).stdout)
    assert row == {**row, "broker": broker.url.removeprefix("qmq://"), "reached": True}
    assert row["version"].startswith("0.")
    assert row["round_trip_ms"] > 0


def test_none_is_an_error_that_names_the_address(nobody: str) -> None:
    done = qmq("ping", server=nobody)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"qmq: {nobody}: Connection refused; is `qmq serve` running there?\n"


def test_each_of_several_is_asked(broker: BrokerProcess, nobody: str) -> None:
    done = qmq("ping", "--json", server=f"{nobody},{broker.url}")
    assert done.exit_code == 1
    assert [json.loads(line)["reached"] for line in done.stdout.splitlines()] == [False, True]
    assert nobody in done.stderr


def test_one_that_does_not_answer_is_not_there(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ping, "_TRY", 0.2)
    with broker_process(tmp_path) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        done = qmq("ping", server=f"{frozen.url},{broker.url}")
        frozen.send_signal(signal.SIGCONT)
    assert done.exit_code == 1
    assert f"{frozen.url.removeprefix('qmq://')} did not answer within 0.2 s" in done.stderr
    assert broker.url.removeprefix("qmq://") in done.stdout


def test_it_waits_for_one_that_starts(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        broker.kill()
        with qmq_process("ping", "--wait", "60", "--server", broker.url) as waiting:
            broker.start()
            out, err = waiting.communicate(timeout=60)
        assert (waiting.returncode, err) == (0, b"")
        assert out.startswith(f"{broker.url.removeprefix('qmq://')}: qmq ".encode())


def test_it_waits_no_longer_than_it_was_told(nobody: str) -> None:
    done = qmq("ping", "--wait", "0.3", server=nobody)
    assert done.exit_code == 1
    assert "Connection refused" in done.stderr


def test_what_is_no_broker_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = qmq("ping", "--wait", "60", server=f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
