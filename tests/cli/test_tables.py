"""qmq/cli/tables.py: tables on terminals of any width."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from qmq.cli import groups
from qmq.cli.tables import print_table
from qmq.net.admin import GroupInfo

MANY = 123_456


def lines(table: Table, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(table, Console(width=width))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_number_is_cut_and_no_name_goes_at_any_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    info = GroupInfo("billing", "reliable", ["hotel."], 12, MANY, None, MANY, MANY, MANY, MANY, {})
    shown = lines(groups._table([info]), width, capsys)
    text = "\n".join(shown)
    assert "…" not in text
    assert text.count("123,456") == 5
    for word in ("billing", "(reliable)", "hotel.", "group", "online", "ready"):
        assert word in text
    assert max(map(len, shown)) <= max(width, 90)


def test_what_fits_is_as_wide_as_the_terminal_lets_it_be(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", title="one")
    table.add_column("count", no_wrap=True)
    table.add_row("a-long-name-" * 5, "[bold]12,345[/]")
    assert max(map(len, lines(table, 40, capsys))) == 40
    assert "12,345" in "\n".join(lines(table, 5, capsys))
