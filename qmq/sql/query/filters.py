"""Limits on single columns that follow from the filter of a scan, so that less is read.

DuckDB gives a scan its filter as an expression of Arrow, whose parts cannot be asked for. So its text is read, and the
expression that this reading means is made anew and compared with the given one: a text that is misread, or that says
more than is known here, limits nothing. The filter itself is applied to every row that is read, whatever is found here.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: A comparison: a column, an operator, and a text, a time or a number.
_COMPARISON: Final = re.compile(
    r'\((?P<column>\w+) (?P<operator>==|!=|<=|>=|<|>) (?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<value>[^()"]+))\)', re.DOTALL
)
_IS_IN: Final = re.compile(r"if_else\(is_valid\((?P<column>\w+)\), is_in\((?P=column), \{value_set=", re.DOTALL)
_IS_VALID: Final = re.compile(r"is_valid\((?P<column>\w+)\)")
_IS_NULL: Final = re.compile(r"is_null\((?P<column>\w+), \{nan_is_null=false\}\)")
_ESCAPED: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}


@dataclass(frozen=True)
class Limits:
    """The values that wanted rows may have in one column: one of ``values``, at least ``low``, and at most ``high``, or
    less than that (``below_high``). None: no limit.
    """

    values: frozenset[Any] | None = None
    low: Any = None
    high: Any = None
    below_high: bool = False

    def __and__(self, other: Limits) -> Limits:
        """Return the limits of rows that are within both."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [(one.high, not one.below_high) for one in (self, other) if one.high is not None]
        high, is_within = min(highs, default=(None, True))
        return Limits(values, max(lows, default=None), high, not is_within)

    def __or__(self, other: Limits) -> Limits:
        """Return limits of rows that are within one of the two."""
        if self.values is None or other.values is None:
            return NO_LIMITS
        return Limits(self.values | other.values)

    @property
    def prefix(self) -> str:
        """Return what texts between ``low`` and ``high`` begin with."""
        low, high = self.low, self.high
        if not low or not high:
            return ""
        if self.below_high and high == following(low):
            return str(low)
        same = 0
        while same < min(len(low), len(high)) and low[same] == high[same]:
            same += 1
        return str(low[:same])


NO_LIMITS: Final = Limits()
#: Limits by column.
ByColumn = dict[str, Limits]


#: How each comparison is made, and what it says about its column.
_OPERATORS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Limits]]]] = {
    "==": (operator.eq, lambda value: Limits(frozenset([value]))),
    "!=": (operator.ne, lambda value: NO_LIMITS),
    ">": (operator.gt, lambda value: Limits(low=value)),
    ">=": (operator.ge, lambda value: Limits(low=value)),
    "<": (operator.lt, lambda value: Limits(high=value, below_high=True)),
    "<=": (operator.le, lambda value: Limits(high=value)),
}


class RowFilter:
    """The filter of a scan: an expression, what it says about single columns, and which columns it needs."""

    def __init__(self, expression: pc.Expression | None, schema: pa.Schema) -> None:
        self.expression = expression
        self._limits: ByColumn = {} if expression is None else _limits_of(expression, schema)
        text = "" if expression is None else str(expression)
        #: Columns that the filter may name.
        self.columns = [name for name in schema.names if re.search(rf"\b{re.escape(name)}\b", text)]

    def of(self, column: str) -> Limits:
        """Return what the filter says about a column."""
        return self._limits.get(column, NO_LIMITS)

    def applied(self, batch: pa.RecordBatch, columns: list[str]) -> list[pa.RecordBatch]:
        """Return those rows of a batch that pass, with some of its columns."""
        table = pa.Table.from_batches([batch])
        if self.expression is not None:
            table = table.filter(self.expression)
        return [part for part in table.select(columns).to_batches() if part.num_rows]


def following(text: str) -> str | None:
    """Return the first text behind all that begin with *text*; None where no character can follow its last one."""
    last = ord(text[-1]) + 1 if text else 0x110000
    return None if 0xD800 <= last <= 0xDFFF or last > 0x10FFFF else text[:-1] + chr(last)


