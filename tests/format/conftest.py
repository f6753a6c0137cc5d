"""Format tests run over both paths where there are two: `struct` for few messages and numpy for many."""

from __future__ import annotations

import pytest

from qmq.format import batch, build, run


@pytest.fixture(params=["few", "many"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make every count of messages take one path."""
    limit = 1 << 40 if request.param == "few" else 0
    for module in (batch, build, run):
        monkeypatch.setattr(module, "FEW", limit)
    return str(request.param)
