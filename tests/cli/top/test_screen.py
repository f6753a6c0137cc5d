"""qmq/cli/top/screen.py: what the screen of ``qmq top`` shows at any size, and what keys do to it."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from qmq.cli.top.screen import COLUMNS, LETTERS, View, cut, short
from qmq.console.snapshot import Away, Snapshot, make_snapshot
from tests.console.made_up import at, broker_stats, group_stats

LONG = ("a-name-of-200-characters." * 8)[:199]
GROUPS = (
    group_stats(
        "billing", consumers=12, ready=12_345_678, oldest_unacked=at(-86_400 * 3), in_flight=999, in_retry=17, dead=3
    ),
    group_stats("nobody", ready=42, oldest_unacked=at(-300), ready_exact=False),
    group_stats("mails", consumers=1),
    group_stats(LONG, consumers=1),
    group_stats("名前" * 20, consumers=1),
)


def snapshot(*groups: object, **away: Away) -> Snapshot:
    return make_snapshot(1, at(100), [broker_stats(100, *(groups or GROUPS))], away, None)  # type: ignore[arg-type]


def names(view: View) -> list[str]:
    return [group.name for group in view.groups]


def press(view: View, *keys: str) -> View:
    for key in keys:
        view.press(key)
    return view


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200])
@pytest.mark.parametrize("height", [1, 3, 8, 24, 60])
def test_a_screen_has_its_size_whatever_the_names(width: int, height: int) -> None:
    view = View(snapshot(lost=Away(at(0), "[Errno 111] \x1b[31m refused")))
    for keys in ((), ("end",), ("/", "x"), ("?",)):
        lines = press(view, *keys).draw(width, height).plain.split("\n")
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        assert "\x1b" not in "".join(lines)


def test_eighty_columns_say_which_group_is_behind_since_when_and_why() -> None:
    lines = View(snapshot()).draw(80, 24).plain.split("\n")
    assert len(lines) == 24
    head = next(place for place, line in enumerate(lines) if line.startswith("GROUP"))
    assert lines[head].split()[1:] == [column.head for column in COLUMNS]
    assert lines[head + 1].split() == ["billing", "12.3M", "3d", "999", "17", "3", "0", "0", "0", "12"]
    assert lines[head + 2].split()[:3] == ["nobody", "42+", "6m"]
    assert "billing: the oldest message has waited for 3d; consumers are at work" in "\n".join(lines)
    assert lines[-1].endswith("1-5 of 5")
    assert "no consumer is there" in View(snapshot()).draw(200, 24).plain


def test_blocked_order_keys_are_named_below() -> None:
    group = group_stats(
        "pay", ready=3, oldest_unacked=at(0), consumers=2, blocked=3, blocked_slots=2, blocked_retrying=1
    )
    text = " ".join(View(snapshot(group)).draw(200, 24).plain.split())
    assert (
        "all wait: their keys are in flight or retry; 3 messages wait for 2 slots of order keys, 1 of them in retry"
        in text
    )
    assert View(snapshot(group)).draw(80, 24).plain.count("2 slots of order keys") == 1


def test_the_whole_name_of_the_chosen_group_is_shown_and_why_it_is_behind() -> None:
    view = View(snapshot(group_stats(LONG, ready=1, oldest_unacked=at(0)), group_stats("b")))
    text = press(view, "n").draw(80, 24).plain
    assert "\u2026" in text
    assert f"{LONG}: the oldest message has waited for 100s; no consumer is there" in text.replace("\n", "")


@pytest.mark.parametrize("letter", LETTERS)
def test_letters_and_arrows_sort_and_i_turns(letter: str) -> None:
    values = {"ready": 5, "in_flight": 5, "in_retry": 5, "dead": 5, "consumers": 5, "oldest_unacked": at(0)}
    then = broker_stats(0, group_stats("a"), group_stats("z"))
    more = group_stats("z", **values, delivered=9, acked=9, nacked=9)
    now = make_snapshot(
        2, at(1), [broker_stats(1, group_stats("a"), more)], {}, make_snapshot(1, at(0), [then], {}, None)
    )
    view = press(View(now), letter)
    assert names(view) == (["a", "z"] if letter == "n" else ["z", "a"])
    assert names(press(view, "i")) == (["z", "a"] if letter == "n" else ["a", "z"])
    assert names(press(view, "right", "left")) == (["a", "z"] if letter == "n" else ["z", "a"])
    assert view.sort == letter


def test_a_filter_is_typed_kept_and_taken_away() -> None:
    view = View(snapshot())
    assert names(press(view, "/", "B", "i", "l")) == ["billing"]
    assert "filter: Bil" in view.draw(80, 24).plain
    press(view, "q")
    assert not view.is_done, "a letter of the text"
    assert "no group has 'Bilq' in its name" in view.draw(80, 24).plain
    assert names(press(view, "backspace", "enter")) == ["billing"]
    assert "/Bil" in view.draw(80, 24).plain
    assert len(names(press(view, "escape"))) == 5
    assert len(names(press(view, "/", "x", "clear"))) == 5


def test_the_chosen_group_stays_chosen_until_it_is_gone() -> None:
    view = press(View(snapshot()), "down")
    assert view.groups[view.place].name == "nobody"
    view.take(
        snapshot(group_stats("a", oldest_unacked=at(0)), group_stats("b", oldest_unacked=at(1)), group_stats("nobody"))
    )
    assert view.place == 2
    view.take(snapshot(group_stats("a")))
    assert view.place == 0
    assert "a: reliable, follows shop." in view.draw(80, 24).plain


def test_pages_reach_the_last_of_ten_thousand_groups() -> None:
    view = View(snapshot(*(group_stats(f"g{number:05}") for number in range(10_000))))
    press(view, "n").draw(80, 24)
    view.press("page down")
    assert f"g{view.page:05}" in view.draw(80, 24).plain
    view.press("end")
    text = view.draw(80, 24).plain
    assert "g09999" in text
    assert text.endswith("of 10,000")
    view.press("home")
    assert "g00000" in view.draw(80, 24).plain


def test_a_pause_keeps_the_snapshot() -> None:
    view = press(View(snapshot()), "p")
    view.take(snapshot(group_stats("other")))
    assert "PAUSED" in view.draw(80, 24).plain
    assert "billing" in names(view)
    press(view, "p").take(snapshot(group_stats("other")))
    assert names(view) == ["other"]


def test_help_is_closed_by_any_key_and_q_quits() -> None:
    view = press(View(snapshot()), "?")
    assert "choose the column to sort by" in view.draw(80, 40).plain
    press(view, "x")
    assert "READY" in view.draw(80, 24).plain
    assert view.sort == "o"
    assert press(view, "q").is_done


def test_brokers_that_are_away_or_have_just_started_are_named() -> None:
    text = View(snapshot(lost=Away(at(88), "refused"))).draw(80, 24).plain
    assert "1 of 2 brokers" in text
    assert "AWAY lost for 12s: refused" in text
    started = make_snapshot(1, at(5), [broker_stats(5)], {}, None)
    text = View(started).draw(80, 24).plain
    assert "127.0.0.1:20881 started 5s ago" in text
    assert "no groups yet" in text
    many = {f"b{number}": Away(at(0), "refused") for number in range(9)}
    text = View(make_snapshot(1, at(5), [], many, None)).draw(80, 24).plain
    assert "and 7 brokers more" in text
    assert "no broker answers" in text


def test_counts_have_at_most_five_characters() -> None:
    for count, text in (
        (0, "0"), (0.04, "0.0"), (0.4, "0.4"), (9.96, "10"), (9_999, "9,999"), (9_999.6, "10.0k"), (99_949, "99.9k"),
        (99_950, "100k"), (999_499, "999k"), (999_500, "1.0M"), (12_345_678, "12.3M"), (5_000_000_000, "5.0G"),
    ):  # fmt: skip
        assert short(count) == text
    assert max(len(short(10**power - 0.1)) for power in range(15)) <= 5


def test_a_name_is_cut_in_its_middle() -> None:
    assert cut("abcdefghij", 7) == "abc\u2026hij"
    assert cut("abc", 5) == "abc  "
    for width in range(1, 30):
        assert cell_len(cut("名前" * 20, width)) == width
    assert cut("a\x1b[31mb", 20).strip() == "a\\x1b[31mb"
