"""qmq/cli/main.py and errors.py: the list of commands, and how a command ends."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from qmq.cli.main import COMMANDS, Command, cli, python_name
from qmq.errors import ConnectionLost, InvalidName, InvalidOption, QmqError, StorageFull


def put_command(monkeypatch: pytest.MonkeyPatch, raises: BaseException) -> None:
    """Make `qmq falling` a command that raises."""

    @click.command
    def falling() -> None:
        raise raises

    module = types.ModuleType("qmq.cli.messages.falling")
    module.falling = falling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qmq.cli.messages.falling", module)
    monkeypatch.setitem(COMMANDS, "falling", Command("messages", "Fall."))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_says_in_the_list_what_its_own_help_says(name: str) -> None:
    command = getattr(
        importlib.import_module(f"qmq.cli.{COMMANDS[name].folder}.{python_name(name)}"), python_name(name)
    )
    assert isinstance(command, click.Command)
    assert command.name == name
    shown = CliRunner().invoke(cli, [name, "--help"])
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: cli {name}")
    assert command.get_short_help_str(limit=200) == COMMANDS[name].help


def test_commands_load_what_draws_and_what_connects_only_when_they_use_it() -> None:
    """A completion loads the module of its command, and must be quick."""
    names = ["manage.groups", "manage.subjects", "manage.consumers", "manage.dead_letters", "manage.ping",
             "manage.info", "manage.doctor", "messages.peek"]  # fmt: skip
    code = (
        f"import sys, importlib\nfor name in {names}: importlib.import_module('qmq.cli.' + name)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "qmq.cli.manage.groups" in loaded
    assert loaded & {"asyncio", "numpy", "pydantic", "rich", "uvloop"} == set()


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for inner, one in command.commands.items():
            yield from leaves(f"{name} {inner}", one)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_an_example(name: str) -> None:
    command = getattr(
        importlib.import_module(f"qmq.cli.{COMMANDS[name].folder}.{python_name(name)}"), python_name(name)
    )
    for path, _ in leaves(name, command):
        shown = CliRunner().invoke(cli, [*path.split(), "--help"]).output
        assert re.search(rf"^  Examples?:$\n    .*qmq {path.split()[0]}\b", shown, re.MULTILINE), path
        assert max(map(len, shown.splitlines())) <= 80, path


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (["grups"], "groups"),
        (["publish"], "produce"),
        (["dead"], "dead-letters"),
        (["groups", "shw"], "groups show"),
        (["dead-letters", "rederive", "g"], "dead-letters redrive"),
        (["groups", "show", "g", "--jsn"], None),
    ],
)
def test_a_mistyped_command_is_suggested(call: list[str], meant: str | None) -> None:
    done = CliRunner().invoke(cli, call, prog_name="qmq")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (f"did you mean `qmq {meant}`?" if meant else "Did you mean '--json'?") in done.stderr
    assert "did you mean" not in CliRunner().invoke(cli, ["zzzzzz"]).stderr.lower()


def test_help_lists_all_commands() -> None:
    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    assert all(f"  {name}" in shown.output for name in COMMANDS)
    assert CliRunner().invoke(cli, ["-h"]).output == shown.output


def test_version() -> None:
    shown = CliRunner().invoke(cli, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("qmq 0.")


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "--nonsense"], ["config", "extra"]])
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert "Try 'cli" in shown.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConnectionLost("no broker answers at 127.0.0.1:1;\n start one"), 1),
        (StorageFull("cannot write"), 1),
        (QmqError("it broke"), 1),
        (InvalidName("subject '..' is not a valid name"), 2),
        (InvalidOption("partitions = 0 is not allowed"), 2),
    ],
)
def test_an_error_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, error: QmqError, exit_code: int) -> None:
    put_command(monkeypatch, error)
    shown = CliRunner().invoke(cli, ["falling"])
    assert shown.exit_code == exit_code
    assert shown.stdout == ""
    assert shown.stderr == f"qmq: {' '.join(str(error).split())}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(monkeypatch, ZeroDivisionError())
    assert isinstance(CliRunner().invoke(cli, ["falling"]).exception, ZeroDivisionError)


def test_handlers_of_signals_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    put_command(monkeypatch, KeyboardInterrupt())
    assert CliRunner().invoke(cli, ["falling"]).exit_code == 130
    assert signal.getsignal(signal.SIGTERM) is before


WAITING = """
import asyncio, sys, types, click, uvloop
from qmq.cli.main import COMMANDS, Command, cli, python_name

async def wait():
    try:
        print("waiting", flush=True)
        await asyncio.sleep(3600)
    finally:
        print("closed", flush=True)

@click.command
def waiting():
    {run}

module = types.ModuleType("qmq.cli.messages.waiting")
module.waiting = waiting
sys.modules["qmq.cli.messages.waiting"] = module
COMMANDS["waiting"] = Command("messages", "Wait.")
cli(["waiting"])
"""


@pytest.mark.parametrize("run", ["asyncio.run(wait())", "uvloop.run(wait())"])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_close_what_is_open(run: str, number: signal.Signals, exit_code: int) -> None:
    command = [sys.executable, "-c", WAITING.replace("{run}", run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert (out, err.strip(), child.returncode) == ("closed\n", "", exit_code)
