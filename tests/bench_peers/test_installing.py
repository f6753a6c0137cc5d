"""A broker that cannot be installed is absent, with the reason; an installed one is not installed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.peers import installing
from bench.peers.installing import debian, go, maven, say, size_of
from bench.peers.peer import Absent


def test_a_command_that_is_not_there_or_fails_is_a_reason() -> None:
    assert say(["sh", "-c", "echo $WORD", "sh"], more={"WORD": "here"}) == "here\n"
    with pytest.raises(Absent, match="there is no no-such-program on this machine"):
        say(["no-such-program"])
    with pytest.raises(Absent, match=r"`sh -c .*` ended with 3: not to be had"):
        say(["sh", "-c", "echo not to be had >&2; exit 3"])


def test_a_package_that_root_would_have_to_install_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)
    with pytest.raises(Absent, match="there is no no-such-program; `sudo apt-get install some-package` would bring it"):
        debian("some-package", "no-such-program")
    assert debian("dash", "sh").name == "sh"


def test_artifacts_are_brought_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def bring(command: list[str], *, cwd: Path) -> str:
        asked.append((cwd / "pom.xml").read_text("utf-8"))
        (cwd / "lib").mkdir()
        (cwd / "lib" / "a.jar").write_bytes(bytes(1_000))
        return ""

    monkeypatch.setattr(installing, "say", bring)
    for _ in range(2):
        lib = maven(tmp_path, "thing", ["org.thing:thing-server:1.2.3"])
    assert size_of(lib) == 1_000
    assert len(asked) == 1
    assert "<artifactId>thing-server</artifactId><version>1.2.3</version>" in asked[0]
    maven(tmp_path, "thing", ["org.thing:thing-server:1.2.4"])
    assert len(asked) == 2


def test_a_module_is_built_once(tmp_path: Path) -> None:
    program = tmp_path / "go" / "thing"
    program.parent.mkdir()
    program.write_bytes(b"built")
    assert go(tmp_path, "example.org/thing@latest", "thing") == program
    assert size_of(program) == 5
