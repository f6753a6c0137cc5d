"""The list of mutants is up to date, and the runner tells a caught one from one that lives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.running import TREE, Broken, Mutant, check_catchers, make, run
from tests.mutants.safeguards import SAFEGUARDS
from tests.mutants.symbols import Change, instead


@pytest.mark.parametrize("mutant", SAFEGUARDS, ids=lambda mutant: mutant.name)
def test_what_is_switched_off_stands_there_once(mutant: Mutant) -> None:
    made = make(mutant)
    compile(made.after, made.path, "exec")
    for change in (mutant.changes,) if isinstance(mutant.changes, Change) else mutant.changes:
        assert ast.dump(ast.parse(change.code)) != ast.dump(ast.parse(change.instead))
    for test in mutant.tests:
        assert (TREE / test.partition("::")[0]).exists(), test


def test_there_are_enough_and_no_name_stands_twice() -> None:
    names = [mutant.name for mutant in SAFEGUARDS]
    assert len(set(names)) == len(names) >= 15


def small_tree(directory: Path) -> Path:
    (directory / "qmq").mkdir()
    (directory / "qmq" / "__init__.py").touch()
    (directory / "qmq" / "testing").mkdir()  # pytest loads QMQ's plugin from it
    (directory / "qmq" / "testing" / "__init__.py").touch()
    (directory / "qmq" / "testing" / "pytest_plugin.py").touch()
    (directory / "qmq" / "safe.py").write_text("def limit(x):\n    return min(x, 10)\n")
    (directory / "test_safe.py").write_text(
        "from qmq.safe import limit\n\ndef test_it():\n    assert limit(11) == 10\n"
    )
    (directory / "test_other.py").write_text("def test_nothing_of_it():\n    pass\n")
    return directory


@pytest.mark.no_cover  # nothing of qmq runs
def test_a_caught_one_a_living_one_and_one_out_of_date(tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    mutant = Mutant("limit", "limit", instead("min(x, 10)", "x"), ("test_other.py", "test_safe.py"))
    assert run(mutant, tree).caught_by == "test_safe.py::test_it"
    assert run(mutant._replace(tests=("test_other.py",)), tree).caught_by is None
    assert "min(x, 10)" in (tree / "qmq" / "safe.py").read_text(), "the tree is as it was"
    with pytest.raises(Broken, match="stands 0 times"):
        run(mutant._replace(changes=instead("max(x, 10)", "x")), tree)
    with pytest.raises(Broken, match="could not be run"):
        run(mutant._replace(tests=("test_missing.py",)), tree)


@pytest.mark.no_cover  # nothing of qmq runs
def test_a_caught_one_passes_without_its_mutant(tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    check_catchers(["test_safe.py::test_it", "test_safe.py::test_it", "test_other.py (did not end)"], tree)
    (tree / "qmq" / "safe.py").write_text("def limit(x):\n    return x\n")
    with pytest.raises(Broken, match="test_it"):
        check_catchers(["test_safe.py::test_it"], tree)
    (tree / "test_other.py").write_text("from time import sleep\n\ndef test_nothing_of_it():\n    sleep(60)\n")
    with pytest.raises(Broken, match=r"more than 2 s: test_other\.py"):
        check_catchers(["test_other.py (did not end)"], tree, timeout_s=4)
