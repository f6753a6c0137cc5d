"""What every test shares: one hypothesis profile, and patience."""

from __future__ import annotations

import pytest
from hypothesis import settings

from qmq.net import pulling

# A loaded machine may be slow without a fault: time per example is no verdict here.
settings.register_profile("qmq", deadline=None, print_blob=True)
settings.load_profile("qmq")


@pytest.fixture(autouse=True)
def patient_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull of any timeout waits for the broker's answer: a loaded machine may be late with it without a fault."""
    monkeypatch.setattr(pulling, "GRACE", 30.0)
