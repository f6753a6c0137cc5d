"""docs/OPERATIONS.md lists what there is: every setting with its default, every error with its code."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq import errors
from qmq.settings import SettingDescription, describe, show_bytes

PAGE = (Path(__file__).parent.parent / "docs" / "OPERATIONS.md").read_text("utf-8")
ROWS = {cells[1].strip(): cells for line in PAGE.splitlines() if line.startswith("|") and (cells := line.split("|"))}

for module in pkgutil.walk_packages(qmq.__path__, "qmq."):
    importlib.import_module(module.name)  # some have errors of their own


def all_errors(root: type[errors.QmqError] = errors.QmqError) -> Iterator[type[errors.QmqError]]:
    for error in root.__subclasses__():
        if error.__module__.startswith("qmq."):
            yield error
            yield from all_errors(error)


@pytest.mark.parametrize("setting", describe(), ids=lambda setting: setting.key)
def test_every_setting_stands_there_as_it_is(setting: SettingDescription) -> None:
    default, allowed, description = (cell.strip() for cell in ROWS[f"`{setting.key}`"][2:5])
    assert description == setting.description
    if isinstance(setting.default, int):
        assert default.replace(",", "") == (
            show_bytes(setting.default) if setting.unit == "bytes" else str(setting.default)
        )
        show = show_bytes if setting.unit == "bytes" else "{:,}".format
        assert setting.minimum is not None
        assert setting.maximum is not None
        assert allowed == f"{show(setting.minimum)} to {show(setting.maximum)}"


@pytest.mark.parametrize("error", sorted(all_errors(), key=lambda error: error.code), ids=lambda error: error.code)
def test_every_error_stands_there_with_cause_and_cure(error: type[errors.QmqError]) -> None:
    name, retry, cause, cure = (cell.strip() for cell in ROWS[f"`{error.code}`"][2:6])
    assert name == f"`{error.__name__}`"
    assert retry == ("yes" if error.retryable else "no")
    assert cause
    assert cure


def test_codes_are_unique() -> None:
    codes = [error.code for error in all_errors()]
    assert len(codes) == len(set(codes))
    assert "error" not in codes
