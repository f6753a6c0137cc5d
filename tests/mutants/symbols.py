"""Find a symbol of the source wherever its file lies, and switch off one expression or statement of it.

Code is compared as syntax: spaces, line breaks and quotes do not matter, so a mutant outlives moves and reformatting.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

#: The folders whose symbols mutants may name.
SOURCES: Final = ("qmq", "spark/qmq_spark", "bench")


class Unknown(Exception):
    """A symbol, or the code in it, is not there once."""


class Change(NamedTuple):
    """*code*, an expression or statement of a symbol, becomes *instead*."""

    code: str
    instead: str
    #: Which of several that are alike, from 1; 0: there is only one.
    at: int = 0


def never(condition: str, at: int = 0) -> Change:
    """Take the condition for false."""
    return Change(condition, "False", at)


def always(condition: str, at: int = 0) -> Change:
    """Take the condition for true."""
    return Change(condition, "True", at)


def skip(statement: str, at: int = 0) -> Change:
    """Leave the statement out."""
    return Change(statement, "pass", at)


def instead(code: str, other: str, at: int = 0) -> Change:
    """Run *other* where *code* stands."""
    return Change(code, other, at)


class Found(NamedTuple):
    """The file that has a symbol, below the tree, its text, and the symbol's syntax in it."""

    path: str
    text: str
    node: ast.AST


def find_symbol(symbol: str, tree: Path) -> Found:
    """Return where *symbol* (``Class.method``, ``function``, ``CONSTANT``) is defined in *tree*.

    ``module:symbol`` names the module too, for a name that two of them define. Raises Unknown.
    """
    module, _, name = symbol.rpartition(":")
    found = [
        Found(path, text, node)
        for path, text, nodes in _parsed(tree)
        if not module or f"/{path}".endswith(f"/{module}.py")
        for node in nodes.get(name, ())
    ]
    if len(found) != 1:
        where = " and ".join(each.path for each in found) or "no file"
        raise Unknown(
            f"it is defined in {where}; name a symbol that is there once, else with its module, as module:name"
        )
    return found[0]


@cache
def _parsed(tree: Path) -> list[tuple[str, str, dict[str, list[ast.AST]]]]:
    """Return each source file of *tree*: path, text, and what it defines by name."""
    files = []
    for path in sorted(path for source in SOURCES for path in (tree / source).rglob("*.py")):
        text, nodes = path.read_text("utf-8"), dict[str, list[ast.AST]]()
        for name, node in _definitions(ast.parse(text), ""):
            nodes.setdefault(name, []).append(node)
        files.append((path.relative_to(tree).as_posix(), text, nodes))
    return files


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((prefix + target.id, child) for target in targets if isinstance(target, ast.Name))
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, prefix)


def change(found: Found, changes: tuple[Change, ...]) -> str:
    """Return the text of the file with these changes made to the symbol. Raises Unknown."""
    text = found.text.encode()  # the columns of syntax count bytes
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = []
    for each in changes:
        target = _find(found.node, each)
        assert target.end_lineno is not None
        assert target.end_col_offset is not None
        begin = starts[target.lineno - 1] + target.col_offset
        end = starts[target.end_lineno - 1] + target.end_col_offset
        is_statement = isinstance(target, ast.stmt)
        code = each.instead.replace("\n", "\n" + " " * target.col_offset) if is_statement else f"({each.instead})"
        edits.append((begin, end, code.encode()))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text.decode()


def _find(node: ast.AST, wanted: Change) -> ast.expr | ast.stmt:
    found = occurrences(node, wanted.code)
    if (len(found) != 1) if not wanted.at else not 1 < len(found) >= wanted.at:
        raise Unknown(f"stands {len(found)} times there: {wanted.code}")
    return found[max(wanted.at, 1) - 1]


def occurrences(node: ast.AST, code: str) -> list[ast.expr | ast.stmt]:
    """Return the expressions and statements below *node* that are *code*, in the order of the source."""
    parsed = ast.parse(code).body[0]
    wanted: dict[type[ast.AST], str] = {type(parsed): ast.dump(parsed)}
    if isinstance(parsed, ast.Expr):
        wanted[type(parsed.value)] = ast.dump(parsed.value)
    found = [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.expr | ast.stmt)
        and type(each) in wanted
        and each is not node
        and ast.dump(each) == wanted[type(each)]
    ]
    # A statement that is one expression is found as both: the statement stands for it.
    inner = {id(each.value) for each in found if isinstance(each, ast.Expr)}
    return sorted((each for each in found if id(each) not in inner), key=lambda each: (each.lineno, each.col_offset))
