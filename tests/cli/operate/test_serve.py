"""qmq/cli/operate/serve.py: one line when it serves, one line when it cannot, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest

from qmq.cli.operate.serve import shown_directory
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq, qmq_process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_serves_and_ends_clean(tmp_path: Path, number: signal.Signals) -> None:
    with qmq_process("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline().decode()
        assert re.fullmatch(rf"ready on qmq://127\.0\.0\.1:\d+, data in {tmp_path}/data\n", line), line
        url = line.split()[2].rstrip(",")
        assert qmq("produce", "a", stdin=b"x\n", server=url).stdout == "1 acknowledged\n"
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout.read() == b""
        log = process.stderr.read().decode()
    assert re.findall(r"(INFO|WARNING|ERROR) qmq\.broker: (\w+)", log) == [
        ("INFO", "made"),
        ("INFO", "ready"),
        ("INFO", "stopping"),
        ("INFO", "stopped"),
    ]


def test_a_restart_after_kill_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    try:
        url = broker.start()
        assert qmq("produce", "a", stdin=b"one\ntwo\n", server=url).exit_code == 0
        broker.kill()
        assert broker.start() == url
        shown = qmq("consume", "a", "--group", "g", "--count", "2", server=url)
        assert shown.stdout == "one\ntwo\n"
        assert broker.stop() == 0
        assert "after a stop that was not clean; 2 messages after the checkpoint were read again" in broker.log()
        broker.start()
        assert qmq("consume", "a", "--group", "g", "--timeout", "0", server=url).stdout == ""
        assert broker.logs("after a stop that was clean")
    finally:
        broker.close()


def test_a_directory_in_use(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        done = qmq("serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0")
        assert (done.exit_code, done.stdout) == (1, "")
        assert re.fullmatch(rf"qmq: {tmp_path} is in use by process {broker.pid} on .*\n", done.stderr)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = qmq("serve", "--data-dir", str(tmp_path / "data"), "--listen", listen)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"qmq: cannot listen on {listen}: Address already in use; ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("data_dir", ["/proc/qmq", "/dev/null", "/dev/null/data"])
def test_a_directory_that_cannot_be(data_dir: str) -> None:
    done = qmq("serve", "--data-dir", data_dir, "--listen", "127.0.0.1:0")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: ")
    assert data_dir.rpartition("/data")[0] in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        broker.stop()
    for name in ("store-a", "store-b"):
        (tmp_path / name).write_bytes(b"something else")
    done = qmq("serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "store-a" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "nonsense=1"], "'nonsense' (--set) is not a setting"),
        (["--set", "partitions=0"], "partitions = '0' (--set) is not allowed"),
        (["--set", "partitions"], "not key=value"),
        (["--listen", "nowhere"], "not allowed"),
        (["--data-dir", ""], "data_dir"),
        (["--config", "/no/such/file.toml"], "cannot be read"),
        (["--log-level", "loud"], "--log-level"),
        (["--set", "segment_bytes=1 MiB"], "segment_bytes"),
    ],
)
def test_settings_that_are_wrong_end_with_2(arguments: list[str], says: str) -> None:
    done = qmq("serve", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_settings_of_a_file_and_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "qmq.toml").write_text('partitions = 3\nlisten = "127.0.0.1:0"\n')
    arguments = ["--config", str(tmp_path / "qmq.toml"), "--set", "partitions=2", "--data-dir", str(tmp_path / "data")]
    with qmq_process("serve", *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready on ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert [path.name for path in sorted((tmp_path / "data").glob("log-*"))] == ["log-0", "log-1"]


class Serving:
    """`qmq serve` in a process of its own, whose log is read line by line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready on ")

    def hang_up(self, lines: int = 1) -> list[str]:
        """Send SIGHUP; return that many lines that it logs then, with their levels."""
        self.process.send_signal(signal.SIGHUP)
        return [self._line() for _ in range(lines)]

    def _line(self) -> str:
        assert self.process.stderr is not None
        while " SIGHUP: " not in (line := self.process.stderr.readline().decode()):
            assert line, "it ended"
        return re.sub(r"^\S+ (\w+) qmq.broker: ", r"\1 ", line.rstrip())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0


