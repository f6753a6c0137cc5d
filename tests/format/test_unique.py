"""Unique texts in headers and tables, and batches without some of their messages."""

from __future__ import annotations

import random

import pytest

from qmq.errors import BadBatch
from qmq.format.batch import BatchLimits, check_batch, parse_header, stored_table, with_ahead
from qmq.format.build import MessageHeader, build_flat, build_single_unique, cut_batch, make_header, with_unique
from qmq.format.layout import HANDED_FLAGS, RUN_REPLAYED
from qmq.format.left_out import without
from qmq.format.pieces import stored_runs
from qmq.format.run import read_header
from qmq.format.table import names_of, sent_as, table_of, unique_field, with_field, without_unique
from qmq.format.unique import hash_of, hashes_of, unique_hashes
from tests.format.contents import CREATED_US, LIMITS, PRODUCER
from tests.format.golden_cases import TEXTS
from tests.format.test_golden import golden


def test_golden_hashes() -> None:
    """What FORMAT.md says, so that clients in other languages agree."""
    assert hash_of("order-4421-charge").hex() == "63bc2fd1c6454a2f93a08afceb154c2d"
    assert hash_of("Zürich").hex() == "90ae37dc95d4424f810b5e21c762a446"


@pytest.mark.parametrize("texts", [["a"], ["a", "bc"], ["ž" * 512, "a"], ["x" * 1_024], []])
def test_many_hashes_are_those_of_each(texts: list[str]) -> None:
    assert hashes_of(texts) == [hash_of(text) for text in texts]


def test_golden_batches_have_the_texts() -> None:
    batch = golden("batch-unique")
    checked = check_batch(batch, LIMITS)
    assert checked.has_unique
    ordinals, hashes = unique_hashes(batch, checked.header)
    assert ordinals.tolist() == [0, 2]
    assert hashes.tolist() == [hash_of(text) for text in TEXTS if text is not None]
    rest = golden("batch-unique-left-out")
    header = parse_header(rest)
    assert (header.messages, header.producer_sequence) == (2, 7)
    table = bytes(rest[header.data_start - 17 : header.data_start])
    assert table.endswith(unique_field(3, checked.header.data_crc))
    assert unique_hashes(rest, header)[0].tolist() == [1]


@pytest.mark.parametrize("header", [make_header(), make_header("k"), make_header(["k", "l"], ["t"], {"p": "q"})])
def test_a_header_keeps_its_other_fields(header: MessageHeader) -> None:
    found = with_unique(header, hash_of("t"))
    fields = read_header(found.packed)
    assert fields.pop("u") == hash_of("t")
    assert fields == read_header(header.packed)
    assert found[1:] == header[1:]


def test_a_lone_message_is_built_the_same_by_both_ways() -> None:
    for subject, body in (("a.b", b"x"), ("c", b""), ("d", bytes(5_000))):
        lone = b"".join(build_single_unique(subject, body, hash_of("t"), CREATED_US, PRODUCER, 9))
        parts = build_flat(
            [subject], [1], [body], [hash_of("t")], created_at_us=CREATED_US, producer_id=PRODUCER,
            producer_sequence=9, has_unique=True,
        )  # fmt: skip
        assert lone == b"".join(parts)


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_without_some_messages_is_the_rest_of_it(seed: int) -> None:
    draw = random.Random(seed)
    subjects = [f"a.{number}" for number in range(draw.randint(1, 4))]
    counts = [draw.randint(1, 30) for _ in subjects]
    bodies = [b"%d" % number for number in range(sum(counts))]
    texts = [draw.choice([None, f"text {number}"]) for number in range(len(bodies))]
    headers = []
    for text in texts:
        header = make_header(draw.choice([None, "k", "k" * 300]), draw.choice([None, ["t"]]), None, 0, seed % 2)
        headers.append(header if text is None else with_unique(header, hash_of(text)))
    parts = build_flat(
        subjects, counts, bodies, headers, created_at_us=CREATED_US, producer_id=PRODUCER, producer_sequence=9,
        has_unique=True,
    )  # fmt: skip
    batch = memoryview(bytearray(b"".join(parts)))
    checked = check_batch(batch, LIMITS)
    ordinals, hashes = unique_hashes(batch, checked.header)
    assert ordinals.tolist() == [at for at, text in enumerate(texts) if text is not None]
    assert hashes.tolist() == [hash_of(text) for text in texts if text is not None]
    left_out = draw.sample(range(len(bodies)), draw.randint(0, len(bodies) - 1))
    kept = [at for at in range(len(bodies)) if at not in left_out]
    of_kept = [hash_of(texts[at] or "") for at in kept if texts[at] is not None]
    view, made = without(batch, checked, left_out)
    again = check_batch(view, BatchLimits(is_stored=True))
    assert (again.header, again.names, again.has_unique) == (made.header, made.names, True)
    assert again.header.producer_sequence == 9
    assert [body for run in stored_runs(view, made.header) for body in run.bodies()] == [bodies[at] for at in kept]
    assert unique_hashes(view, made.header)[1].tolist() == of_kept
    view, made = with_ahead(view, made, 99_999)
    assert sent_as(stored_table(view, made.header)) == (len(bodies), checked.header.data_crc)
    assert unique_hashes(view, made.header)[1].tolist() == of_kept
    half = memoryview(bytearray(b"".join(cut_batch(batch, 0, max(1, len(bodies) // 2), 9))))
    assert check_batch(half, LIMITS).has_unique


def test_the_field_of_a_table_is_found_behind_the_subjects_only() -> None:
    plain = table_of(["a.b", "c"])
    table = with_field(plain, unique_field(3, 77))
    assert (sent_as(table), sent_as(plain), sent_as(b"")) == ((3, 77), None, None)
    assert without_unique(table) == plain
    assert without_unique(plain) is plain
    assert names_of(table) == ("a.b", "c")
    later = with_field(table, b"\xa5later\x01")
    assert sent_as(later) is None, "a later field stands behind it"
    assert names_of(later) == ("a.b", "c")


def test_copies_have_no_such_field() -> None:
    with pytest.raises(BadBatch, match="a batch of copies has no field 'unique'"):
        check_batch(golden("batch-unique"), BatchLimits(1 << 20, HANDED_FLAGS, RUN_REPLAYED))
