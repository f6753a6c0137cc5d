"""How far an import is: a file that is written before each chunk of rows is sent, so that none is sent twice."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from qmq.errors import InvalidOption, StorageFailed
from qmq.sql.importing.levels import Level, RawPriority, levels_of
from qmq.sql.importing.rows import RowId

_VERSION: Final = 1


@dataclass
class Chunk:
    """Rows that are on their way: after a kill some of them may be stored."""

    #: What their messages say which rows they were.
    ids: list[str]
    subjects: list[str]
    #: How many of them are stored, from before an earlier kill.
    known: int
    #: The producer sequence of the first message of the others.
    first: int


@dataclass
class ImportState:
    """The progress of an import, as its state file keeps it."""

    name: str
    #: What it was begun with; another query under its name is refused.
    query: str
    begun_at: str = ""
    priorities: list[RawPriority] = field(default_factory=list)
    #: Of each group, the priorities and ids that its offsets had.
    offsets: dict[str, list[tuple[RawPriority, RowId]]] = field(default_factory=dict)
    allow_repeats: bool = False
    #: The messages of others that these groups do not get.
    others: int = 0
    #: The groups that were made.
    groups: list[str] = field(default_factory=list)
    #: The last id of each section that is through, and the count of rows up to it.
    after: dict[str, RowId] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    imported: int = 0
    rejected: int = 0
    #: The bytes of the file of rejected rows that belong to rows that are through.
    rejected_bytes: int = 0
    chunk: Chunk | None = None

    @property
    def levels(self) -> list[Level]:
        """The order in which the rows are sent."""
        offsets = {group: dict(pairs) for group, pairs in self.offsets.items()}
        return levels_of(self.priorities, offsets, allow_repeats=self.allow_repeats)

    @classmethod
    def begin(cls, name: str, query: str) -> Self:
        """Return that of an import that has not begun."""
        return cls(name, query, datetime.now(UTC).isoformat())


class ImportStateFile:
    """The file with the state of one import."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> ImportState | None:
        """Return what it has; None if there is none. Raises InvalidOption if it is no such file, StorageFailed."""
        try:
            fields: Any = json.loads(self.path.read_bytes())
            if fields.pop("version") != _VERSION:
                raise InvalidOption(f"{self.path} was written by another version of QMQ")
            fields["offsets"] = {
                group: [(priority, row_id) for priority, row_id in pairs] for group, pairs in fields["offsets"].items()
            }
            fields["chunk"] = None if fields["chunk"] is None else Chunk(**fields["chunk"])
            return ImportState(**fields)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed(f"{self.path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidOption(
                f"{self.path} is no state of an import; give another --state ({error!r:.80})"
            ) from error

    def save(self, state: ImportState) -> None:
        """Write it, and have it on the disk before this returns. Raises StorageFailed."""
        data = json.dumps({"version": _VERSION, **asdict(state)}, ensure_ascii=False).encode()
        draft = self.path.with_name(f"{self.path.name}.new")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise StorageFailed(
                f"the state of the import cannot be written to {self.path}: {error.strerror or error}; give another "
                "--state"
            ) from error
