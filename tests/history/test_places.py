"""Places that users name."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import InvalidOption
from qmq.history.places import files_at


def test_paths_are_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files_at("archive").name == str(tmp_path / "archive")
    assert files_at(f"file://{tmp_path}/archive").name == str(tmp_path / "archive")


def test_others_are_refused() -> None:
    with pytest.raises(InvalidOption, match="gopher://a/b is no place that is known"):
        files_at("gopher://a/b")
