"""docs/guide.md does what it says: its blocks run as they stand there, and print what stands below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import Block, blocks, free_ports, reader

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guide.md").read_text("utf-8")


def test_every_block_runs_and_prints_what_stands_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, one, two = free_ports(3)
    url = f"qmq://127.0.0.1:{port}"
    monkeypatch.setenv("QMQ_SERVER", url)
    printed, compared = "", 0
    with reader(tmp_path, url) as read:
        for block in blocks(PAGE):
            if block.kind == "text":
                assert printed == block.text, f"line {block.line}"
                compared += 1
            else:
                text = block.text.replace("20891", str(one)).replace("20892", str(two))
                printed = read.run(Block(block.kind, text, block.line))
    assert compared > 15


def test_every_block_of_code_is_run_or_compared() -> None:
    assert PAGE.count("```") == 2 * len(blocks(PAGE))
