"""Write the rows of a query: a table on a terminal, lines, JSON, CSV, or a Parquet file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from qmq.cli.common.formatting import iso, number, visible
from qmq.cli.common.listing import MOST_ROWS, in_line
from qmq.cli.messages.message_text import text_or_base64
from qmq.errors import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq.sql.query.database import Result

#: The most characters of a value in a table on a terminal.
_MOST_SHOWN: Final = 200
_FOLDED_WIDTH: Final = 13
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False).encode
_DAY_S: Final = 86_400


def print_json(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> int:
    """Print a JSON object for each row; return their count. A name that comes again has its number behind it."""
    names = [name if name not in names[:at] else f"{name}_{at + 1}" for at, name in enumerate(names)]
    return _each(batches, lambda row: _ENCODE(dict(zip(names, row, strict=True))))


def print_lines(batches: Iterable[pa.RecordBatch], names: Sequence[str], *, header: bool) -> int:
    """Print a line of values with tabs between for each row; return their count."""
    if header:
        click.echo("\t".join(map(visible, names)))
    return _each(batches, lambda row: "\t".join(map(_text, row)))


def print_csv(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> int:
    """Print CSV with a header; return the count of rows."""
    text = io.StringIO()
    writer, count = csv.writer(text, lineterminator="\n"), 0
    writer.writerow(names)
    for batch in batches:
        rows = [[_in_csv(value) for value in row] for row in _rows([batch])]
        writer.writerows(rows)
        click.echo(text.getvalue(), nl=False)
        text.seek(0)
        text.truncate()
        count += len(rows)
    click.echo(text.getvalue(), nl=False)
    return count


def print_for_people(result: Result) -> int:
    """Print a table of the first rows, or what has too many columns as a block for each, and how many rows there are;
    return their count.
    """
    from rich.console import Console
    from rich.markup import escape

    from qmq.cli.common.tables import print_pairs, print_table

    rows, more = list[list[Any]](), False
    for row in _rows(result):
        more = len(rows) == MOST_ROWS
        if more:
            break
        rows.append(row)
    cells = [list(map(_cell, row)) for row in rows]
    if _fits(cells, result.schema.names, Console().width):
        print_table(_table(cells, result.schema))
    else:
        for at, row in enumerate(cells):
            if at:
                click.echo()
            print_pairs([(escape(visible(name)), cell) for name, cell in zip(result.schema.names, row, strict=True)])
    shown = number(len(rows), "row")
    click.echo(f"the first {shown}; --json, --csv and --parquet FILE give all" if more else shown)
    return len(rows)


def write_parquet(result: Result, path: Path) -> int:
    """Write a Parquet file, which appears under its name when it is whole; return the count of rows. Raises
    InvalidOption for columns that such files cannot have, OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft, count = path.with_name(f".{path.name}.{os.getpid()}"), 0
    try:
        with draft.open("wb") as file, pq.ParquetWriter(file, result.schema, compression="zstd") as writer:
            for batch in result:
                writer.write_batch(batch)
                count += batch.num_rows
        draft.replace(path)
    except pa.ArrowNotImplementedError as error:
        raise InvalidOption(f"a Parquet file cannot have a column of the result ({error}); cast it to text") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return count


def _each(batches: Iterable[pa.RecordBatch], line: Callable[[list[Any]], str]) -> int:
    """Print a line for each row, a batch at a time; return the count of rows."""
    count = 0
    for batch in batches:
        lines = list(map(line, _rows([batch])))
        click.echo("\n".join(lines))
        count += len(lines)
    return count


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[list[Any]]:
    """Yield rows of values that JSON has."""
    for batch in batches:
        yield from map(list, zip(*map(_values, batch.columns), strict=True))


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column as JSON has them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":  # Python has no nanoseconds
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    if pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz == "UTC":
        column = pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ", locale="C")
    values: list[Any] = column.to_pylist()
    if pa.types.is_map(kind):
        values = [None if value is None else dict(value) for value in values]
        plain = all(map(_is_plain, (kind.key_type, kind.item_type)))
    else:
        plain = _is_plain(kind.value_type) if pa.types.is_list(kind) else _is_plain(column.type)
    return values if plain else [plain_value(value) for value in values]


def _is_plain(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it: times as texts, durations as seconds, bytes as text or in base64."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return text_or_base64(value)
    if isinstance(value, datetime):
        return iso(value) if value.tzinfo is not None else value.isoformat(timespec="microseconds")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(plain_value(name)): plain_value(part) for name, part in value.items()}
    if hasattr(value, "nanoseconds"):  # an interval of DuckDB
        seconds = value.days * _DAY_S + value.nanoseconds / 1e9
        return f"{value.months} months {seconds} s" if value.months else seconds
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return str(value)


def _text(value: Any) -> str:
    """Return a value for a line."""
    is_nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(part, list | dict) for part in value)
    )
    return visible(_json(value)) if is_nested else in_line(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_csv(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return _json(value) if isinstance(value, list | dict) else value


def _fits(cells: Sequence[Sequence[str]], names: Sequence[str], width: int) -> bool:
    """Whether a table has room for each column, where longer texts fold."""
    columns = zip(names, *cells, strict=True)
    return sum(min(max(map(len, column)), _FOLDED_WIDTH) + 2 for column in columns) <= width


def _table(rows: Sequence[Sequence[str]], schema: pa.Schema) -> Any:
    import pyarrow as pa
    from rich.box import HORIZONTALS
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=HORIZONTALS, pad_edge=False, collapse_padding=True)
    numeric = [pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
               for kind in schema.types]  # fmt: skip
    for name, is_number in zip(schema.names, numeric, strict=True):
        if is_number:
            table.add_column(escape(visible(name)), justify="right", no_wrap=True)
        else:
            table.add_column(escape(visible(name)), overflow="fold", min_width=_FOLDED_WIDTH)
    for row in rows:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    from rich.markup import escape

    text = _text(value)
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}… ({len(text):,} characters)"
    return escape(text)
