"""qmq/cli/common/tables.py: tables on terminals of any width."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from rich.table import Table

from qmq.cli.common.tables import folded, print_table
from qmq.cli.manage import dead_letters, groups
from qmq.cli.operate import config
from qmq.net.client.admin.results import DeadLetter, GroupInfo
from qmq.settings import describe

LONG_AGO = datetime.now(UTC) - timedelta(days=3)
MANY = 123_456


def lines(table: Table, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(table, Console(width=width))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_number_is_cut_and_no_name_goes_at_any_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    info = GroupInfo("billing", "at_most_once", ["hotel."], 12, MANY, None, MANY, MANY, MANY, MANY, {})
    shown = lines(groups._table([info], width), width, capsys)
    text = "\n".join(shown)
    assert "…" not in text
    assert text.count("123,456") == 5
    for word in ("billing", "at_most_once", "hotel.", "group", "online", "ready"):
        assert word in text
    assert max(map(len, shown)) <= max(width, 90)


def test_what_fits_is_as_wide_as_the_terminal_lets_it_be(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", title="one")
    table.add_column("count", no_wrap=True)
    table.add_row("a-long-name-" * 5, "[bold]12,345[/]")
    assert max(map(len, lines(table, 40, capsys))) == 40
    assert "12,345" in "\n".join(lines(table, 5, capsys))


REASON = " ".join(f"ValueError: field {number} is no number;" for number in range(20))
LONG = "a-name-of-200-characters." * 8


def cells(shown: list[str], column: int) -> str:
    """Return the cells of a column, from where its header begins."""
    return "".join(line[column:] for line in shown).replace(" ", "")


@pytest.mark.parametrize("width", [20, 70, 76, 80, 85, 90, 120, 200])
@pytest.mark.parametrize("broker", ["", "10.0.0.1:20881"])
def test_no_reason_is_cut_at_any_width(width: int, broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    letters = [
        DeadLetter(1, "0" * 32, "hotel.order.created", 1, 16, 0, REASON, LONG_AGO, broker),
        DeadLetter(2, "1" * 32, LONG, 1, 16, 0, "short", LONG_AGO, "b:1"),
    ]
    shown = lines(dead_letters._table([dead_letters.ShownLetter(one, None) for one in letters], width), width, capsys)
    (header,) = [line for line in shown if "reason" in line]
    found = cells(shown, header.index("reason"))
    assert REASON.replace(" ", "") in found
    assert LONG in "".join(line[: header.index("died")].strip() for line in shown)
    assert "\u2026" not in "\n".join(shown)


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_number_of_the_settings_is_cut(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    config._print_table(describe())
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    for setting in describe():
        assert config._shown_default(setting) in shown
        for word in re.findall(r"[\d,]{5,}", config._shown_range(setting)):
            assert word in shown


def test_no_control_character_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    letter = DeadLetter(1, "0" * 32, "a", 1, 1, 0, "\x1b[2Jgone\r\n[red]x[/]\x9b", LONG_AGO)
    shown = "\n".join(lines(dead_letters._table([dead_letters.ShownLetter(letter, None)], 200), 200, capsys))
    assert "\\x1b[2Jgone\\r\\n[red]x[/]\\x9b" in shown


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("see `qmq groups show g` now", 12, ["see", "`qmq groups show g`", "now"]),
        ("a name-of-20-characters b", 8, ["a", "name-of-20-characters", "b"]),
        ("run `a b`, then `c`", 11, ["run `a b`,", "then `c`"]),
        ("a lone ` is a word", 6, ["a lone", "` is a", "word"]),
        ("", 6, [""]),
    ],
)
def test_commands_and_names_are_not_broken(text: str, width: int, shown: list[str]) -> None:
    assert folded(text, width).splitlines() == [line for line in shown if line or text]
