"""`make fuzz`: every target, guided by coverage, COUNT frames in all. `--replay TARGET FILE` runs one input again."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from fuzz.targets import TARGETS

_DIRECTORY: Final = Path("build/fuzz")


def run(name: str, frames: int, seed: int) -> int:
    """One target in a process of its own; returns its exit code."""
    command = [sys.executable, "-m", "fuzz.guided", name, str(frames), str(_DIRECTORY), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        if line.startswith(f"{name}: "):
            print(line, end="", flush=True)
        said.append(line)
    code = process.wait()
    if code:
        print("".join(said[-60:]), end="")
        print(f"{name} found something (exit {code}): the input stands in {_DIRECTORY}/{name}-*, this runs it again:")
        print(f"  .venv/bin/python -m fuzz --replay {name} FILE", flush=True)
    return code


def replay(name: str, path: Path) -> None:
    """Run one input, without atheris. Raises what it finds."""
    target = TARGETS[name].make()
    print(f"{target.once(path.read_bytes())} frames, nothing found")
    target.close()


def main() -> int:
    """0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000_000, help="frames in all")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31))
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one (may be repeated)")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    given = parser.parse_args()
    if given.replay:
        replay(given.replay[0], Path(given.replay[1]))
        return 0
    names = given.target or list(TARGETS)
    total = sum(TARGETS[name].frames for name in names)
    began = time.monotonic()
    print(f"{given.count:,} frames, seed {given.seed}", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(lambda name: run(name, max(given.count * TARGETS[name].frames // total, 1), given.seed), names)
        failed = sum(code != 0 for code in codes)
    print(f"{time.monotonic() - began:,.0f} s, {failed} of {len(names)} targets found something")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