def test_a_hangup_takes_what_it_can_of_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "qmq.toml"
    listen = 'listen = "127.0.0.1:0"\n'
    path.write_text(f'{listen}log_level = "info"\nretention_max_ms = 5000\n')
    flags = ["--set", "scrub_round_ms=1000", "--data-dir", str(tmp_path / "data")]
    with qmq_process("serve", "--config", str(path), *flags) as process:
        serving = Serving(process)
        assert serving.hang_up() == ["INFO SIGHUP: nothing has changed that a running broker takes"]
        path.write_text(f'{listen}log_level = "error"\nretention_max_ms = 0\nscrub_round_ms = 7\n')
        assert serving.hang_up() == ["INFO SIGHUP: went on with log_level = error, retention_max_ms = 0"]
        path.write_text(f'{listen}log_level = "info"\npartitions = 2\nmax_groups = 5\n')
        assert serving.hang_up(lines=2) == [
            "INFO SIGHUP: went on with log_level = info",
            "WARNING SIGHUP: partitions, max_groups changed, which needs a restart",
        ]
        path.write_text(f'{listen}log_level = "loud"\nretention_max_ms = 7\n')
        (line,) = serving.hang_up()
        assert line.startswith("ERROR SIGHUP: the settings stay as they are: log_level = 'loud'")
        path.write_text("no toml")
        (line,) = serving.hang_up()
        assert re.search(r"ERROR SIGHUP: the settings stay as they are: .*qmq.toml is not TOML", line)
        path.unlink()
        (line,) = serving.hang_up()
        assert re.search(r"ERROR SIGHUP: the settings stay as they are: .*qmq.toml cannot be read", line)
        os.mkfifo(path)
        (line,) = serving.hang_up()
        assert re.search(r"ERROR SIGHUP: the settings stay as they are: .*it is no regular file", line)
        serving.stop()


def test_a_hangup_without_a_file_ends_nothing(tmp_path: Path) -> None:
    with qmq_process("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")) as process:
        serving = Serving(process)
        for _ in range(3):
            (line,) = serving.hang_up()
            assert line == "WARNING SIGHUP: there is nothing to reload, as this broker was started without --config"
        serving.stop()


def test_the_times_of_the_log_are_utc_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = datetime.now(UTC)
    with qmq_process("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")) as process:
        Serving(process).stop()
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
    assert len(lines) >= 4
    for line in lines:
        stamp = line.split()[0]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp), line
        assert before - timedelta(seconds=1) <= datetime.fromisoformat(stamp) <= datetime.now(UTC)


def log_of(*arguments: str) -> list[str]:
    """The lines that a broker logs from its start to its end."""
    with qmq_process("serve", *arguments) as process:
        Serving(process).stop()
        assert process.stderr is not None
        return process.stderr.read().decode().splitlines()


def test_one_line_at_the_start_says_version_and_settings_that_differ(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lines = log_of("--data-dir", str(data), "--listen", "127.0.0.1:0", "--set", "scrub_bytes_per_s=2097152")
    (line,) = (line for line in lines if " QMQ " in line)
    said, settings = line.split("; settings that differ from the defaults: ")
    version = re.escape(metadata.version("qmq"))
    place = rf"ready on qmq://127\.0\.0\.1:\d+, data in {data}"
    assert re.search(rf"INFO qmq.broker: {place}: QMQ {version} on Python 3\.\S+$", said)
    assert settings == f"data_dir = {data}, listen = 127.0.0.1:0, scrub_bytes_per_s = 2 MiB"
    assert not [line for line in lines if "WARNING" in line]


def test_a_log_of_json_has_one_object_a_line(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lines = log_of("--data-dir", str(data), "--listen", "127.0.0.1:0", "--log-format", "json")
    records = [json.loads(line) for line in lines]
    assert {"time", "level", "logger", "message"} == set.intersection(*(set(record) for record in records))
    assert all(record["time"].endswith("Z") for record in records)
    (start,) = (record for record in records if "version" in record)
    assert start["version"] == metadata.version("qmq")
    assert start["settings"] == {"data_dir": str(data), "listen": "127.0.0.1:0", "log_format": "json"}


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_a_broker_that_others_reach_warns(tmp_path: Path, listen: str) -> None:
    options = "--data-dir", str(tmp_path), "--listen", listen, "--set", "insecure=true"
    (line,) = (line for line in log_of(*options) if "WARNING" in line)
    assert f"anyone who reaches {listen} may read, send and delete everything" in line


class Manager:
    """A service manager: the socket that NOTIFY_SOCKET names."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(60)
        self._socket.bind(str(path))

    def hears(self) -> dict[str, str]:
        """The next notice."""
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    heard = Manager(tmp_path / "notify")
    yield heard
    heard.close()


def test_a_service_manager_hears_how_the_broker_stands(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qmq.toml").write_text("")
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    data = tmp_path / "data"
    flags = ["--config", str(tmp_path / "qmq.toml"), "--data-dir", str(data), "--listen", "127.0.0.1:0"]
    with qmq_process("serve", *flags) as process:
        assert manager.hears() == {"STATUS": f"opening {data}"}
        serving = Serving(process)
        ready = manager.hears()
        assert ready.keys() == {"READY", "STATUS"}
        assert re.fullmatch(r"serving on qmq://127\.0\.0\.1:\d+", ready["STATUS"])
        assert manager.hears() == {"WATCHDOG": "1"}
        began_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        serving.hang_up()
        reloading = manager.hears()
        assert reloading["RELOADING"] == "1"
        assert began_us <= int(reloading["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        assert manager.hears() == ready
        serving.stop()
        assert manager.hears() == {"STOPPING": "1"}


@pytest.mark.parametrize(
    ("path", "shown"),
    [("qmq-data", "./qmq-data"), ("a/b", "./a/b"), ("../a", "../a"), ("/a", "/a"), (".", ".")],
)
def test_directories_as_people_write_them(path: str, shown: str) -> None:
    assert shown_directory(Path(path)) == shown
