"""The layer above the operating system's files, on a real disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scratch import factory_on_disk


@pytest.fixture(scope="session")
def tmp_path_factory(request: pytest.FixtureRequest) -> Iterator[pytest.TempPathFactory]:
    """A factory of directories on the disk."""
    with factory_on_disk(request.session) as factory:
        yield factory
