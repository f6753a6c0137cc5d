"""pyproject.toml, the locks and the environment say the same."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LOCK = "".join((ROOT / name).read_text("utf-8") for name in ("requirements.lock", "requirements-spark.lock"))
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK, re.MULTILINE))


def test_every_line_of_the_lock_is_a_pin() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert len(PINS) == len(lines) > 20
    assert "://" not in LOCK


def test_what_the_project_asks_for_is_pinned_within_its_bounds() -> None:
    pinned = {canonicalize_name(name): version for name, version in PINS.items()}
    optional = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    for requirement in map(Requirement, PROJECT["dependencies"] + optional):
        if requirement.name == PROJECT["name"] or str(requirement.specifier).startswith("=="):
            continue  # itself, and what is pinned where it is asked for
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_what_runs_here_is_what_is_pinned() -> None:
    assert {name: importlib.metadata.version(name) for name in PINS} == PINS


def test_what_the_pinned_packages_need_is_pinned_too() -> None:
    pinned = {canonicalize_name(name) for name in PINS}
    needed = {
        canonicalize_name(requirement.name)
        for name in PINS
        for requirement in map(Requirement, importlib.metadata.requires(name) or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert sorted(needed - pinned) == []


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="qmq")
    assert command.value == PROJECT["scripts"]["qmq"]
    assert (ROOT / "qmq" / "py.typed").exists()
