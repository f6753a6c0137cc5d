"""Records that are applied again at a start, where subjects have other numbers than when they were written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Subscribe
from qmq.format.build import RunContent, make_header
from tests.broker.harness import Driven, bodies_of
from tests.broker.test_admin import ask


def send_to(driven: Driven, partition: int, subject: str, body: bytes) -> None:
    driven.broker.avoid(frozenset({1 - partition}))
    assert driven.send(subject, body).partition == partition


@pytest.mark.parametrize("prefix", ["old", ""])
@pytest.mark.parametrize("begins_by", ["start", "seek"])
def test_a_start_at_a_time_holds_for_subjects_that_get_other_numbers(
    tmp_path: Path, prefix: str, begins_by: str
) -> None:
    """A start after a kill numbers subjects that no checkpoint has anew: those of the first partition come first."""
    driven = Driven(tmp_path, partitions=2)
    send_to(driven, 1, "old", b"before")
    driven.subscribe(prefix, start="new" if begins_by == "start" else None)
    if begins_by == "seek":
        ask(driven, "seek_group", group="g", to="new")
    send_to(driven, 0, "late", b"after")
    driven.store.close(clean=False)
    driven.open()
    (row,) = ask(driven, "groups", group="g")["rows"]
    assert row["ready"] == (1 if prefix == "" else 0)
    command = Subscribe(1, driven.request(), "g", (prefix,), "c", None)
    subscription = driven.do(command)[-1].subscription  # type: ignore[union-attr]
    assert bodies_of(driven.pull(subscription)) == ([b"after"] if prefix == "" else []), "nothing from before the start"
    send_to(driven, 0, "old", b"more")
    assert bodies_of(driven.pull(subscription)) == [b"more"]
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a."])
@pytest.mark.parametrize("begins_by", ["start", "seek"])
def test_a_start_at_a_sequence_holds_for_subjects_that_get_other_numbers(
    tmp_path: Path, prefix: str, begins_by: str
) -> None:
    driven = Driven(tmp_path, partitions=2)
    for number in range(3):
        send_to(driven, 1, "a.old", b"old %d" % number)
    driven.subscribe(prefix, start=("sequence", 2) if begins_by == "start" else None)
    if begins_by == "seek":
        ask(driven, "seek_group", group="g", to=["sequence", 2])
    for number in range(3):
        send_to(driven, 0, "a.late", b"late %d" % number)
    driven.store.close(clean=False)
    driven.open()
    for _ in range(2):
        (row,) = ask(driven, "groups", group="g")["rows"]
        assert row["ready"] == 4
        driven.restart()
    command = Subscribe(1, driven.request(), "g", (prefix,), "c", None)
    subscription = driven.do(command)[-1].subscription  # type: ignore[union-attr]
    assert sorted(bodies_of(driven.pull(subscription))) == [b"late 0", b"late 1", b"late 2", b"old 2"]
    driven.close()


@pytest.mark.parametrize("begins_by", ["start", "seek"])
def test_a_start_at_a_sequence_holds_behind_delayed_messages(tmp_path: Path, begins_by: str) -> None:
    """A delayed message gives its subject a number. A start gives one to what is in the message log first."""
    driven = Driven(tmp_path)
    late = make_header(deliver_at=driven.now.wall_us + 1_000_000_000)
    driven.send_runs(RunContent("a.delayed", [b"1"], [late]))
    for number in range(3):
        driven.send("a.old", b"old %d" % number)
    driven.subscribe("a.", start=("sequence", 2) if begins_by == "start" else None)
    if begins_by == "seek":
        ask(driven, "seek_group", group="g", to=["sequence", 2])
    for number in range(3):
        driven.send("a.late", b"late %d" % number)
    driven.store.close(clean=False)
    driven.open()
    subscription = driven.subscribe("a.")
    assert sorted(bodies_of(driven.pull(subscription))) == [b"late 0", b"late 1", b"late 2", b"old 2"]
    driven.close()


@pytest.mark.parametrize("then", ["nothing", "checkpoint", "restart", "handed out"])
def test_a_wider_prefix_begins_at_the_first_message_after_a_kill_too(tmp_path: Path, then: str) -> None:
    driven = Driven(tmp_path)
    for number in range(4):
        driven.send("a.x", b"%d" % number)
    driven.subscribe("a.", start=("sequence", 2))
    driven.store.close(clean=False)
    driven.open()
    if then == "handed out":
        assert bodies_of(driven.pull(driven.subscribe("a."), max_count=1)) == [b"2"]
    elif then == "checkpoint":
        driven.checkpoint()
    elif then == "restart":
        driven.restart()
    (row,) = ask(driven, "groups", group="g")["rows"]
    assert row["ready"] == (1 if then == "handed out" else 2)
    subscription = driven.subscribe("", connection=2)
    expected = [b"3"] if then == "handed out" else [b"0", b"1", b"2", b"3"]
    assert bodies_of(driven.pull(subscription, connection=2)) == expected
    driven.close()


def test_a_group_is_never_there_without_the_settings_that_it_was_made_with(tmp_path: Path) -> None:
    """Whatever of its records is on disk when the power fails: the next subscription would not give them again."""
    driven = Driven(tmp_path / "whole", segment_bytes=1 << 16, max_frame_bytes=4_096)
    given = (("tags", ("red",)), ("max_attempts", 7))
    assert driven.do(Subscribe(1, driven.request(), "g", ("a.x", "b."), "c", None, settings=given)) or driven.wanted
    (log,) = (tmp_path / "whole" / "pulls").glob("*.pulls")
    written = len(log.read_bytes().rstrip(b"\0"))
    driven.store.close(clean=False)
    seen = set()
    for size in range(0, written + 8, 8):
        copy = tmp_path / f"copy-{size}"
        shutil.copytree(tmp_path / "whole", copy)
        with (copy / "pulls" / log.name).open("r+b") as file:
            file.truncate(size)
            file.truncate(log.stat().st_size)
        again = Driven(copy, segment_bytes=1 << 16, max_frame_bytes=4_096)
        found = again.broker.groups.get("g")
        seen.add(found is not None)
        if found is not None:
            assert found.ledger is not None
            assert (found.ledger.settings.tags, found.ledger.settings.max_attempts) == (("red",), 7)
        again.store.close(clean=False)
    assert seen == {False, True}
