"""qmq/cli/common/signals.py: Ctrl-C and SIGTERM end a command silently while it is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qmq.cli.common.signals import ending_at_once, noting_hangups

#: Sends itself the signal in the middle of an import: of click, as the command begins, or of a command's module.
LOADING = """
import os, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Interrupting())
from qmq.cli.main import cli
cli(["subjects", "--server", "qmq://127.0.0.1:1"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["click", "qmq.cli.manage.subjects"])
def test_a_signal_in_the_middle_of_an_import_leaves_no_traceback(name: str, number: signal.Signals) -> None:
    code = LOADING.format(name=name, number=int(number))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -number)


#: As the first process of a container.
FIRST_PROCESS = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else []), "--pid", "--fork", "--kill-child"]
#: As LOADING, from the installed command on.
STARTING = """
import os, sys
assert os.getpid() == 1
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(1, {number})
sys.meta_path.insert(0, Interrupting())
from qmq.cli.entry import main
sys.argv[1:] = ["serve", "--data-dir", {directory!r}, "--listen", "127.0.0.1:0"]
main()
"""


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("qmq.cli.main", signal.SIGTERM),
        ("click", signal.SIGTERM),
        ("qmq.cli.operate.serve", signal.SIGINT),
        ("qmq.cli.operate.serve", signal.SIGTERM),
        ("qmq.daemon.main", signal.SIGTERM),
    ],
)
def test_the_first_process_of_a_container_ends_while_it_starts(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    code = STARTING.format(name=name, number=int(number), directory=str(tmp_path / "data"))
    command = [*FIRST_PROCESS, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", 128 + number), done.stderr
    assert "Traceback" not in done.stderr


def test_handlers_are_put_back_and_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with ending_at_once():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])


def test_in_another_thread_it_changes_nothing() -> None:
    seen = []

    def load() -> None:
        with ending_at_once():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_hangup_is_noted_and_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with noting_hangups() as hung_up:
        assert not hung_up()
        signal.raise_signal(signal.SIGHUP)
        assert hung_up()
    assert signal.getsignal(signal.SIGHUP) == before


#: Runs a command as the installed program does, and sends itself SIGHUP while a module is imported.
HANGING_UP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run of the tests under nohup ignores it
class HangingUp:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, HangingUp())
from qmq.cli.entry import main
sys.argv[1:] = {arguments!r}
main()
"""


@pytest.mark.parametrize("name", ["click", "qmq.cli.operate.serve", "pydantic", "uvloop"])
def test_a_hangup_while_a_broker_is_loaded_waits_until_it_serves(name: str, tmp_path: Path) -> None:
    arguments = ["serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0"]
    code = HANGING_UP.format(name=name, arguments=arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as broker:
        assert broker.stdout is not None
        assert broker.stderr is not None
        assert broker.stdout.readline().startswith("ready on ")
        while "SIGHUP: there is nothing to reload" not in (line := broker.stderr.readline()):
            assert line, "it ended"
        broker.terminate()
        assert broker.wait(30) == 0


def test_a_hangup_while_another_command_is_loaded_ends_it() -> None:
    code = HANGING_UP.format(name="click", arguments=["ping", "--server", "qmq://127.0.0.1:1"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -signal.SIGHUP)
