"""What every test shares: one hypothesis profile."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may be slow without a fault: time per example is no verdict here.
settings.register_profile("qmq", deadline=None, print_blob=True)
settings.load_profile("qmq")
