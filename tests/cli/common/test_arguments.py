"""qmq/cli/common/arguments.py, and each option and argument of each command: a wrong value ends in one line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import qmq
from qmq.cli.common.arguments import Seconds, number_of, text_of, whole_number_of
from qmq.cli.main import COMMANDS, python_name
from qmq.errors import InvalidOption
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run

WRONG_NUMBERS = ["nan", "inf", "-inf", "1e400", "-1e400", "", " ", "\u0663", "1_0", "0x10", "9" * 5_000, "one"]
TIMES = ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59", "10000-01-01T00:00:00Z", "0001-01-01"]
ANYTHING = [
    *WRONG_NUMBERS, *TIMES, "-0", "1e305", "-1e305", "1e-7", "\x1b[31m\n\x07", "\udcff", "\udcc3\udcbc", "\u00fc",
    "../x", "=", "=,", "tags=\udcff", "max_attempts=" + "9" * 50, "max_attempts=\u0663", "expire_after=1e305",
    "expire_after=nan", "retry_delays=,", "partitions=" + "9" * 5_000, "0" * 32, "~", "a" * 300,
]  # fmt: skip

#: A call of each command that is right but for what the test puts into it, or that ends before it does anything.
CALLS: dict[str, list[str]] = {
    "serve": ["--listen", "999"],
    "config": [],
    "ping": [],
    "info": [],
    "doctor": [],
    "produce": ["a"],
    "consume": ["a", "--solo", "--timeout", "0", "--count", "1"],
    "cancel": ["0" * 32],
    "peek": ["a"],
    "find": ["a"],
    "trace": ["0" * 32],
    "resend": ["a", "--group", "g", "--yes"],
    "subjects list": ["a"],
    "subjects show": ["a"],
    "groups list": [],
    "groups show": ["g"],
    "groups set": ["g", "max_attempts=3"],
    "groups seek": ["g", "--to", "first", "--yes"],
    "groups delete": ["nobody", "--yes"],
    "consumers": ["g"],
    "dead-letters list": ["g"],
    "dead-letters show": ["g", "0" * 32],
    "dead-letters redrive": ["g", "0" * 32],
    "dead-letters delete": ["g", "0" * 32],
    "tokens create": ["a", "--browse", "a."],
    "tokens list": [],
    "tokens revoke": ["nobody"],
    "tokens rotate": ["nobody"],
    "verify": ["."],
    "repair": ["."],
    "archive": [".", "--to", "archive"],
    "stats": [],
    "top": ["--once"],
    "console": ["--listen", "999"],
    "restore": ["--from", "archive", "--yes"],
    "bench": ["--only", "nothing"],
    "completion": ["bash"],
    "sql query": ["SELECT 1"],
    "sql ddl": ["--dialect", "sqlite"],
    "outbox relay": ["--db", "sqlite://"],
    "outbox status": ["--db", "sqlite://"],
    "outbox retry": ["--db", "sqlite://", "--all"],
    "import": ["--db", "sqlite://", "--query", "SELECT 1 AS id, 2 AS body", "--subject", "a", "--name", "n"],
}


def command_of(name: str) -> click.Command:
    first, _, second = name.partition(" ")
    module = python_name(first)
    command: click.Command = getattr(importlib.import_module(f"qmq.cli.{COMMANDS[first].folder}.{module}"), module)
    if second:
        assert isinstance(command, click.Group)
        command = command.commands[second]
    return command


def variants() -> Iterator[tuple[str, str]]:
    """Return every command with the name of each of its parameters that takes a value."""
    for name in CALLS:
        for parameter in command_of(name).params:
            if not getattr(parameter, "is_flag", False) and parameter.name not in ("server", "help"):
                assert parameter.name is not None
                yield name, parameter.name


def call_with(name: str, parameter_name: str, value: str) -> list[str]:
    """Return the call of a command with that value for that parameter."""
    command = command_of(name)
    given = list(CALLS[name])
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    (parameter,) = (one for one in command.params if one.name == parameter_name)
    if isinstance(parameter, click.Argument):
        place = arguments.index(parameter)
        given[place : place + 1] = [value]
        return [*name.split(), *given]
    option = parameter.opts[0]
    if option in given:
        place = given.index(option)
        del given[place : place + 2]
    return [*name.split(), *given, f"{option}={value}"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Start a broker with a group g."""
    with broker_process(tmp_path_factory.mktemp("arguments")) as broker:
        with qmq.connect_sync(broker.url) as client, client.subscribe("a", group="g"):
            client.send("a", b"x")
        yield broker


def test_every_command_is_called() -> None:
    leaves = set[str]()
    for name in COMMANDS:
        command = command_of(name)
        leaves |= {f"{name} {one}" for one in command.commands} if isinstance(command, click.Group) else {name}
    assert leaves == set(CALLS)


@pytest.mark.parametrize(("name", "parameter"), list(variants()))
def test_whatever_it_is_given_a_command_ends_with_a_line(
    broker: BrokerProcess, name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ANYTHING:
        done = run(*call_with(name, parameter, value), stdin=b"x\n", server=broker.url)
        said = f"{value!r:.60}: {done.exit_code} {done.stderr!r}"
        assert done.exception is None or isinstance(done.exception, SystemExit), said
        assert done.exit_code in (0, 1, 2), said
        if done.exit_code == 2:
            last = done.stderr.splitlines()[-1]
            assert last.startswith(("qmq: ", "Error: ")), said
        elif done.exit_code == 1:
            assert done.stderr or done.stdout, said
        assert "\x1b" not in done.stderr, said


@pytest.mark.parametrize("text", WRONG_NUMBERS)
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"^|"):
        number_of(text)
    with pytest.raises(click.BadParameter):
        Seconds().convert(text, None, None)
    if text != "9" * 5_000:
        with pytest.raises(ValueError, match=r"^|"):
            whole_number_of(text)


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("-0", 0.0), ("1.5", 1.5), (".5", 0.5), ("+2e3", 2_000.0)])
def test_numbers(text: str, value: float) -> None:
    assert number_of(text) == value


def test_seconds_have_bounds() -> None:
    assert Seconds().convert("0", None, None) == 0.0
    assert [Seconds(signed=True).convert(text, None, None) for text in ("-1", "1e10")] == [-1.0, 1e10]
    for wrong, kind in (("-1", Seconds()), ("0", Seconds(above_0=True)), ("1e9", Seconds())):
        with pytest.raises(click.BadParameter):
            kind.convert(wrong, None, None)


def test_a_text_is_utf_8_whatever_the_locale_made_of_it() -> None:
    assert text_of("\u00fc") == "\u00fc"
    assert text_of("\udcc3\udcbc") == "\u00fc"
    with pytest.raises(InvalidOption, match="UTF-8"):
        text_of("\udcff")
