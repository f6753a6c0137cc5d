"""Texts of the pages: counts, rates, sizes, ages and times, and bodies as text, JSON or hex."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

#: Bytes of a body that a page shows; all of them can be downloaded.
SHOWN_BYTES: Final = 16 << 10
#: Bytes of a body that a page shows as hex, 16 a line.
SHOWN_HEX_BYTES: Final = 4 << 10
_HEX_COLUMNS: Final = 16
_PREVIEW: Final = 120
_AGES: Final = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_SIZES: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")


def count_text(count: float) -> str:
    """Return a count with thousands apart.

    >>> count_text(1234567)
    '1,234,567'
    """
    return f"{count:,.0f}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "group"), counted(2, "group")
    ('1 group', '2 groups')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def rate_text(rate: float) -> str:
    """Return a rate, with a digit behind the point where it is small: ``"0.3"``, ``"12"``, ``"4,100"``."""
    return f"{rate:.1f}" if 0 < rate < 9.95 else f"{rate:,.0f}"


def size_text(size: float | None) -> str:
    """Return a size in bytes.

    >>> size_text(1536)
    '1.5 KiB'
    """
    if size is None:
        return "unknown"
    if size < 1024:
        return f"{size:.0f} B"
    power = min((int(size).bit_length() - 1) // 10, len(_SIZES))
    size, unit = size / 1024**power, _SIZES[power - 1]
    return f"{size:.1f} {unit}" if size < 9.95 else f"{size:,.0f} {unit}"


def age_text(seconds: float) -> str:
    """Return a duration in its two largest units, short ones with a digit behind the point.

    >>> age_text(3725)
    '1h 2m'
    """
    if seconds < 10:
        return f"{seconds:.1f}s" if seconds >= 0.05 else "0s"
    left, parts = int(seconds), list[str]()
    for unit, size in _AGES:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(part for part in parts[:2] if part[:-1] != "0" or len(parts) == 1)


def short_age(seconds: float) -> str:
    """Return a short duration: microseconds or milliseconds where it is below a second."""
    if seconds < 0.001:
        return f"{seconds * 1_000_000:.0f}us"
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else age_text(seconds)


def time_text(at: datetime | None) -> str:
    """Return a time in UTC to the second."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def clock_text(at: datetime | None) -> str:
    """Return a time of a day in UTC, to the millisecond."""
    return "" if at is None else f"{at.astimezone(UTC):%H:%M:%S.%f}"[:-3]


def setting_text(value: Any) -> str:
    """Return the value of a setting."""
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def preview(body: bytes) -> str:
    """Return the beginning of a body in one line."""
    text = body[: 4 * _PREVIEW].decode("utf-8", "replace")
    line = "".join(one if one.isprintable() else " " if one.isspace() else "\N{REPLACEMENT CHARACTER}" for one in text)
    return line if len(line) <= _PREVIEW and len(body) <= 4 * _PREVIEW else line[:_PREVIEW] + "…"


class ShownBody(NamedTuple):
    """A body as a page shows it: the form, the forms that it has, its text, and whether the text is cut."""

    form: str
    forms: tuple[str, ...]
    text: str
    is_cut: bool


def shown_body(body: bytes, wanted: str | None) -> ShownBody:
    """Return a body in the form that is wanted (``json``, ``text``, ``hex``), else in the one that fits it best."""
    text = _as_text(body)
    parsed = _as_json(body) if text is not None else None
    forms = tuple(
        form for form, there in (("json", parsed is not None), ("text", text is not None), ("hex", True)) if there
    )
    form = wanted if wanted in forms else forms[0]
    if form == "hex":
        return ShownBody(form, forms, hex_text(body[:SHOWN_HEX_BYTES]), len(body) > SHOWN_HEX_BYTES)
    shown = (parsed if form == "json" else text) or ""
    return ShownBody(form, forms, shown[:SHOWN_BYTES], len(shown) > SHOWN_BYTES)


def _as_text(body: bytes) -> str | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _as_json(body: bytes) -> str | None:
    """Return the body as indented JSON; None if it is no JSON, or long: then it is shown as it is."""
    if len(body) > SHOWN_BYTES or body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def hex_text(body: bytes) -> str:
    """Return bytes as lines of their offset, 16 bytes in hex, and the same as ASCII."""
    lines = []
    for offset in range(0, len(body), _HEX_COLUMNS):
        row = body[offset : offset + _HEX_COLUMNS]
        ascii_text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{offset:08x}  {row.hex(' '):<{3 * _HEX_COLUMNS - 1}}  {ascii_text}")
    return "\n".join(lines)


#: The filters of the templates.
FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "count": count_text,
    "counted": counted,
    "rate": rate_text,
    "size": size_text,
    "age": age_text,
    "short_age": short_age,
    "time": time_text,
    "clock": clock_text,
    "setting": setting_text,
    "preview": preview,
}
