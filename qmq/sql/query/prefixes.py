"""Add bounds to the conditions of a query that say how a subject begins.

DuckDB gives comparisons to a scan, but not ``subject LIKE 'shop.%'`` and ``starts_with(subject, 'shop.')``. With
``AND subject >= 'shop.' AND subject < 'shop/'`` beside it, each of these says the same as before, wherever it stands in
the query, and the scan is given the bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qmq.sql.query.filters import following

if TYPE_CHECKING:
    import duckdb

#: LIKE, starts_with and the operator ^@, which is another name of it.
_LIKE: Final = "~~"
_FUNCTIONS: Final = (_LIKE, "starts_with", "prefix", "^@")
_COLUMN: Final = "subject"
#: Parts of a SELECT whose expressions give names, or repeat those that do.
_NAMING: Final = ("select_list", "group_expressions", "modifiers", "having", "qualify")
_PLACES: Final = ("query_location", "query_location_length")


class _Condition(NamedTuple):
    """A condition in the text of a query: its place, and the prefix that it asks for."""

    #: In bytes.
    start: int
    end: int
    column: str
    prefix: str

    def bounded(self, query: bytes) -> bytes:
        """Return the query with the bounds beside this condition."""
        low, high = _literal(self.prefix), _literal(following(self.prefix) or "")
        bounds = f" AND {self.column} >= {low} AND {self.column} < {high})"
        return query[: self.start] + b"(" + query[self.start : self.end] + bounds.encode() + query[self.end :]


def with_bounds(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """Return the query with bounds beside each condition on how a subject begins; as it is where that cannot be done,
    or where the text that was made is not the same query with these bounds.
    """
    tree = _tree(connection, query)
    changed = query.encode()
    for condition in sorted(_conditions(tree), reverse=True):
        changed = condition.bounded(changed)
    try:
        text = changed.decode()
    except UnicodeDecodeError:
        return query
    return text if _plain(tree) == _plain(_tree(connection, text)) else query


def _tree(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """Return the query as DuckDB parses it; None if it does not."""
    found = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree = json.loads(found[0][0])
    return None if tree["error"] else tree["statements"]


def _conditions(node: Any) -> Iterator[_Condition]:
    """Yield the conditions below a node of the tree, but for those whose text names a column of a result. They never
    overlap, as their operands are a column and a text.
    """
    if isinstance(node, list):
        for part in node:
            yield from _conditions(part)
    elif isinstance(node, dict):
        condition = _condition(node)
        if condition is not None:
            yield condition
            return
        for name, part in node.items():
            if name not in _NAMING:
                yield from _conditions(part)


def _condition(node: dict[str, Any]) -> _Condition | None:
    """Return the condition that a node is, or None."""
    if node.get("class") != "FUNCTION" or node.get("function_name") not in _FUNCTIONS:
        return None
    operands = [argument.get("expression", {}) for argument in node.get("arguments", ())]
    if [operand.get("class") for operand in operands] != ["COLUMN_REF", "CONSTANT"]:
        return None
    column, literal = operands[0]["column_names"], operands[1].get("literal", {})
    if column[-1].lower() != _COLUMN or literal.get("kind") != "STRING":
        return None
    text = literal["text"]
    prefix = re.split("[%_]", text, maxsplit=1)[0] if node["function_name"] == _LIKE else text
    if not prefix or following(prefix) is None:
        return None
    start = min(node[_PLACES[0]], operands[0][_PLACES[0]])
    return _Condition(start, node[_PLACES[0]] + node[_PLACES[1]], ".".join(map(_quoted, column)), prefix)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _plain(node: Any) -> Any:
    """Return a tree without places in the text, and with each AND as the list of what it joins, but for comparisons of
    a subject: what is left says whether two queries differ in more than these.
    """
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "CONJUNCTION_AND":
        parts = [part for part in _joined(node) if not _is_bound(part)]
        return _plain(parts[0]) if len(parts) == 1 else ["AND", *map(_plain, parts)]
    return {name: _plain(part) for name, part in node.items() if name not in _PLACES}


def _joined(node: dict[str, Any]) -> Iterator[Any]:
    for part in node["children"]:
        if isinstance(part, dict) and part.get("type") == "CONJUNCTION_AND":
            yield from _joined(part)
        else:
            yield part


def _is_bound(node: Any) -> bool:
    if node.get("type") not in ("COMPARE_GREATERTHANOREQUALTO", "COMPARE_LESSTHAN"):
        return False
    names = node["left"].get("column_names", [""])
    return bool(names[-1].lower() == _COLUMN and node["right"].get("class") == "CONSTANT")
