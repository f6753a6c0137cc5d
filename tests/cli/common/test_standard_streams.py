"""qmq/cli/common/standard_streams.py: commands whose standard streams are closed, full or ASCII only, as processes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from qmq import connect_sync
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq
from tests.pages import free_ports

QMQ = f"{sys.executable} -c 'from qmq.cli.main import cli; cli()'"
FULL = "qmq: stdout cannot be written: No space left on device\n"
CLOSED = "qmq: stdout cannot be written: Bad file descriptor\n"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("streams")) as broker:
        done = qmq("produce", "a.b", stdin=b"x\n", server=broker.url)
        assert done.exit_code == 0, done.output
        yield broker


def shell(line: str, server: str = "qmq://127.0.0.1:1", **environment: str) -> tuple[int, str, str]:
    """Run a line in a shell; return its exit code, stdout and stderr."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", line.replace("qmq ", f"{QMQ} ")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**inherited, "QMQ_SERVER": server, **environment},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["config", "config --json", "--help", "subjects", "ping"])
def test_a_full_stdout_is_an_error(broker: BrokerProcess, command: str, unbuffered: str) -> None:
    assert shell(f"qmq {command} > /dev/full", broker.url, PYTHONUNBUFFERED=unbuffered) == (1, "", FULL)


def test_what_could_not_be_printed_is_not_acknowledged(broker: BrokerProcess) -> None:
    consume = "qmq consume a.b --group full --count 1 --timeout 10"
    assert shell(f"{consume} > /dev/full", broker.url) == (1, "", FULL)
    assert shell(consume, broker.url) == (0, "x\n", "")


def test_what_was_sent_is_stored_though_nobody_hears_of_it(broker: BrokerProcess) -> None:
    assert shell("echo x | qmq produce full.a > /dev/full", broker.url) == (1, "", FULL)
    row = json.loads(qmq("subjects", "full.", "--json", server=broker.url).stdout)
    assert row["messages"] == 1


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("qmq subjects a.b <&-", (0, "a.b\t1\t0\t1\t0\t0\t0\t0\n", "")),
        ("qmq subjects a.b 2>&-", (0, "a.b\t1\t0\t1\t0\t0\t0\t0\n", "")),
        ("qmq subjects a.b >&-", (1, "", CLOSED)),
        ("qmq subjects a.b <&- >&- 2>&-", (1, "", "")),
        ("qmq config >&- 2>&-", (1, "", "")),
        ("qmq subjects a..b 2>&-", (2, "", "")),
        ("qmq subjects a..b 2>/dev/full", (2, "", "")),
        ("qmq nonsense 2>/dev/full", (2, "", "")),
        ("qmq consume a.b --solo --start first --timeout 0 <&-", (0, "x\n", "")),
        ("qmq produce a.c <&-", (2, "0 acknowledged\n", "qmq: stdin cannot be read: Bad file descriptor\n")),
    ],
)
def test_closed_and_full_streams(broker: BrokerProcess, line: str, ends: tuple[int, str, str]) -> None:
    code, out, err = shell(line, broker.url)
    assert (code, out.replace(f"\t{broker.url.removeprefix('qmq://')}\n", "\n"), err) == ends


@pytest.mark.parametrize("stdout", [">&-", "> /dev/full"])
def test_a_broker_serves_though_nobody_hears_that_it_is_ready(stdout: str, tmp_path: object) -> None:
    serve = f"qmq serve --listen 127.0.0.1:0 --data-dir {tmp_path} {stdout} <&-"
    said = f"until grep -q 'could not print that it is ready' {tmp_path}.log; do sleep 0.1; done"
    line = f": >{tmp_path}.log; {serve} 2>{tmp_path}.log & {said}; kill $!; wait $!"
    code, out, err = shell(line)
    assert (code, out, err) == (0, "", "")


#: What an ASCII locale is when Python is told not to help itself.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_words_of_an_ascii_locale_are_utf_8(broker: BrokerProcess) -> None:
    done = shell("echo x | qmq produce u.a --tag \u00fc --key \u00e9 --property n=\u00df", broker.url, **ASCII)
    assert done == (0, "1 acknowledged\n", "")
    shown = qmq("consume", "u.a", "--group", "u", "--count", "1", "--json", server=broker.url)
    message = json.loads(shown.stdout)
    assert (message["tags"], message["key"], message["properties"]) == (["\u00fc"], "\u00e9", {"n": "\u00df"})
    code, out, err = shell("qmq groups set u tags=\u00fc", broker.url, **ASCII)
    assert (code, err) == (0, "")
    assert "\ntags=\u00fc\n" in out
    assert qmq("groups", "set", "u", "max_attempts=3", server=broker.url).stdout.count("\ntags=\u00fc\n") == 1


@pytest.mark.parametrize("command", ["groups set u tags=", "produce a --tag ", "produce a --key "])
def test_words_that_are_not_utf_8_are_refused(command: str) -> None:
    for environment in ({}, ASCII):
        code, out, err = shell(f"qmq {command}$'\\xff'", **environment)
        assert (code, out) == (2, "")
        assert err == "qmq: '\\udcff' is not UTF-8; give it in UTF-8\n"


def test_a_name_of_a_file_that_is_no_text_can_be_shown(tmp_path: object) -> None:
    code, out, err = shell(f"cd {tmp_path} && mkdir $'\\xff' && qmq verify $'\\xff'")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == "\\udcff: 0 files read, faults 2, notes 0"


@contextmanager
def nobody_reads() -> Iterator[int]:
    """A pipe that is full: a write to it waits for ever."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4_096)
    os.write(writer, b"x" * 4_096)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def started(full: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose stdout and stderr nobody reads; it is killed at the end."""
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=full, stderr=full) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_broker_and_a_console_serve_and_end_though_nobody_reads_what_they_log(tmp_path: Path) -> None:
    port, of_console = free_ports(2)
    url = f"qmq://127.0.0.1:{port}"
    serve = ("serve", "--data-dir", str(tmp_path), "--listen", f"127.0.0.1:{port}")
    console = ("console", "--listen", f"127.0.0.1:{of_console}", "--server", url)
    with nobody_reads() as full, started(full, *serve) as broker, started(full, *console) as pages:
        with connect_sync(url, wait=60) as client:
            with client.subscribe("a.", group="g"):
                pass
            for attempts in range(1, 9):  # each is a line of the audit
                client.admin.set_group("g", max_attempts=attempts)
            client.send("a.b", b"x")
        with closing(HTTPConnection("127.0.0.1", of_console, timeout=60)) as connection:
            until_it_listens(of_console)
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        for process in (pages, broker):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def until_it_listens(port: int) -> None:
    """Wait until something listens on a port of this machine."""
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 60).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_command_that_fails_ends_though_nobody_reads_why() -> None:
    with nobody_reads() as full, started(full, "serve", "--set", "partitions=0") as process:
        assert process.wait(30) == 2
