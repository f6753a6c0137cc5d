"""ops/Containerfile: the linter accepts it, and its command and healthcheck are those of QMQ."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from qmq.settings import load
from tests.broker_process import broker_process
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ops" / "Containerfile"
BIN = Path(sys.executable).parent
#: The instructions, each on one line.
LINES = [
    line
    for line in re.sub(r"\\\n", " ", FILE.read_text("utf-8")).splitlines()
    if line.strip() and not line.startswith("#")
]


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{name} ")]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV") for pair in shlex.split(line))


def test_the_linter_has_nothing_to_say() -> None:
    command = [BIN / "hadolint", "--no-color", FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_it_copies_is_there_and_is_sent_to_the_build() -> None:
    ignored = (ROOT / "ops" / "Containerfile.containerignore").read_text("utf-8").splitlines()
    copied = [words for line in instructions("COPY") if not (words := shlex.split(line))[0].startswith("--from")]
    names = {name for words in copied for name in words[:-1]}
    assert names == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_the_last_stage_is_not_of_root() -> None:
    last = LINES[max(number for number, line in enumerate(LINES) if line.startswith("FROM ")) :]
    users = [line.split()[1] for line in last if line.startswith("USER ")]
    assert len(instructions("FROM")) == 2
    assert users == ["10001:10001"]


def test_it_serves_with_its_settings_where_it_says() -> None:
    settings = load(None, environment=environment())
    port, _ = instructions("EXPOSE")[0].split()
    (volume,) = instructions("VOLUME")
    assert settings.listen == f"0.0.0.0:{port}"
    assert settings.data_dir.parent == Path(volume)
    assert settings.log_format == "json"
    command = [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(instructions(name)[-1])]
    assert command == ["qmq", "serve"]


def test_it_has_what_the_console_needs_and_runs_it_where_it_says() -> None:
    (extras,) = {extra for line in instructions("RUN") for extra in re.findall(r"'\.\[([\w,]+)\]'", line)}
    assert "console" in extras.split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    _, port = instructions("EXPOSE")[0].split()
    assert environment()["QMQ_CONSOLE_LISTEN"] == f"0.0.0.0:{port}"
    (program,) = json.loads(instructions("ENTRYPOINT")[-1])
    variables = {**os.environ, **environment(), "QMQ_TOKEN": ""}
    done = subprocess.run(
        [BIN / program, "console"], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"all who reach 0.0.0.0:{port}, and let them change it: it has no token" in done.stderr


def test_its_healthcheck_tells_whether_a_broker_is_there(tmp_path: Path) -> None:
    check = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    authority = Authority(tmp_path / "tls")
    server = authority.issue()
    tls = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    with broker_process(tmp_path / "data", **tls) as broker:
        assert ended(check, broker.path) == 0
    assert ended(check, broker.path) == 1


def ended(command: list[str], data_dir: Path) -> int:
    """The exit code of a command in the container of a broker that has this data directory."""
    variables = {**environment(), "QMQ_DATA_DIR": str(data_dir), "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False).returncode
