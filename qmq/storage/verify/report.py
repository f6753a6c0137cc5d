"""The findings of a check of a data directory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

#: Findings kept for one file; the others are counted.
KEPT_PER_FILE: Final = 20

Severity = Literal["fault", "note"]


class Finding(NamedTuple):
    """One finding. A fault is something bad that should be good; a note is worth knowing."""

    severity: Severity
    file: Path
    #: The byte offset in the file, if the finding has one.
    position: int | None
    what: str
    #: The advice: what to do.
    advice: str

    @property
    def place(self) -> str:
        """File and offset, for a line of text."""
        return str(self.file) if self.position is None else f"{self.file} at byte {self.position}"

    def __str__(self) -> str:
        return f"{self.severity}: {self.place}: {self.what}; {self.advice}"


@dataclass(slots=True)
class Count:
    """How much was read of one kind of file. Records are batches, rows, subjects, ..."""

    files: int = 0
    bytes: int = 0
    records: int = 0


@dataclass(slots=True)
class VerifyReport:
    """The outcome: ``findings`` in the order in which they were made, at most 20 a file; ``left_out`` counts the
    others.
    """

    directory: Path
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, Count] = field(default_factory=dict)
    faults: int = 0
    notes: int = 0
    left_out: int = 0
    #: Segments, or directories of them, that are missing, shorter than they were, or not the right ones.
    absent: list[Path] = field(default_factory=list)
    _per_file: Counter[Path] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def fault(self, file: Path, position: int | None, what: str, advice: str) -> None:
        """Add a fault: something is bad."""
        self.faults += 1
        self._keep(Finding("fault", file, position, what, advice))

    def note(self, file: Path, position: int | None, what: str, advice: str) -> None:
        """Add a note: something is worth knowing."""
        self.notes += 1
        self._keep(Finding("note", file, position, what, advice))

    def add(self, is_fault: bool, file: Path, position: int | None, what: str, advice: str) -> None:
        """Add a fault or a note."""
        (self.fault if is_fault else self.note)(file, position, what, advice)

    def count(self, kind: str, size: int, records: int = 0) -> None:
        """Count a file of a kind that was read."""
        known = self.counts.setdefault(kind, Count())
        known.files += 1
        known.bytes += size
        known.records += records

    def _keep(self, finding: Finding) -> None:
        self._per_file[finding.file] += 1
        if self._per_file[finding.file] <= KEPT_PER_FILE:
            self.findings.append(finding)
        else:
            self.left_out += 1
