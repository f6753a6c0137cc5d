"""Inputs that are kept: one line of hex each, in fuzz/corpus/TARGET.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_DIRECTORY: Final = Path(__file__).parent / "corpus"


def read_corpus(name: str) -> list[bytes]:
    """The inputs kept of a target, in the order of the file."""
    path = _DIRECTORY / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def write_corpus(name: str, inputs: list[bytes]) -> None:
    """Keep these inputs of a target, and no others."""
    _DIRECTORY.mkdir(exist_ok=True)
    (_DIRECTORY / f"{name}.txt").write_text("".join(f"{data.hex()}\n" for data in inputs))
