"""Names: what may be a subject, a prefix, a group, a consumer."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidName
from qmq.names import MAX_NAME_BYTES, check_consumer, check_group, check_prefix, check_subject

Check = Callable[[str], str]
CHECKS = [check_subject, check_group, check_consumer, check_prefix]
LETTERS = string.ascii_letters + string.digits + "_-"

segments = st.text(LETTERS, min_size=1, max_size=12)
names = st.lists(segments, min_size=1, max_size=8).map(".".join)

BAD = [
    ".", "..", "...", ".a", "a..b", "../a", "a/b", "a\\b", "a b", " a", "a\n", "a\0", "a:b", "*", "a.*", "~group",
    "hôtel", "a.\uff42", "٣", "a\u200b", "%2e%2e", "a" * (MAX_NAME_BYTES + 1), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@given(name=names)
def test_good_names_come_back_as_they_are(check: Check, name: str) -> None:
    assert check(name) is name


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_with_the_rule(check: Check, name: str) -> None:
    with pytest.raises(InvalidName, match=r"use ASCII letters, digits, '_' and '-' in segments joined by single dots"):
        check(name)


@pytest.mark.parametrize("check", [check_subject, check_group, check_consumer])
@pytest.mark.parametrize("name", ["", "a."])
def test_only_a_prefix_may_be_empty_or_end_with_a_dot(check: Check, name: str) -> None:
    assert check_prefix(name) == name
    with pytest.raises(InvalidName):
        check(name)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [None, 5, b"a", ["a"]])
def test_what_is_not_a_str_is_refused_by_its_kind(check: Check, name: object) -> None:
    with pytest.raises(InvalidName, match=f"must be a str, not {type(name).__name__}"):
        check(name)  # type: ignore[arg-type]


def test_length_counts_to_the_last_byte() -> None:
    longest = "a" * MAX_NAME_BYTES
    for check in CHECKS:
        assert check(longest) == longest
    assert check_prefix("a" * (MAX_NAME_BYTES - 1) + ".")
    with pytest.raises(InvalidName):
        check_prefix("a" * MAX_NAME_BYTES + ".")


def test_an_error_names_the_kind_and_cuts_a_long_name() -> None:
    with pytest.raises(InvalidName, match=r"^group 'x+'\.\.\. has 100000 characters; use") as caught:
        check_group("x" * 100_000)
    assert len(str(caught.value)) < 300


@given(st.text(max_size=300))
def test_whatever_passes_is_safe_as_a_file_name(name: str) -> None:
    for check in CHECKS:
        try:
            check(name)
        except InvalidName:
            continue
        assert len(name.encode()) <= MAX_NAME_BYTES
        assert set(name) <= set(LETTERS + ".")
        assert ".." not in name
        assert not name.startswith(".")
