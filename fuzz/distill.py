"""Keeps of what a run of `make fuzz` collected the few inputs that reach most code: `python -m fuzz.distill TARGET`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fuzz.corpus import read_corpus, write_corpus
from fuzz.target import Target
from fuzz.targets import TARGETS

_MOST: Final = 120
_CODE: Final = str(Path(__file__).parent.parent / "qmq")

Arc = tuple[str, int, int]


def arcs_of(target: Target, data: bytes) -> set[Arc]:
    """The steps from line to line of qmq that an input makes."""
    arcs: set[Arc] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(_CODE):
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                arcs.add((name, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        target.once(data)
    finally:
        sys.settrace(None)
    return arcs


def main(name: str, directory: Path) -> None:
    """Write fuzz/corpus/TARGET.txt anew from *directory* and from what is kept already."""
    target = TARGETS[name].make()
    inputs = [*read_corpus(name), *(path.read_bytes() for path in sorted(directory.iterdir()))]
    reached = [(arcs_of(target, data), data) for data in dict.fromkeys(sorted(inputs, key=len))]
    kept: list[bytes] = []
    known: set[Arc] = set()
    while reached and len(kept) < _MOST:
        arcs, data = max(reached, key=lambda found: len(found[0] - known))
        if not arcs - known:
            break
        known |= arcs
        kept.append(data)
        reached = [(left, other) for left, other in reached if left - known]
    target.close()
    write_corpus(name, kept)
    print(f"{name}: kept {len(kept)} of {len(inputs)} inputs, {len(known)} steps")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
