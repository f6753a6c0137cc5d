"""`make mutants`: switch off each safeguard, one at a time; some test must fail. Names on the command line choose some.

Exits 1 when a mutant lives, or when the tests fail on the tree as it is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.running import MOST_S, Outcome, copy_tree, pytest, run
from tests.mutants.safeguards import SAFEGUARDS


def main(names: list[str]) -> int:
    """Run all mutants, or those named."""
    console = Console(soft_wrap=True)
    unknown = set(names) - {mutant.name for mutant in SAFEGUARDS}
    if unknown:
        console.print(f"there is no mutant {', '.join(sorted(unknown))}", style="red")
        return 2
    chosen = [mutant for mutant in SAFEGUARDS if not names or mutant.name in names]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_tree(tree)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        console.print(f"{len(chosen)} mutants; first their {len(tests)} files of tests as they are")
        usual_s = dict[str, float]()
        for test in tests:
            started = time.monotonic()
            code, output = pytest([test], tree, MOST_S)
            if code != 0:
                console.print(output[-4_000:], markup=False)
                return 1
            usual_s[test] = time.monotonic() - started
        outcomes = []
        for mutant in chosen:
            outcome = run(mutant, tree, usual_s)
            outcomes.append(outcome)
            done = f"{len(outcomes)}/{len(chosen)} {mutant.name}: {outcome.caught_by or 'LIVES'}"
            console.print(f"{done}, {outcome.seconds:.0f} s", markup=False)
            console.file.flush()
    console.print(table_of(outcomes))
    return 0 if all(outcome.caught_by for outcome in outcomes) else 1


def table_of(outcomes: list[Outcome]) -> Table:
    """Which test caught which."""
    table = Table("safeguard switched off")
    table.add_column("in", overflow="fold")
    table.add_column("caught by", overflow="fold")
    for outcome in outcomes:
        table.add_row(outcome.mutant.name, outcome.mutant.path, outcome.caught_by or "[red]nobody[/red]")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
