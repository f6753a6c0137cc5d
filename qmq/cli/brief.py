"""Numbers and times in the few letters that a table has."""

from __future__ import annotations

from datetime import UTC, datetime


def number(count: int, what: str = "", several: str = "") -> str:
    """Such as "999,999", "1.5 M", "12,345 M"; with *what*, "1 group" or "2 groups", or *several* for other plurals."""
    if what:
        return f"{count:,} {what if count == 1 else several or what + 's'}"
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:.1f} M" if count < 1_000_000_000 else f"{count // 1_000_000:,} M"


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
