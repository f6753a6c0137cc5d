"""Messages that were sent one by one and are due together become one batch, each unchanged."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.format.batch import check_batch, parse_header, stamp, validate_stored
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.copies.due import DUE_PRODUCER, Due, join_singles, single_of
from qmq.format.ids import MessageId
from qmq.format.layout import HAS_CREATED_AT, HAS_DELIVER_AT, HAS_EXPIRE_AT, HAS_KEY_HASH, HAS_ORIGIN_ID, HAS_TAGS
from qmq.format.pieces import StoredBatch, bad_messages, read_answer
from tests.format.contents import CREATED_US, LIMITS, POSITION, PRODUCER, SECRET, STORE, STORED_US

PARTITION = 0x8000


def one(
    number: int,
    subject: str = "a",
    key: str | None = None,
    tags: tuple[str, ...] = (),
    expire_at: int = 0,
    created_us: int = CREATED_US,
    bodies: int = 1,
) -> memoryview:
    """Return a stored batch of one delayed message, or of more."""
    header = make_header(key, tags, {"n": str(number)}, 1_000_000, expire_at)
    run = RunContent(subject, [b"body %d" % number] * bodies, [header] * bodies)
    view = memoryview(
        bytearray(b"".join(build_batch([run], created_at_us=created_us, producer_id=PRODUCER, producer_sequence=7)))
    )
    stamp(
        view, check_batch(view, LIMITS), position=POSITION + 100 * number, stored_at_us=STORED_US, partition=0,
        store_id=STORE, secret=SECRET, first_sequences=0,
    )  # fmt: skip
    return view


def joined(batches: list[memoryview]) -> Due:
    singles = [single_of(batch) for batch in batches]
    return join_singles([single for single in singles if single is not None], STORE, PARTITION)


def stored(made: Due) -> memoryview:
    out = memoryview(made.buffer)
    runs = made.checked.runs
    stamp(
        out, made.checked, position=POSITION + 9_000, stored_at_us=STORED_US + 9, partition=1, store_id=STORE,
        secret=SECRET, first_sequences=0 if runs is None else runs["first_sequence"],
    )  # fmt: skip
    return out


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(("a", "b.c", "d")),
        st.sampled_from((None, "k", "another key")),
        st.sampled_from(((), ("vip",), ("vip", "new"))),
        st.sampled_from((0, 5_000)),
        st.integers(CREATED_US, CREATED_US + 3),
    ),
    min_size=1,
    max_size=30,
)


@given(MESSAGES)
def test_each_message_is_unchanged(messages: list[tuple[str, str | None, tuple[str, ...], int, int]]) -> None:
    view = stored(joined([one(number, *message) for number, message in enumerate(messages)]))
    header = validate_stored(view, POSITION + 9_000, SECRET, STORE)
    assert (header.producer_id, header.messages) == (DUE_PRODUCER, len(messages))
    assert header.created_at_us == min(message[4] for message in messages)
    assert header.flags & HAS_ORIGIN_ID
    assert not header.flags & HAS_DELIVER_AT
    runs, damaged = read_answer(view)
    assert damaged == []
    assert [bad_messages(run) for run in runs] == [[]] * len(runs)
    found = {}
    for run, index in ((each, index) for each in runs for index in range(each.count)):
        said = run.header(index)
        number = int(said["p"]["n"])
        assert run.id(index) == MessageId(STORE, PARTITION, POSITION + 100 * number)
        assert run.body(index) == b"body %d" % number
        expire = run.column(HAS_EXPIRE_AT)
        expire_at = 0 if expire is None else int(expire[index])
        keys = said.get("k", [None])
        found[number] = run.subject, keys[0], tuple(said.get("t", ())), expire_at, run.created_us(index)
    assert found == dict(enumerate(messages))
    for run in runs:  # within a subject they come in the order in which they were due
        numbers = [int(run.header(index)["p"]["n"]) for index in range(run.count)]
        assert numbers == sorted(numbers)


def test_times_of_creation_are_a_column_only_where_they_differ() -> None:
    alike = joined([one(0), one(1)]).checked.header
    assert alike.flags == HAS_ORIGIN_ID
    others = joined([one(0, key="k"), one(1, tags=("t",), created_us=CREATED_US + 1)]).checked.header
    assert others.flags == HAS_ORIGIN_ID | HAS_CREATED_AT | HAS_KEY_HASH | HAS_TAGS


def test_a_part_of_it_is_sound_by_itself_and_a_rotten_time_shows() -> None:
    view = stored(joined([one(number, created_us=CREATED_US + number) for number in range(20)]))
    buffers, _ = StoredBatch(view).piece(0, 3, 9)
    (run,), damaged = read_answer(memoryview(b"".join(buffers)))
    assert damaged == []
    assert [run.created_us(index) for index in range(6)] == [CREATED_US + number for number in range(3, 9)]
    place = b"".join(buffers).index((CREATED_US + 5).to_bytes(8, "little"))
    for bit in range(64):
        rotten = bytearray(b"".join(buffers))
        rotten[place + bit // 8] ^= 1 << bit % 8
        runs, damaged = read_answer(memoryview(rotten))
        assert sum(run.count for run in runs) == 5
        assert [damage.messages for damage in damaged] == [1]


def test_only_sound_single_messages_are_joined() -> None:
    assert single_of(one(0, bodies=2)) is None
    whole = one(0, key="k")
    header = parse_header(whole)
    assert single_of(whole) is not None
    covered = itertools.chain(range(84), range(96, header.size))  # the checksum of the header, and the mark are not
    for place in covered:
        rotten = memoryview(bytearray(whole))
        rotten[place] ^= 0x10
        assert single_of(rotten) is None, place
    assert single_of(whole[: header.size - 1]) is None


@pytest.mark.parametrize("count", [1, 2, 300])
def test_the_largest_counts_of_subjects(count: int) -> None:
    view = stored(joined([one(number, subject=f"s.{number}") for number in range(count)]))
    runs, damaged = read_answer(view)
    assert damaged == []
    assert [run.subject for run in runs] == [f"s.{number}" for number in range(count)]
