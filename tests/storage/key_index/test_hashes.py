"""The hashes of stored batches: those of their messages, one by one, and none of what is no batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.format.batch import BatchLimits, check_batch, stamp
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.hashing import key_hash
from qmq.storage.key_index.hashes import hash_of_id, hashes_in
from tests.effort import part_of

POSITION = 1 << 40
STORE = bytes(6)
KEYS = st.one_of(st.none(), st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3))


#: Runs of messages: the keys of each, whether it has a tag, and whether it expires.
Batch = list[list[tuple[list[str] | None, bool, bool]]]


def stored(runs: Batch, position: int) -> bytes:
    """Return a batch at a position."""
    contents = [
        RunContent(
            f"shop.s{number}",
            [b"body"] * len(messages),
            [make_header(key, ["tag"] if tag else None, None, 0, 10**6 if dies else 0) for key, tag, dies in messages],
        )
        for number, messages in enumerate(runs)
    ]
    buffer = bytearray(b"".join(build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=0)))
    view = memoryview(buffer)
    batch = check_batch(view, BatchLimits())
    firsts = 0 if batch.run is not None else [0] * len(runs)
    stamp(
        view, batch, position=position, stored_at_us=1, partition=0, store_id=STORE, secret=bytes(16),
        first_sequences=firsts,  # type: ignore[arg-type]  # numpy takes a list
    )  # fmt: skip
    return bytes(buffer)


BATCHES = st.lists(
    st.lists(st.lists(st.tuples(KEYS, st.booleans(), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=4),
    max_size=6,
)


@settings(max_examples=part_of(150), deadline=None)
@given(BATCHES, st.integers(0, 400))
def test_the_hashes_are_those_of_each_message_of_whole_batches(batches: list[Batch], cut: int) -> None:
    log, expected, ends = b"", [], [0]
    for runs in batches:
        position = POSITION + len(log)
        log += stored(runs, position)
        ends.append(len(log))
        expected += {(key_hash(key), position) for messages in runs for keys, _, _ in messages for key in keys or ()}
    kept = max(0, len(log) - cut)
    whole = max(end for end in ends if end <= kept)
    found = hashes_in(memoryview(log)[:kept], POSITION)
    assert found.size == whole
    pairs = zip(found.hashes.tolist(), found.positions.tolist(), strict=True)
    assert set(pairs) == {pair for pair in expected if pair[1] < POSITION + whole}


def test_bytes_that_are_no_batch_have_no_hashes() -> None:
    batch = stored([[(["key"], False, False)]], POSITION)
    assert hashes_in(memoryview(b""), POSITION).size == 0
    assert hashes_in(memoryview(bytes(200)), POSITION).size == 0
    assert hashes_in(memoryview(batch), POSITION + 1).size == 0  # a batch says where it lies
    assert hashes_in(memoryview(batch + bytes(50)), POSITION).size == len(batch)


def test_the_hash_of_an_id_is_that_of_its_bytes() -> None:
    assert hash_of_id(b"0123456789abcdef") == key_hash("0123456789abcdef")
