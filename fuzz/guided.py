"""One target under atheris: `python -m fuzz.guided TARGET FRAMES DIRECTORY [SEED]`.

Inputs that reach new code are kept in DIRECTORY; one that is a finding is written there as ``crash-...``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["qmq"]):
    from fuzz.corpus import read_corpus
    from fuzz.targets import TARGETS

_LINE_S = 30.0


def main(name: str, frames: int, directory: Path, seed: int) -> None:
    """Fuzz until *frames* are done. Ends the process: 0 when nothing was found."""
    logging.disable(logging.ERROR)  # of bad bytes a start and a client tell
    share = TARGETS[name]
    target = share.make()
    found = directory / name
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate([*target.seeds(), *read_corpus(name)]):
        (found / f"seed-{number}").write_bytes(data)
    done = inputs = 0
    began = said = time.monotonic()

    def say(word: str) -> None:
        rate = done / max(time.monotonic() - began, 1e-9)
        print(f"{name}: {done:,} frames in {inputs:,} inputs, {rate:,.0f} frames/s, {word}", flush=True)

    def once(data: bytes) -> None:
        nonlocal done, inputs, said
        done += target.once(data)
        inputs += 1
        if time.monotonic() - said > _LINE_S:
            said = time.monotonic()
            say("so far nothing found")
        if done >= frames:
            target.close()
            say("nothing found")
            os._exit(0)

    arguments = [f"-max_len={share.longest_input}", f"-seed={seed}", "-timeout=20", "-rss_limit_mb=1500"]
    arguments += ["-verbosity=0", "-print_final_stats=0", "-len_control=0", f"-artifact_prefix={directory}/{name}-"]
    atheris.Setup([sys.argv[0], *arguments, str(found)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
