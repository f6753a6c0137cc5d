"""qmq/cli/common/profiles.py: brokers by name, and which of several places says the broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq.cli.common.profiles import config_file
from qmq.cli.main import cli

#: Addresses on which nobody listens, by which the error names the one that was taken.
PROFILES = """
[default]
server = "qmq://127.0.0.1:11"
[prod]
server = "qmq://127.0.0.1:12"
timeout = "300ms"
[empty]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of settings with profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "qmq.toml").write_text(PROFILES)
    return tmp_path


def port_of(*arguments: str, **environment: str) -> str:
    """Return the last digits of the port that a command tries."""
    done = CliRunner().invoke(cli, list(arguments), env={"QMQ_SERVER": None, "QMQ_PROFILE": None, **environment})
    assert done.exit_code == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line.split("127.0.0.1:")[1].split(":")[0]


def test_the_file_is_where_settings_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert config_file() == tmp_path / ".config" / "qmq.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_file() == tmp_path / ".config" / "qmq.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert config_file() == Path("/etc/xdg/qmq.toml")


@pytest.mark.parametrize(
    ("arguments", "environment", "port"),
    [
        (["ping"], {}, "11"),
        (["ping"], {"QMQ_SERVER": "127.0.0.1:13"}, "13"),
        (["ping"], {"QMQ_PROFILE": "prod"}, "12"),
        (["ping"], {"QMQ_PROFILE": "prod", "QMQ_SERVER": "127.0.0.1:13"}, "13"),
        (["ping", "--profile", "prod"], {"QMQ_SERVER": "127.0.0.1:13", "QMQ_PROFILE": "default"}, "12"),
        (["--profile", "prod", "ping"], {"QMQ_SERVER": "127.0.0.1:13", "QMQ_PROFILE": "default"}, "12"),
        (["--profile", "prod", "ping", "--profile", "default"], {}, "11"),
        (["--profile", "prod", "ping", "--server", "127.0.0.1:14"], {}, "14"),
        (["--server", "127.0.0.1:14", "ping", "--profile", "prod"], {"QMQ_SERVER": "127.0.0.1:13"}, "14"),
        (["--server", "127.0.0.1:14", "ping", "--server", "127.0.0.1:15"], {}, "15"),
        (["ping", "--profile", "empty"], {"QMQ_SERVER": "127.0.0.1:13"}, "13"),
    ],
)
def test_the_nearest_place_says_the_broker(
    home: Path, arguments: list[str], environment: dict[str, str], port: str
) -> None:
    assert port_of(*arguments, **environment) == port


def test_a_profile_says_how_long_to_wait(home: Path) -> None:
    done = CliRunner().invoke(cli, ["--profile", "prod", "groups", "list"], env={"QMQ_SERVER": None})
    assert done.exit_code == 1
    assert "127.0.0.1:12" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[prod", "is not TOML"),
        ('server = "qmq://a"', "belongs to no profile; write [default] above it"),
        ('[prod]\nsevrer = "qmq://a"', "did you mean server?"),
        ('[prod]\ncolour = "red"', "a profile has server, timeout, token, token_file, tls_ca, tls_cert, tls_key"),
        ("[prod]\nserver = 3", "is not a text"),
        ('[prod]\nserver = "http://a"', "is not the address of a broker"),
        ('[prod]\ntimeout = "soon"', "--timeout"),
        ('[prd]\nserver = "qmq://a"', "there is no profile 'prod'"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(home: Path, text: str, says: str) -> None:
    (home / "qmq.toml").write_text(text)
    for arguments in (["groups", "list", "--profile", "prod"], ["--profile", "prod", "groups"]):
        done = CliRunner().invoke(cli, arguments, env={"QMQ_SERVER": None})
        assert (done.exit_code, done.stdout) == (2, "")
        assert says in done.stderr


def test_a_broken_file_does_not_keep_a_broker_from_starting(home: Path) -> None:
    (home / "qmq.toml").write_text("[prod")
    assert CliRunner().invoke(cli, ["config"]).exit_code == 0
    assert CliRunner().invoke(cli, ["serve", "--help"]).exit_code == 0
    (home / "qmq.toml").unlink()
    assert port_of("ping", QMQ_SERVER="127.0.0.1:13") == "13"