def _limits_of(expression: pc.Expression, schema: pa.Schema) -> ByColumn:
    """Return the limits of single columns; none, if the expression is not understood as a whole."""
    try:
        made, limits = _Reading(str(expression), _value_sets(expression), schema).whole()
    except (LookupError, ValueError, TypeError, StopIteration, RecursionError, pa.ArrowException):
        return {}
    return limits if made.equals(expression) else {}


class _Reading:
    """Reads the text of an expression: comparisons with constants, lists of values, and what joins them."""

    def __init__(self, text: str, value_sets: Iterator[pa.Array], schema: pa.Schema) -> None:
        self._text = text
        self._at = 0
        self._value_sets = value_sets
        self._schema = schema

    def whole(self) -> tuple[pc.Expression, ByColumn]:
        """Return the expression that was read, and what it says. Raises ValueError and others if it is not
        understood.
        """
        made = self._part()
        if self._at != len(self._text):
            raise ValueError(self._text[self._at :])
        return made

    def _part(self) -> tuple[pc.Expression, ByColumn]:
        for pattern, read in (
            (_COMPARISON, self._comparison),
            (_IS_IN, self._is_in),
            (_IS_VALID, lambda found: (pc.field(found["column"]).is_valid(), {})),
            (_IS_NULL, lambda found: (pc.field(found["column"]).is_null(), {})),
        ):
            found = pattern.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return read(found)
        if self._skipped("invert("):
            made, _ = self._part()
            self._skip(")")
            return ~made, {}
        self._skip("(")
        left, of_left = self._part()
        is_and = self._skipped(" and ")
        if not is_and:
            self._skip(" or ")
        right, of_right = self._part()
        self._skip(")")
        if is_and:
            names = of_left.keys() | of_right.keys()
            return left & right, {name: of_left.get(name, NO_LIMITS) & of_right.get(name, NO_LIMITS) for name in names}
        return left | right, {name: of_left[name] | of_right[name] for name in of_left.keys() & of_right.keys()}

    def _skipped(self, text: str) -> bool:
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _skip(self, text: str) -> None:
        if not self._skipped(text):
            raise ValueError(self._text[self._at :])

    def _comparison(self, found: re.Match[str]) -> tuple[pc.Expression, ByColumn]:
        name = found["column"]
        kind = self._schema.field(name).type
        value = _unescaped(found["text"]) if found["text"] is not None else _value_of(found["value"], kind)
        make, limits = _OPERATORS[found["operator"]]
        return make(pc.field(name), pa.scalar(value, kind)), {name: limits(value)}

    def _is_in(self, found: re.Match[str]) -> tuple[pc.Expression, ByColumn]:
        name, values = found["column"], next(self._value_sets)
        column = pc.field(name)
        is_in = pc.if_else(column.is_valid(), column.isin(values), pa.scalar(None, pa.bool_()))
        self._at = found.start()
        self._skip(str(is_in))
        return is_in, {name: Limits(frozenset(values.to_pylist()))}


def _value_sets(expression: pc.Expression) -> Iterator[pa.Array]:
    """Yield the lists of values in an expression. Its text shortens them, and its pickled form has them."""
    if "is_in" not in str(expression):
        return
    batch = pa.ipc.open_file(expression.__reduce__()[1][0]).get_batch(0)
    for column in batch.columns:
        if pa.types.is_struct(column.type) and column.type.get_field_index("value_set") >= 0:
            values = column.field("value_set")
            yield values.flatten() if pa.types.is_list(values.type) else values


def _value_of(text: str, kind: pa.DataType) -> Any:
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat(text)
    if pa.types.is_integer(kind):
        return int(text)
    return json.loads(text)


def _unescaped(text: str) -> str:
    """Return the text that Arrow shows in quotes, with what is no printable ASCII escaped."""

    def character(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else _CONTROLS.get(found[2], found[2])

    return _ESCAPED.sub(character, text[1:-1])


def microseconds(time: datetime) -> int:
    """Return microseconds since 1970."""
    return (time - _EPOCH) // _MICROSECOND
