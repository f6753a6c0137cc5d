"""The decision table, over every combination of facts, and the facts about a directory."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import FileState
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import read_copies
from qmq.storage.recovery.decide import Action, Facts, Plan, RecoverySource, Tail, decide, facts_of
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, checkpoint, close_cleanly, kill, open_store

STATES = list(FileState)
TAILS = [Tail(bits) for bits in range(32)]
FLAGS = (False, True)
CASES = [Facts(*case) for case in product(STATES, STATES, FLAGS, STATES, STATES, FLAGS, FLAGS, TAILS)]


def opened() -> list[tuple[Facts, Plan]]:
    return [(facts, plan) for facts in CASES if (plan := decide(facts)).action is Action.OPEN]


def test_every_combination_is_decided_and_nothing_is_done_where_the_directory_is_not_opened() -> None:
    assert len(CASES) == 4 * 4 * 2 * 4 * 4 * 2 * 2 * 32
    for facts in CASES:
        plan = decide(facts)
        if plan.action is not Action.OPEN:
            assert plan[2:] == (False,) * 5, facts


def test_a_newer_version_of_any_file_refuses_whatever_else_there_is() -> None:
    for facts in CASES:
        newer = FileState.UNKNOWN in (facts.identity_a, facts.identity_b, facts.checkpoint, facts.checkpoint_before)
        assert (decide(facts).action is Action.REFUSE_UNKNOWN) is newer, facts


def test_one_good_copy_of_the_identity_is_enough() -> None:
    for facts, plan in ((facts, decide(facts)) for facts in CASES):
        if plan.action is Action.REFUSE_UNKNOWN:
            continue
        assert (plan.action is Action.OPEN) is (FileState.GOOD in (facts.identity_a, facts.identity_b)), facts


def test_a_directory_is_made_only_where_nothing_is() -> None:
    for facts in CASES:
        nothing = facts.identity_a is facts.identity_b is FileState.MISSING and not facts.populated
        newer = FileState.UNKNOWN in (facts.checkpoint, facts.checkpoint_before)
        assert (decide(facts).action is Action.CREATE) is (nothing and not newer), facts


def test_recovery_begins_at_the_latest_good_checkpoint_else_at_the_beginning() -> None:
    for facts, plan in opened():
        if facts.checkpoint is FileState.GOOD:
            assert plan.source is RecoverySource.CHECKPOINT
        elif facts.checkpoint_before is FileState.GOOD:
            assert plan.source is RecoverySource.CHECKPOINT_BEFORE
        else:
            assert plan.source is RecoverySource.WHOLE_LOG


def test_what_to_read_does_not_depend_on_the_tail_that_is_read_later() -> None:
    for facts, plan in opened():
        before = decide(facts._replace(tail=Tail.WHOLE))
        assert (plan.action, plan.source, plan.rewrite) == (before.action, before.source, before.rewrite)


def test_the_tail_is_written_again_unless_the_stop_was_clean() -> None:
    for facts, plan in opened():
        assert plan.rewrite is not facts.clean


def test_only_junk_at_the_very_end_is_cut() -> None:
    for facts, plan in opened():
        assert plan.cut is (Tail.JUNK in facts.tail)


def test_bad_and_lost_bytes_are_recorded() -> None:
    for facts, plan in opened():
        assert plan.record_holes is bool(facts.tail & (Tail.HOLES | Tail.BLIND | Tail.SHORT))


def test_positions_jump_where_some_that_were_seen_may_be_gone() -> None:
    for facts, plan in opened():
        power = not facts.clean and not facts.same_boot
        assert plan.jump is (power or bool(facts.tail & (Tail.SHORT | Tail.SEVERED)))


def test_sequences_are_raised_where_some_that_were_seen_may_be_gone() -> None:
    for facts, plan in opened():
        assert plan.raise_sequences is (plan.jump or Tail.BLIND in facts.tail)


@pytest.mark.parametrize(
    ("clean", "same_boot", "tail", "jump"),
    [
        (True, False, Tail.WHOLE, False),  # switched off after a clean stop
        (False, True, Tail.WHOLE, False),  # kill -9
        (False, True, Tail.JUNK, False),  # kill -9 in the middle of a write
        (False, True, Tail.HOLES, False),  # a bad batch that its header explains
        (False, False, Tail.WHOLE, True),  # loss of power, though all looks well
        (True, True, Tail.SHORT, True),  # somebody cut the log
    ],
)
def test_the_cases_one_would_ask_about(clean: bool, same_boot: bool, tail: Tail, jump: bool) -> None:
    good = FileState.GOOD
    assert decide(Facts(good, good, True, good, good, clean, same_boot, tail)).jump is jump


def seen(path: Path, boot_id: str = "") -> Facts:
    disk = Disk()
    checkpoints = [read_checkpoint(disk, path, number) for number in list_checkpoints(disk, path)[:2]]
    return facts_of(disk, path, read_copies(disk, path), checkpoints, boot_id)


def test_an_empty_directory(tmp_path: Path) -> None:
    facts = seen(tmp_path)
    assert {facts.identity_a, facts.identity_b, facts.checkpoint, facts.checkpoint_before} == {FileState.MISSING}
    assert (facts.populated, facts.clean, facts.same_boot) == (False, False, False)


@pytest.mark.parametrize(
    ("name", "populated"),
    [
        ("subjects", True),
        ("checkpoint-7", True),
        ("consumer-log/0/x", True),
        ("log-0/0000.messages", True),
        ("log-0/", False),  # made before the identity, which a crash may have kept from the disk
        ("log-9", False),
        ("notes.txt", False),
        ("lost+found/", False),
    ],
)
def test_what_makes_a_directory_one_with_data(tmp_path: Path, name: str, populated: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"x")
    assert seen(tmp_path).populated is populated


def test_a_store_that_was_stopped_and_one_that_was_killed(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk())
    Sender(store).send("a", b"1")
    checkpoint(store)
    checkpoint(store)
    kill(store)
    boot_id = FakeDisk().boot_id()
    facts = seen(tmp_path, boot_id)
    assert {facts.identity_a, facts.identity_b, facts.checkpoint, facts.checkpoint_before} == {FileState.GOOD}
    assert (facts.populated, facts.clean, facts.same_boot) == (True, False, True)
    assert not seen(tmp_path, "another").same_boot
    assert not seen(tmp_path, "").same_boot
    close_cleanly(open_store(tmp_path, FakeDisk()))
    assert seen(tmp_path, boot_id).clean
