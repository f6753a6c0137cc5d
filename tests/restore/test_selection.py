"""The selection of messages, and their new subjects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidName, InvalidOption
from qmq.format.private import private_subject
from qmq.restore.selection import RestoreSelection

names = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join)


@given(names, st.one_of(st.just(""), names, names.map(lambda name: name + ".")))
def test_subjects_are_taken_as_in_a_subscription(subject: str, prefix: str) -> None:
    parts, wanted = subject.split("."), prefix.rstrip(".").split(".") if prefix else []
    is_taken = parts == wanted if prefix and not prefix.endswith(".") else parts[: len(wanted)] == wanted
    if prefix.endswith("."):
        is_taken = is_taken and len(parts) > len(wanted)
    assert RestoreSelection(prefix).takes(subject) == is_taken
    assert not RestoreSelection(prefix).takes(private_subject("g", subject))


def test_what_they_become() -> None:
    assert RestoreSelection().subject_for("a.b") == "a.b"
    assert RestoreSelection(to_subject="c").subject_for("a.b") == "c"
    assert RestoreSelection(group="g").subject_for("a.b") == "~g~a.b"


def test_other_selections_have_other_names() -> None:
    several = [
        RestoreSelection(), RestoreSelection("a."), RestoreSelection("a"), RestoreSelection(since_us=1),
        RestoreSelection(until_us=1), RestoreSelection(to_subject="a"), RestoreSelection(group="a"),
        RestoreSelection(with_replayed=True),
    ]  # fmt: skip
    assert len({one.digest() for one in several}) == len(several)
    assert RestoreSelection("a.").digest() == RestoreSelection("a.").digest()


@pytest.mark.parametrize(
    "wrong",
    [
        RestoreSelection("a..b"), RestoreSelection(to_subject="a."), RestoreSelection(group="~g"),
        RestoreSelection(to_subject="a", group="g"), RestoreSelection(since_us=7, until_us=7),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: RestoreSelection) -> None:
    with pytest.raises((InvalidName, InvalidOption)):
        wrong.check()
