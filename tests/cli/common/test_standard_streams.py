"""qmq/cli/common/standard_streams.py: commands whose standard streams are closed, full or ASCII only, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq

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
    assert out.endswith("tags=\u00fc\n")
    assert qmq("groups", "set", "u", "max_attempts=3", server=broker.url).stdout.endswith("tags=\u00fc\n")


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
