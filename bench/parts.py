"""Write a part of docs/BENCHMARKS.md. Several programs write one each, which begins with a heading ``# ...``."""

from __future__ import annotations

from pathlib import Path


def put_part(path: Path, text: str) -> None:
    """Write a part: it replaces the one with the same heading, or is appended."""
    parts = _parts(path.read_text("utf-8")) if path.exists() else []
    heading = _heading(text)
    kept = [text if _heading(part) == heading else part for part in parts]
    if text not in kept:
        kept.append(text)
    path.write_text("\n".join(part.strip("\n") + "\n" for part in kept), "utf-8")


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for line in text.splitlines():
        if line.startswith("# ") or not parts:
            parts.append("")
        parts[-1] += line + "\n"
    return parts


def _heading(part: str) -> str:
    return part.partition("\n")[0]
