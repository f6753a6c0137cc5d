"""The results in docs/: the saved JSON, and a document that equals what it makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench.peers.peer import Installed
from bench.peers.registry import chosen
from bench.peers.report import published
from bench.peers.running import Amount, Row
from bench.peers.suite import Suite

DOCS = Path(__file__).parents[3] / "docs"


def saved(directory: Path, work: str) -> Path:
    """Return the JSON of a run in which two brokers did one work."""
    peers = chosen(["redis"])
    made = Suite(peers, [], 1, Amount(), directory, directory, f"run {work}")
    made.installed = {peer.name: Installed("1.0", 1_000_000) for peer in peers}
    made.machine = {
        "processor": "one", "cores": 2, "memory_bytes": 1 << 34, "kernel": "6", "filesystem": "ext4",
        "load_average": 0.0,
    }  # fmt: skip
    made.rows = [(0, Row(work, peer.name, peer.name, "bulk", "fsync", "100 B", 5.0, "msg/s")) for peer in peers]
    directory.mkdir(parents=True)
    file = directory / "found.json"
    file.write_text(json.dumps(made.found()), "utf-8")
    return file


def test_several_runs_make_one_document_again_and_again(tmp_path: Path) -> None:
    files = [saved(tmp_path / name, name) for name in ("send", "latency")]
    docs = tmp_path / "docs"
    published.keep(docs, files)
    assert [file.name for file in published.kept(docs)] == ["01-send.json", "02-latency.json"]
    kept: list[dict[str, Any]] = [json.loads(file.read_text("utf-8")) for file in files]
    assert published.read(docs) == kept
    published.write(docs, draws=False)
    text = (docs / "BENCHMARKS.md").read_text("utf-8")
    assert text.index("`run send`") < text.index("`run latency`")
    assert "![send](benchmarks/send.svg)" in text
    published.write(docs, draws=False)
    assert (docs / "BENCHMARKS.md").read_text("utf-8") == text
    published.keep(docs, files[:1])
    assert [file.name for file in published.kept(docs)] == ["01-send.json"]


def test_the_document_is_what_the_kept_figures_make(tmp_path: Path) -> None:
    assert published.kept(DOCS)
    shutil.copy(DOCS / "BENCHMARKS.md", tmp_path)
    shutil.copytree(DOCS / "benchmarks", tmp_path / "benchmarks")
    published.write(tmp_path, draws=False)
    told, made = ((docs / "BENCHMARKS.md").read_text("utf-8") for docs in (DOCS, tmp_path))
    assert told == made, "docs/BENCHMARKS.md: `python -m bench.peers show --docs` makes another"
    shown = set(published.pictures(DOCS).values())
    assert {path.name for path in (DOCS / "benchmarks").glob("*.svg")} == {path.name for path in shown}
