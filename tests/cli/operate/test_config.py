"""qmq/cli/operate/config.py: a table for people, a settings file in a pipe, JSON lines."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq.cli.main import cli
from qmq.cli.operate import config as config_module
from qmq.settings import Settings, describe, load


def test_in_a_pipe_it_is_a_settings_file_with_every_default(tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["config"])
    assert shown.exit_code == 0
    written = tomllib.loads(shown.stdout)
    assert set(written) == {setting.key for setting in describe() if setting.default is not None}
    path = tmp_path / "qmq.toml"
    path.write_text(shown.stdout, "utf-8")
    assert load(path) == Settings()


def test_every_line_of_the_file_says_what_its_key_does() -> None:
    shown = CliRunner().invoke(cli, ["config"]).stdout
    for setting in describe():
        assert setting.description in shown
        assert setting.allowed in shown
        assert f"{setting.key} = " in shown


def test_json_is_one_object_a_line() -> None:
    shown = CliRunner().invoke(cli, ["config", "--json"])
    assert shown.exit_code == 0
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert rows == [setting._asdict() for setting in describe()]


def test_on_a_terminal_it_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    config_module._print_table(describe())
    shown = capsys.readouterr().out
    assert "256 MiB" in shown
    assert "127.0.0.1:20881" in shown
    assert "3,600,000" in shown
    assert all(setting.key in shown for setting in describe())
