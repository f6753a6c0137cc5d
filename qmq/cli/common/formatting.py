"""Format numbers and times briefly, as tables show them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final, overload

#: The control characters C0 and C1, and those by which Unicode breaks lines or changes the direction of writing.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def number(count: int, what: str = "", several: str = "") -> str:
    """Format a count: "999,999", "1.5 M", "12,345 M"; with *what* "1 group" or "2 groups", *several* being the
    plural.
    """
    if what:
        return f"{count:,} {what if count == 1 else several or what + 's'}"
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:.1f} M" if count < 1_000_000_000 else f"{count // 1_000_000:,} M"


def size(count: int) -> str:
    """Format a count of bytes: "1 byte", "512 bytes", "1.5 MiB", "12.3 GiB"."""
    for unit, least in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= least:
            return f"{count / least:,.1f} {unit}"
    return number(count, "byte")


def age(seconds: float) -> str:
    """Format about how long something takes or has lasted, in the units that options take: "12s", "5m", "3h", "20d"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def age_of(time: datetime | None) -> str:
    """Return how long ago *time* was; "" for None."""
    return "" if time is None else age((datetime.now(UTC) - time).total_seconds())


@overload
def iso(time: datetime) -> str: ...
@overload
def iso(time: None) -> None: ...
@overload
def iso(time: datetime | None) -> str | None: ...
def iso(time: datetime | None) -> str | None:
    """Format a time as ISO 8601 in UTC: 2026-01-31T12:00:00.000000Z; None stays None."""
    if time is None:
        return None
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def visible(text: str) -> str:
    """Escape each character that would break a line or control a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
