"""Reports: all findings are counted, a bounded number is kept."""

from __future__ import annotations

from pathlib import Path

from qmq.storage.verify.report import KEPT_PER_FILE, Count, VerifyReport


def test_findings_are_counted_and_bounded_by_file() -> None:
    report = VerifyReport(Path("d"))
    assert report.is_good
    for position in range(KEPT_PER_FILE + 5):
        report.note(Path("d/a"), position, "is odd", "nothing")
    assert report.is_good
    report.fault(Path("d/b"), None, "is bad", "put it back")
    assert (report.notes, report.faults, report.left_out, report.is_good) == (KEPT_PER_FILE + 5, 1, 5, False)
    assert str(report.findings[0]) == "note: d/a at byte 0: is odd; nothing"
    assert str(report.findings[-1]) == "fault: d/b: is bad; put it back"


def test_files_are_counted_by_kind() -> None:
    report = VerifyReport(Path("d"))
    report.count("order", 10)
    report.count("order", 20, 3)
    assert report.counts == {"order": Count(2, 30, 3)}
