"""`make mutants`: switch off each safeguard, one at a time; some test must fail. Names on the command line choose some.

Exits 1 when a mutant lives, or when the tests fail on the tree as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

from tests.mutants.running import Broken, Mutant, Outcome, check_catchers, copy_tree, run
from tests.mutants.safeguards import SAFEGUARDS


def main(names: list[str]) -> int:
    """Run all mutants, or those named."""
    console = Console(soft_wrap=True)
    unknown = set(names) - {mutant.name for mutant in SAFEGUARDS}
    if unknown:
        console.print(f"there is no mutant {', '.join(sorted(unknown))}", style="red")
        return 2
    chosen = [mutant for mutant in SAFEGUARDS if not names or mutant.name in names]
    console.print(f"{len(chosen)} mutants", highlight=False)
    with tempfile.TemporaryDirectory() as directory:
        try:
            outcomes = run_all(chosen, Path(directory), console)
        except Broken as error:
            console.print(str(error), markup=False)
            return 1
    console.print(table_of(outcomes))
    return 0 if all(outcome.caught_by for outcome in outcomes) else 1


def run_all(mutants: list[Mutant], directory: Path, console: Console) -> list[Outcome]:
    """Run the tests of each, one mutant a processor at a time, each in a copy of the tree; then what caught them on the
    tree as it is. Raises Broken.
    """
    workers = os.cpu_count() or 1
    trees = SimpleQueue[Path]()
    for number in range(workers):
        tree = directory / str(number)
        tree.mkdir()
        copy_tree(tree)
        trees.put(tree)

    def run_one(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return run(mutant, tree)
        finally:
            trees.put(tree)

    outcomes = []
    with ThreadPoolExecutor(workers) as pool:
        for outcome in pool.map(run_one, mutants):
            outcomes.append(outcome)
            done = f"{len(outcomes)}/{len(mutants)} {outcome.mutant.name}: {outcome.caught_by or 'LIVES'}"
            console.print(f"{done}, {outcome.seconds:.0f} s", markup=False)
            console.file.flush()
    check_catchers([outcome.caught_by for outcome in outcomes if outcome.caught_by], trees.get())
    return outcomes


def table_of(outcomes: list[Outcome]) -> Table:
    """Which test caught which."""
    table = Table("safeguard switched off")
    table.add_column("in", overflow="fold")
    table.add_column("caught by", overflow="fold")
    for outcome in outcomes:
        table.add_row(outcome.mutant.name, outcome.mutant.symbol, outcome.caught_by or "[red]nobody[/red]")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
