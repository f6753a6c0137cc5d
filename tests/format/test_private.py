"""Messages of one group alone: private subjects, and batches for a handover."""

from __future__ import annotations

import pytest

from qmq.errors import BadBatch, InvalidName
from qmq.format.batch import BatchLimits, check_batch, stamp
from qmq.format.build import make_header
from qmq.format.copies.for_group import private_batch
from qmq.format.layout import KNOWN_FLAGS
from qmq.format.pieces import bad_messages, read_answer
from qmq.format.private import check_private, is_private, origin_subject, private_subject
from qmq.format.run import Run
from tests.net.scripted import SECRET, START_US, stored_batch

HEADER = make_header("key", ["red"], {"p": "v"}, expire_at=1_800_000_000_000_000)


def run_of(*bodies: bytes, headers: bool = True) -> Run:
    (run,), _ = read_answer(memoryview(stored_batch({"a.b": bodies}, header=HEADER if headers else None)))
    return run


def read_back(batch: bytes) -> Run:
    """Return the message as a consumer gets it from the broker that took the handover."""
    view = memoryview(bytearray(batch))
    checked = check_batch(view, BatchLimits(flags=KNOWN_FLAGS))
    stamp(
        view, checked, position=9_000, stored_at_us=START_US, partition=1, store_id=b"store2", secret=SECRET,
        first_sequences=3,
    )  # fmt: skip
    (run,), _ = read_answer(view)
    return run


def test_names() -> None:
    name = private_subject("g.1", "a.b")
    assert name == "~g.1~a.b"
    assert is_private(name)
    assert origin_subject(name) == "a.b"
    assert check_private(name, "g.1") == name
    assert origin_subject("a.b") == "a.b"
    assert not is_private("a.b")
    assert not is_private("~lost-7"), "it stands for a name that was lost"


@pytest.mark.parametrize("name", ["a.b", "~other~a.b", "~g~", "~g~a..b", "~g", "~g~~x"])
def test_subjects_of_other_groups_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_private(name, "g")


@pytest.mark.parametrize("headers", [True, False])
def test_a_copy_keeps_the_message(headers: bool) -> None:
    run = run_of(b"one", b"two", b"three", headers=headers)
    batch = private_batch(run, 1, "g", b"p" * 16, 7)
    with pytest.raises(BadBatch, match="flags"):
        check_batch(memoryview(batch), BatchLimits())
    checked = check_batch(memoryview(batch), BatchLimits(flags=KNOWN_FLAGS))
    assert (checked.header.producer_id, checked.header.producer_sequence) == (b"p" * 16, 7)
    made = read_back(batch)
    assert made.subject == "~g~a.b"
    assert made.body(0) == b"two"
    assert made.id(0) == run.id(1)
    assert made.header(0) == run.header(1)
    assert made.created_at_us == run.created_at_us
    assert not bad_messages(made), "its own checksum covers the origin id"


def test_a_second_handover_keeps_the_first_id_and_subject() -> None:
    run = run_of(b"one")
    again = read_back(private_batch(read_back(private_batch(run, 0, "g", b"p" * 16, 0)), 0, "g", b"p" * 16, 1))
    assert again.id(0) == run.id(0)
    assert again.subject == "~g~a.b"
