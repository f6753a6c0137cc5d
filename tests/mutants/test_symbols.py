"""Symbols are found wherever their files lie, and one place of them is changed, whatever its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.symbols import Unknown, always, change, find_symbol, instead, never, skip

TEXT = """
LIMIT: int = 8 << 20


class Window:
    def take(self, count):
        if (
            count
            > LIMIT
        ):
            raise ValueError("ä", 'too many')
        self.note(count); self.note(count)
        for each in range(count):
            if each and self.open: self.give(each)
        return [one for one in self.all if one]


def take(count):
    return count
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "qmq" / "deep").mkdir(parents=True)
    (tmp_path / "qmq" / "deep" / "window.py").write_text(TEXT)
    (tmp_path / "qmq" / "other.py").write_text("def take():\n    return 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("symbol", "made", "before", "after"),
    [
        ("LIMIT", instead("8<<20", "1"), "8 << 20", "(1)"),
        ("Window.take", never("count > LIMIT"), "count\n            > LIMIT", "False"),
        ("Window.take", skip("raise ValueError('ä', 'too many')"), "raise ValueError(\"ä\", 'too many')", "pass"),
        ("Window.take", always("self.open"), "each and self.open:", "each and True:"),
        ("Window.take", skip("self.give(each)"), "self.open: self.give(each)", "self.open: pass"),
        ("Window", always("one", at=2), "if one]", "if True]"),
        ("deep/window:take", instead("count", "0"), "    return count\n", "    return (0)\n"),
    ],
)
def test_one_place_is_changed(tree: Path, symbol: str, made: tuple[str, str, int], before: str, after: str) -> None:
    assert TEXT.count(before) == 1
    found = find_symbol(symbol, tree)
    assert found.path == "qmq/deep/window.py"
    changed = change(found, (made,))
    compile(changed, found.path, "exec")
    assert changed in (
        TEXT.replace(before, after),
        TEXT.replace(before, after.replace(_bare(after), f"({_bare(after)})")),
    )


def _bare(after: str) -> str:
    return next((word for word in ("False", "True") if word in after), "\0")


def test_statements_of_several_lines_keep_their_depth(tree: Path) -> None:
    found = find_symbol("Window.take", tree)
    changed = change(
        found, (instead("self.give(each)", "pass"), instead("raise ValueError('ä', 'too many')", "a = 1\nb = 2"))
    )
    assert "            a = 1\n            b = 2\n" in changed
    compile(changed, found.path, "exec")


@pytest.mark.parametrize(
    ("symbol", "told"), [("take", "other.py"), ("Window.give", "no file"), ("other:Window", "no file")]
)
def test_a_symbol_must_be_there_once(tree: Path, symbol: str, told: str) -> None:
    with pytest.raises(Unknown, match=told):
        find_symbol(symbol, tree)


@pytest.mark.parametrize(
    ("made", "times"),
    [
        (skip("self.note(count)"), 2),
        (skip("self.note(count)", at=3), 2),
        (never("nobody"), 0),
        (never("each", at=9), 2),
    ],
)
def test_the_place_must_be_told_from_others(tree: Path, made: tuple[str, str, int], times: int) -> None:
    with pytest.raises(Unknown, match=f"stands {times} times there"):
        change(find_symbol("Window.take", tree), (made,))
