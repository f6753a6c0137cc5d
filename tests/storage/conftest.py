"""One history for all who spoil its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.histories import History, quick_directory


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    """A directory on a disk that takes no time."""
    with quick_directory() as path:
        yield path


@pytest.fixture(scope="module")
def history(quick: Path) -> History:
    """The life of a store, moment by moment."""
    return History(quick / "history")
