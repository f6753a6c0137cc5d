"""Brokers that are killed, cut off and starved, on a real disk: there a send waits for a sync."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scratch import factory_on_disk


@pytest.fixture(scope="session")
def tmp_path_factory(request: pytest.FixtureRequest) -> Iterator[pytest.TempPathFactory]:
    """A factory of directories on the disk."""
    with factory_on_disk(request.session) as factory:
        yield factory
