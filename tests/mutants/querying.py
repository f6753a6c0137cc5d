"""The safeguards of queries in SQL, and of imports."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_FILTERS: Final = ("tests/sql/query/test_filters.py",)
_QUERIES: Final = ("tests/sql/query/test_database.py",)
_IMPORTS: Final = ("tests/sql/importing/test_import.py",)
_LEVELS: Final = ("tests/sql/importing/test_levels.py",)

OF_SQL: Final = (
    Mutant(
        "spare nothing for a filter that is read as another one",
        "_limits_of",
        instead("limits if made.equals(expression) else {}", "limits"),
        _FILTERS,
    ),
    Mutant(
        "apply a filter to what was read",
        "RowFilter.applied",
        instead("table.filter(self.expression)", "table"),
        _FILTERS,
    ),
    Mutant(
        "open no file for a query",
        "qmq/sql/query/database:_SETTINGS",
        instead('"false"', '"true"', at=4),
        _QUERIES,
    ),
    Mutant(
        "run a SELECT and nothing else",
        "QueryDatabase._check",
        never("kind != duckdb.StatementType.SELECT"),
        _QUERIES,
    ),
    Mutant(
        "find a message with two keys once",
        "LiveTables._found",
        instead("key in (None, message.key)", "True"),
        _QUERIES,
    ),
    Mutant(
        "count no broker that is away as empty",
        "LiveTables._check",
        never("missed", at=1),
        _QUERIES,
    ),
    Mutant(
        "note the rows of a chunk before they are sent",
        "ImportRun._send",
        skip("self._file.save(state)", at=1),
        _IMPORTS,
    ),
    Mutant(
        "send no row that was stored before a kill",
        "ImportRun._send",
        never("self._id_text(section, row.id) in self._stored"),
        _IMPORTS,
    ),
    Mutant(
        "send nothing that nobody could look for after a kill",
        "ImportRun._check_rights",
        never("hidden", at=1),
        _IMPORTS,
    ),
    Mutant(
        "begin no import anew whose state is missing",
        "ImportRun._check_new",
        never("client.last_sequence() is not None"),
        _IMPORTS,
    ),
    Mutant(
        "go on with no other query",
        "ImportRun._check_same",
        never("state.name != self._name or state.query != self._query"),
        _IMPORTS,
    ),
    Mutant(
        "begin no group behind what others have sent",
        "ImportRun._check_others",
        never("others > state.others and not skip_others"),
        _IMPORTS,
    ),
    Mutant(
        "leave no row without an id out",
        "RowSource.check_ids",
        never("count", at=1),
        _IMPORTS,
    ),
    Mutant(
        "take no two rows for one",
        "RowSource.rows",
        never("row_id == before"),
        _IMPORTS,
    ),
    Mutant(
        "say which rows came late",
        "ImportRun._late",
        instead("max(0, self._source.count(section, after) - self._state.passed.get(section.name, 0))", "0"),
        _IMPORTS,
    ),
    Mutant(
        "begin no group where others cross it",
        "levels:_chain",
        never("crossed and not allow_repeats"),
        _LEVELS,
    ),
)
