"""qmq/cli/common/connect.py: which broker a command talks to, and the loop it runs on."""

from __future__ import annotations

import asyncio
import inspect

import click
import pytest
import uvloop
from click.testing import CliRunner

from qmq.cli.common.connect import run, server_option


@click.command
@server_option
def show(server: str) -> None:
    click.echo(server)


@pytest.mark.parametrize(
    ("arguments", "variable", "server"),
    [
        ([], None, "qmq://127.0.0.1:20881"),
        ([], "qmq://a", "qmq://a"),
        (["--server", "qmq://b"], "qmq://a", "qmq://b"),
    ],
)
def test_the_option_wins_over_the_variable_over_the_default(
    arguments: list[str], variable: str | None, server: str
) -> None:
    shown = CliRunner().invoke(show, arguments, env={"QMQ_SERVER": variable})
    assert shown.output == f"{server}\n"


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
