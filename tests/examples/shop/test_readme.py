"""The README of the shop does what it says: its blocks run as they stand there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.pages import Block, blocks, free_ports, reader

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = (ROOT / "examples" / "shop" / "README.md").read_text("utf-8")


def test_every_block_runs_and_prints_what_stands_below(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    broker, front, office = free_ports(3)
    found = blocks(PAGE)
    with reader(tmp_path, f"qmq://127.0.0.1:{broker}") as read:
        printed = ""
        for block in found:
            if block.kind == "text":
                assert printed == block.text, f"line {block.line}"
                continue
            text = block.text.replace("8000", str(front)).replace("8001", str(office))
            printed = read.run(Block(block.kind, text, block.line))
    assert [block.kind for block in found].count("text") >= 3
