"""Break the source in one place in a copy of the tree, run the tests that should notice, and say which one did."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.symbols import Change, Unknown, change, find_symbol

TREE: Final = Path(__file__).resolve().parents[2]
#: What the tests need of the tree.
PARTS: Final = (
    "qmq",
    "tests",
    "examples",
    "docs",
    "scripts",
    "bench",
    "fuzz",
    "spark",
    "pyproject.toml",
    "Makefile",
    "README.md",
)
#: Tests that have not ended by then never would: the mutant made something wait for ever. On the tree as it is they
#: must end in half of it.
TIMEOUT_S: Final = 600
_NO_END: Final = " (did not end)"

_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", re.MULTILINE)


class Mutant(NamedTuple):
    """One safeguard switched off: a change, or several, of one symbol."""

    name: str
    #: As ``find_symbol`` takes it.
    symbol: str
    changes: Change | tuple[Change, ...]
    #: Test files (or nodes) of which one must fail, the likeliest first.
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """What the tests said. ``caught_by`` is the first test that failed; None: all passed, nobody noticed."""

    mutant: Mutant
    caught_by: str | None
    seconds: float


class Broken(Exception):
    """A mutant can't be made, or its tests can't be run: the list is out of date."""


class Made(NamedTuple):
    """A mutant's file, below the tree: its text as it is, and with the safeguard switched off."""

    path: str
    before: str
    after: str


def make(mutant: Mutant, tree: Path = TREE) -> Made:
    """Find the mutant's symbol in *tree*, and change the text of its file. Raises Broken."""
    changes = (mutant.changes,) if isinstance(mutant.changes, Change) else mutant.changes
    try:
        found = find_symbol(mutant.symbol, tree)
        return Made(found.path, found.text, change(found, changes))
    except Unknown as error:
        raise Broken(f"{mutant.name}: {mutant.symbol}: {error}") from None


def copy_tree(target: Path) -> None:
    """A copy of what the tests need."""
    for part in PARTS:
        source = TREE / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / part)


def run(mutant: Mutant, tree: Path, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run the mutant's tests in *tree*, a copy that is as it was when this returns. Raises Broken."""
    made = make(mutant, tree)
    path = tree / made.path
    started = time.monotonic()
    path.write_text(made.after, "utf-8")
    try:
        caught_by = _first_failure(mutant, tree, timeout_s)
    finally:
        path.write_text(made.before, "utf-8")
    return Outcome(mutant, caught_by, time.monotonic() - started)


def _first_failure(mutant: Mutant, tree: Path, timeout_s: float) -> str | None:
    for test in mutant.tests:
        try:
            code, output = pytest([test], tree, timeout_s)
        except subprocess.TimeoutExpired:
            return f"{test}{_NO_END}"
        if code == 1:
            found = _FAILED.search(output)
            return found.group(1) if found else test
        if code != 0:
            raise Broken(f"{mutant.name}: {test} could not be run:\n{output[-2_000:]}")
    return None


def check_catchers(caught_by: Iterable[str], tree: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Run what caught mutants on *tree* as it is: there all must pass, or they told nothing. Raises Broken."""
    distinct = sorted(set(caught_by))
    endless = {name.removesuffix(_NO_END) for name in distinct if name.endswith(_NO_END)}
    failing = sorted(name for name in distinct if not name.endswith(_NO_END))
    for tests, limit_s in [([name], timeout_s / 2) for name in sorted(endless)] + [(failing, timeout_s * 2)]:
        if not tests:
            continue
        try:
            code, output = pytest(tests, tree, limit_s)
        except subprocess.TimeoutExpired:
            raise Broken(f"on the tree as it is this takes more than {limit_s:.0f} s: {' '.join(tests)}") from None
        if code != 0:
            raise Broken(f"on the tree as it is a test fails that caught a mutant:\n{output[-4_000:]}")


def pytest(tests: Sequence[str], tree: Path, timeout_s: float) -> tuple[int, str]:
    """Exit code and output of these tests; they stop at the first failure. Raises TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "QMQ_EXAMPLES": "100", "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'spark'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
