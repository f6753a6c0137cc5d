"""The results that docs/ has: BENCHMARKS.md, its plots, and the saved JSON from which both can be made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.parts import put_part
from bench.peers.report import plots, table


def kept(docs: Path) -> list[Path]:
    """Return the saved JSON files in the order in which they are shown."""
    return sorted(_places(docs).glob("found/*.json"))


def keep(docs: Path, files: Sequence[Path]) -> None:
    """Save these files, and remove others; a run is named after the directory that it was saved in."""
    texts = [(f"{at:02}-{file.parent.name}.json", _compact(file)) for at, file in enumerate(files, 1)]
    for old in kept(docs):
        old.unlink()
    directory = _places(docs) / "found"
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts:
        (directory / name).write_text(text, "utf-8")


def _compact(file: Path) -> str:
    """Return JSON with a line for each number and each other member, so that differences are readable."""
    found = json.loads(file.read_text("utf-8"))
    numbers = ",\n".join(json.dumps(one) for one in found.pop("numbers"))
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    return "{\n" + ",\n".join([*members, f'"numbers": [\n{numbers}\n]']) + "\n}\n"


def read(docs: Path) -> list[dict[str, Any]]:
    """Return the saved runs."""
    return [json.loads(file.read_text("utf-8")) for file in kept(docs)]


def pictures(docs: Path) -> dict[tuple[int, str], Path]:
    """Return the paths of their plots, by the index of the run and the work."""
    return plots.pictures(read(docs), _places(docs), ".svg")


def render(docs: Path) -> str:
    """Return the part of BENCHMARKS.md of the saved runs."""
    founds, places = read(docs), _places(docs)
    shown = {place: path.relative_to(docs).as_posix() for place, path in plots.pictures(founds, places, ".svg").items()}
    limits = places / "limits.md"
    return table.render(founds, shown, limits.read_text("utf-8") if limits.exists() else None)


def write(docs: Path, draws: bool) -> None:
    """Write BENCHMARKS.md; with *draws* also the plots that it shows, removing others."""
    if draws:
        for old in _places(docs).glob("*.svg"):
            old.unlink()
        plots.draw(read(docs), _places(docs), ".svg")
    put_part(docs / "BENCHMARKS.md", render(docs))


def _places(docs: Path) -> Path:
    return docs / "benchmarks"
