"""The tutorial does what it says: its blocks run as they stand there, and print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.tutorial import PAGE, PLOT, blocks, printed


def shape_of(plot: Path) -> tuple[list[str], int]:
    """What is written in an SVG, and how many shapes it has."""
    text = plot.read_text("utf-8")
    return re.findall(r"<text[^>]*>([^<]*)<", text), text.count("<path")


@pytest.mark.no_cover  # what it runs is counted elsewhere
def test_every_block_runs_and_prints_what_stands_below(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "svg")
    page = PAGE.read_text("utf-8")
    try:
        found = printed(page)
    finally:
        spark.catalog.clearCache()
    assert [said for _, said in found] == [block.text for block, _ in found]
    assert len(found) > 5
    assert shape_of(tmp_path / PLOT) == shape_of(PAGE.parent / PLOT)


def test_blocks_are_found() -> None:
    page = "a\n```python\nx\n```\nb\n```\nno\n```\n```text\n```\n"
    assert [(block.kind, block.text) for block in blocks(page)] == [("python", "x\n"), ("text", "")]
