"""qmq/cli/common/connect.py: which broker a command talks to, and the loop it runs on."""

from __future__ import annotations

import asyncio
import inspect
import os
from pathlib import Path

import click
import pytest
import uvloop
from click.testing import CliRunner

from qmq.cli.common.connect import run, server_option
from qmq.cli.main import cli
from qmq.net.client.address import TLS_VARIABLES


@click.command
@server_option
def show(server: str) -> None:
    click.echo(server)


@click.command
@server_option
def show_tls(server: str) -> None:
    click.echo(" ".join(os.environ.get(name, "-") for name in TLS_VARIABLES))


@pytest.mark.parametrize(
    ("arguments", "variables", "shown"),
    [
        ([], {}, "- - -"),
        ([], {"QMQ_TLS_CA": "/env"}, "/env - -"),
        (["--tls-ca", "/own"], {"QMQ_TLS_CA": "/env"}, "/own - -"),
        (["--profile", "prod"], {"QMQ_TLS_CA": "/env"}, "/profile - -"),
        (["--profile", "prod", "--tls-ca", "/own"], {}, "/own - -"),
        (["--tls-cert", "/c", "--tls-key", "/k"], {}, "- /c /k"),
    ],
)
def test_files_of_tls_are_given_to_the_client_by_variables(
    arguments: list[str], variables: dict[str, str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "qmq.toml").write_text('[prod]\nserver = "qmqs://p"\ntls_ca = "/profile"\n')
    given = {name: variables.get(name) for name in TLS_VARIABLES}
    server = [] if "--profile" in arguments else ["--server", "qmqs://a"]
    assert CliRunner().invoke(show_tls, [*server, *arguments], env=given).output == f"{shown}\n"
    assert not any(name in os.environ for name in TLS_VARIABLES)


def test_files_of_tls_for_a_plain_address_are_refused() -> None:
    done = CliRunner().invoke(cli, ["ping", "--server", "qmq://a", "--tls-ca", "ca.pem"])
    assert done.exit_code == 2
    assert "--tls-ca is given, but qmq://a does not begin with qmqs://" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variable", "server"),
    [
        ([], None, "qmq://127.0.0.1:20881"),
        ([], "qmq://a", "qmq://a"),
        (["--server", "qmq://b"], "qmq://a", "qmq://b"),
        ([], "qmqs://a, b:1", "qmqs://a, b:1"),
        (["--server", "qmq://b,c", "--server", "qmqs://d"], "qmq://a", "qmq://b,c,qmqs://d"),
    ],
)
def test_the_option_wins_over_the_variable_over_the_default(
    arguments: list[str], variable: str | None, server: str
) -> None:
    shown = CliRunner().invoke(show, arguments, env={"QMQ_SERVER": variable})
    assert shown.output == f"{server}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "qmq://127.0.0.1:1", "--server", "127.0.0.1:2", "ping"],
        ["ping", "--server", "qmq://127.0.0.1:1", "--server", "127.0.0.1:2"],
        ["ping", "--server", "qmq://127.0.0.1:1,127.0.0.1:2"],
    ],
)
def test_a_command_asks_each_broker_that_is_named(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.output
    assert "127.0.0.1:2" in done.output


def test_commands_run_on_uvloop() -> None:
    async def which() -> type:
        return type(asyncio.get_running_loop())

    assert run(which()) is uvloop.Loop


def test_an_interrupt_before_it_runs_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_main: object) -> None:
        raise KeyboardInterrupt

    async def nothing() -> None:
        return None

    monkeypatch.setattr(uvloop, "run", interrupted)
    main = nothing()
    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert inspect.getcoroutinestate(main) == inspect.CORO_CLOSED
