"""The tables of the command line at 80, 120 and 200 columns, as files that show the rows: tests/cli/common/layouts.

`python -m tests.cli.common.test_layouts` writes them; look at each one that changes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import click
import pytest
from rich.console import Console
from rich.table import Table

import qmq.testing
from qmq.cli.common.tables import print_pairs, print_table
from qmq.cli.manage import consumers, dead_letters, doctor, groups, stats, subjects
from qmq.net.client.admin.results import ConsumerInfo, DeadLetter, GroupInfo, SubjectInfo

HERE: Final = Path(__file__).parent / "layouts"
WIDTHS: Final = (80, 120, 200)

AGO: Final = datetime.now(UTC) - timedelta(days=3, hours=1)
LONG: Final = ("a-name-of-200-characters." * 8)[:199]
MANY: Final = 12_345_678
REASON: Final = "TimeoutError: https://bank.example/charge [POST]: \x1b[31mno answer"


def group(name: str, **changed: object) -> GroupInfo:
    fields: dict[str, object] = {
        "mode": "reliable", "follows": ["shop.order."], "consumers": 2, "ready": 0, "oldest": None, "in_flight": 0,
        "in_retry": 0, "dead": 0, "skipped": 0, "broker": "10.0.0.1:20881",
        "settings": {"max_attempts": 16, "retry_delays": [1.0, 10.0, 300.0], "ack_deadline": 5_400.0, "tags": []},
    }  # fmt: skip
    return GroupInfo(name=name, **{**fields, **changed})  # type: ignore[arg-type]


GROUPS: Final = [
    group("billing", consumers=12, ready=MANY, oldest=AGO, in_flight=999_999, in_retry=17, dead=3),
    group(
        "analytics", follows=["shop.order.", "shop.mail.", "hotel.booking.", "hotel.room."], ready=5, ready_exact=False
    ),
    group("nobody", consumers=0, ready=42, oldest=AGO, follows=[""]),
    group(LONG, follows=[LONG]),
]
TWO_BROKERS: Final = [
    group("cache@web-1", mode="broadcast", delayed=1),
    group("once", mode="at_most_once", skipped=7, broker="10.0.0.2:20881"),
]
CONSUMERS: Final = [
    ConsumerInfo("billing-1", 1, True, MANY, AGO, AGO, 3.2, 12.5),
    ConsumerInfo("a-host-with-a-long-name-4711-1a2b3c4d", 1, False, 4, AGO, None, 99_999, 0.0),
    ConsumerInfo(LONG, 1, True, 0, None, None, 0.1, 0.0),
]
SUBJECTS: Final = [
    SubjectInfo("shop.order.paid", 1_000_000, 2_000_000, 999_999, 12, "a:1"),
    SubjectInfo(LONG, 0, 1, 1, 0, "a:1"),
]
LETTERS: Final = [
    DeadLetter(1, "7f00000155790000056cf2f2c7008040", "shop.order.paid", 1, 16, 0, REASON, AGO, "a:1"),
    DeadLetter(2, None, None, None, 1, 3, "unreadable", AGO, "a:1"),
    DeadLetter(3, "7f00000155790000056cf2f2c7008041", LONG, 1, 16, 0, REASON, AGO, "a:1"),
]
KEYED: Final = [
    dead_letters.ShownLetter(letter, qmq.testing.message(b"", key=key))  # type: ignore[arg-type]  # has a key, too
    for letter, key in zip(LETTERS, ("order-4421", None, LONG), strict=True)
]
AILMENTS: Final = [
    doctor.Ailment(
        "error", "disk_full", "a:1", "the disk of /var/lib/qmq is full: sends are refused until you free some"
    ),
    doctor.Ailment(
        "warning", "dead_letters", "a:1", "group billing has 3 dead letters: see `qmq dead-letters list billing`"
    ),
    doctor.Ailment("warning", "lag", "a:1", f"group {LONG} lags: see with `qmq consumers {LONG}` what holds it up"),
]

STATS: Final = qmq.BrokerStats(
    version="0.1.0", python="3.11.7", store_id="7f0000015579", at=datetime.now(UTC), started_at=AGO, uptime=262_800.0,
    subject_count=100_000, group_count=3, connections=41, requests=MANY, waiting_pulls=12, waiting_syncs=0, delayed=7,
    received_bytes=9_876_543_210, handed_messages=MANY, handed_bytes=9_876_543_210, log_bytes=98_765_432_100,
    segments=93,
    file_bytes={"message_log": 98_765_432_100, "consumer_log": 123_456_789, "other": 0},
    refused={"message_too_large": 3, "storage_full": 1_200}, damage=0, failed_checkpoints=0,
    failed_syncs=0, scrubbed_bytes=0, scrub_rounds=0, dropped_segments=0, dropped_messages=0, lost_messages=0,
    skipped_messages=0, unique_texts=1_234_567, forgotten_texts=0, duplicate_messages=12, checkpoint_age=0.4,
    cpu=12_345.6, memory_bytes=91_234_567, files=120, threads=11, disks=[],
    durations={
        "turn": qmq.Histogram(1_000, 1.0, [(0.000256, 10), (0.000512, 900), (0.001024, 990), (0.002048, 1_000)]),
        "send": qmq.Histogram(1_000, 1.0, [(0.000128, 700), (0.016384, 995), (1.048576, 1_000)]),
        "fsync": qmq.Histogram(0, 0.0, [(0.001024, 0)]),
    },
    subjects=[qmq.SubjectStats("shop", 12, MANY, 999), qmq.SubjectStats(LONG, 99_988, MANY, MANY)],
    ended=qmq.GroupTotals(*[0] * 9), broker="10.0.0.1:20881",
    groups=[
        qmq.GroupStats(
            MANY, 20, MANY, 12, 1, 0, 4, 3, 3, name, AGO, "reliable", ["shop."], 2, ready, ready < 9, oldest, 17,
            oldest, oldest, 3.0, AGO, 5, 0, AGO, None, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0
        )
        for name, ready, oldest in (("billing", MANY, AGO), (LONG, 5, AGO), ("idle", 0, None))
    ],
)  # fmt: skip

#: What draws each file, for a console of some width.
LAYOUTS: Final[dict[str, Callable[[int], Table | str] | list[tuple[str, str]]]] = {
    "groups": lambda width: groups._table(GROUPS, width),
    "groups-of-two-brokers": lambda width: groups._table(TWO_BROKERS, width),
    "group": groups._pairs(GROUPS[0]),
    "consumers": lambda width: consumers._table(CONSUMERS, width),
    "subjects": lambda width: subjects._table(SUBJECTS, width),
    "dead-letters": lambda width: dead_letters._listed([dead_letters.ShownLetter(one, None) for one in LETTERS], width),
    "dead-letters-with-keys": lambda width: dead_letters._listed(KEYED, width),
    "stats": stats._pairs(STATS),
    "doctor": lambda width: doctor._lines(AILMENTS, width),
}


def drawn(name: str, width: int) -> str:
    """Return a layout as lines without the spaces at their ends."""
    console, layout = Console(width=width, file=io.StringIO(), color_system=None), LAYOUTS[name]
    if isinstance(layout, list):
        stable = [(one, text.split(", at 2")[0]) for one, text in layout]  # without a time that changes
        print_pairs(stable, console)
    elif isinstance(table := layout(width), str):
        console.file.write(click.unstyle(table))
    else:
        print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_looks_as_it_did_when_somebody_looked(name: str, width: int) -> None:
    assert drawn(name, width) == (HERE / f"{name}-{width}.txt").read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_fits_the_terminal_and_nothing_is_cut(name: str, width: int) -> None:
    text = drawn(name, width)
    longest = max(map(len, text.splitlines()))
    assert longest <= width or name in ("doctor", "dead-letters", "dead-letters-with-keys"), (
        "the terminal folds what must not be broken"
    )
    assert "\u2026" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [120, 200])
def test_a_group_is_one_line_where_there_is_room(width: int) -> None:
    lines = drawn("groups", width).splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["billing", "analytics", "nobody"]
    lines = drawn("groups-of-two-brokers", width).splitlines()
    assert [line.split()[0] for line in lines[-3:-1]] == ["cache@web-1", "once"]


if __name__ == "__main__":
    for one in LAYOUTS:
        for columns in WIDTHS:
            (HERE / f"{one}-{columns}.txt").write_text(drawn(one, columns), "utf-8")
