"""Batches of restored messages: the same messages under their ids, marked as replayed, in any cut."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import MessageTooLarge
from qmq.format.batch import BatchLimits, check_batch, parse_header, runs_of
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.format.copies.due import cut_due, join_singles, single_of
from qmq.format.copies.restored import Part, ids_of, numbered, restored_batches
from qmq.format.layout import (
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_TAGS,
    KNOWN_FLAGS,
    MESSAGE_ID,
    RUN_REPLAYED,
)
from qmq.format.pieces import Run, bad_messages, stored_runs
from tests.format.contents import CREATED_US, STORE, Contents, contents, stored
from tests.format.copies.test_due import delayed
from tests.format.copies.test_due_joining import one
from tests.format.copies.test_due_joining import stored as stored_due

LIMITS = BatchLimits(4 << 20, KNOWN_FLAGS & ~HAS_DELIVER_AT, RUN_REPLAYED)
RUN = b"r" * 16
Message = tuple[str, str, bytes, str]


def messages_of(run: Run, subject: str) -> list[Message]:
    return [(str(run.id(at)), subject, run.body(at), repr(run.header(at))) for at in range(run.count)]


def back(parts: list[Part], most_bytes: int = 1 << 20) -> list[Message]:
    """Return the messages of batches made of *parts*, which a broker takes and a reader finds sound."""
    found, following = list[Message](), 7
    for batch in restored_batches(parts, CREATED_US, most_bytes):
        assert len(batch.buffer) <= most_bytes
        numbered(batch.buffer, RUN, following)
        view = memoryview(batch.buffer)
        header = check_batch(view, LIMITS).header
        assert (header.producer_id, header.producer_sequence, header.created_at_us) == (RUN, following, CREATED_US)
        assert not header.flags & (HAS_DELIVER_AT | HAS_EXPIRE_AT)
        assert header.flags & HAS_ORIGIN_ID
        assert (runs_of(view, header)["flags"] == RUN_REPLAYED).all()
        following += batch.messages
        runs = stored_runs(view, parse_header(view))
        assert batch.first == MESSAGE_ID.pack(*runs[0].id(0))
        for run in runs:
            assert bad_messages(run) == []
            found += messages_of(run, run.subject)
    assert following - 7 == len(found)
    return found


def runs_in(view: memoryview) -> list[Run]:
    return stored_runs(view, parse_header(view))


@given(contents())
def test_they_are_the_same_messages_under_their_ids(given: Contents) -> None:
    runs = runs_in(stored(given))
    wanted = [message for run in runs for message in messages_of(run, f"to.{run.subject}")]
    assert back([(f"to.{run.subject}", run) for run in runs]) == wanted


@given(contents(), st.integers(1_400, 3_000))
def test_batches_fit_the_brokers_limit(given: Contents, most_bytes: int) -> None:
    runs = runs_in(stored(given))
    wanted = [message for run in runs for message in messages_of(run, run.subject)]
    assert sorted(back([(run.subject, run) for run in runs], most_bytes)) == sorted(wanted)


@given(contents())
def test_all_messages_can_get_one_subject(given: Contents) -> None:
    runs = runs_in(stored(given))
    wanted = [message for run in runs for message in messages_of(run, "one")]
    assert back([("one", run) for run in runs]) == wanted


@given(contents(max_runs=3), st.data())
def test_parts_of_runs_keep_their_ids(given: Contents, data: st.DataObject) -> None:
    parts = list[Part]()
    for run in runs_in(stored(given)):
        start = data.draw(st.integers(0, run.count - 1))
        parts.append((run.subject, run.slice(start, data.draw(st.integers(start + 1, run.count)))))
    assert back(parts) == [message for subject, run in parts for message in messages_of(run, subject)]


@pytest.mark.parametrize("counts", [{"a": 1}, {"a": 20}, {"a": 1, "b": 30, "c": 1}])
def test_delayed_messages_and_copies_keep_their_ids_without_times(counts: dict[str, int]) -> None:
    view = delayed(counts, expire_at=5_000_000)
    runs = runs_in(view)
    assert runs[0].flags & HAS_DELIVER_AT
    assert runs[0].flags & HAS_EXPIRE_AT
    wanted = [message for run in runs for message in messages_of(run, run.subject)]
    assert back([(run.subject, run) for run in runs]) == wanted
    due = cut_due(view, 0, 1 << 20, 0x8000)
    assert due is not None
    copies = runs_in(memoryview(due.buffer))
    assert copies[0].flags & HAS_ORIGIN_ID
    made = back([(run.subject, run) for run in copies])
    assert made == [message for run in copies for message in messages_of(run, run.subject)]


def test_a_message_too_large_for_a_batch_is_refused() -> None:
    built = build_batch([RunContent("a", [b"x" * 5_000], None)], created_at_us=0, producer_id=RUN, producer_sequence=0)
    (run,) = runs_in(memoryview(b"".join(built)))
    with pytest.raises(MessageTooLarge, match="max_frame_bytes"):
        list(restored_batches([("a", run)], 0, 4_000))


def test_ids_are_those_of_each_message() -> None:
    headers = [make_header(f"k{at}", ["t"]) for at in range(5)] + [MessageHeader(b"", 0, 0)]
    built = build_batch([RunContent("a", [b"x"] * 6, headers)], created_at_us=0, producer_id=RUN, producer_sequence=0)
    (run,) = runs_in(memoryview(b"".join(built)))
    assert run.flags == HAS_TAGS | HAS_KEY_HASH
    ids = ids_of(run)
    assert list(chain(ids["position"].tolist())) == list(range(6))
    assert [bytes(one) for one in ids] == [MESSAGE_ID.pack(*run.id(at)) for at in range(6)]


@pytest.mark.parametrize("cut", [(0, 6), (2, 3), (1, 5)])
def test_messages_that_fell_due_together_keep_their_own_times_of_creation(cut: tuple[int, int]) -> None:
    singles = [
        single_of(one(number, key="k" if number else None, created_us=CREATED_US + number)) for number in range(6)
    ]
    (run,) = runs_in(stored_due(join_singles([single for single in singles if single is not None], STORE, 0x8000)))
    part = run.slice(*cut)
    assert back([("a", part)]) == messages_of(part, "a")
    (batch,) = restored_batches([("a", part)], CREATED_US, 1 << 20)
    (made,) = runs_in(memoryview(batch.buffer))
    assert [made.created_us(index) for index in range(made.count)] == [CREATED_US + at for at in range(*cut)]
