"""How long ago something was, in the few letters that a table has."""

from __future__ import annotations

from datetime import UTC, datetime


def age(seconds: float) -> str:
    """Such as "12 s", "5 min", "3 h", "20 d"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def age_of(time: datetime | None) -> str:
    """How long ago that was; "" for None."""
    return "" if time is None else age((datetime.now(UTC) - time).total_seconds())


def iso(time: datetime | None) -> str | None:
    """As ISO 8601."""
    return None if time is None else time.isoformat()
