"""Making batches: headers, columns, checksums, and refused input."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from qmq.errors import InvalidOption, MessageTooLarge, UsageError
from qmq.format.batch import COLUMN_BYTES, parse_header, runs_of, stored_names
from qmq.format.build import (
    NO_HEADER,
    AnyHeader,
    MessageHeader,
    RunContent,
    are_short_keys,
    build_batch,
    build_flat,
    build_single,
    either_of,
    fold_of,
    header_bytes,
    is_short_key,
    little,
    make_header,
    message_bytes,
    shortened,
)
from qmq.format.hashing import key_hash, tag_bits
from qmq.format.layout import (
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_TAGS,
    LANE_HIGH,
    LANE_NORMAL,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_RUNS,
    OPTIONAL_COLUMNS,
)
from tests.format.contents import CREATED_US, PRODUCER, Contents, batch_of, contents, keys, plain, rich, texts

BOTH_ROADS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.text(min_size=1, max_size=40), st.binary(max_size=100), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_single_message_is_built_as_any_batch(subject: str, body: bytes, created_at_us: int, sequence: int) -> None:
    parts = build_batch(
        [RunContent(subject, [body], None)],
        created_at_us=created_at_us,
        producer_id=PRODUCER,
        producer_sequence=sequence,
    )
    assert b"".join(build_single(subject, body, created_at_us, PRODUCER, sequence)) == b"".join(parts)


def by_the_page(runs: Contents) -> bytes:
    """Return the same batch made slowly, message by message, as docs/FORMAT.md draws it."""
    messages = [[(pack_header(sent), sent) for sent in run] for run in runs]
    has_tags = any(sent.tags for run in runs for sent in run)
    has_keys = any(sent.keys for run in runs for sent in run)
    has_more_keys = any(len(sent.keys) > 1 for run in runs for sent in run)
    flags = has_tags | has_keys << 1 | has_more_keys << 6
    records = data = b""
    for number, run in enumerate(messages):
        columns = [b""] * 5
        payload = b""
        for header, sent in run:
            bits = tag_bits(sent.tags)
            key = key_hash(sent.keys[0]) if sent.keys else 0
            columns[0] += struct.pack("<I", len(header) + len(sent.body))
            columns[1] += struct.pack("<H", len(header))
            fold = len(header) ^ bits ^ (key >> 32) ^ (key & 0xFFFFFFFF)
            columns[2] += struct.pack("<I", xxh3_64_intdigest(header + sent.body) & 0xFFFFFFFF ^ fold)
            columns[3] += struct.pack("<I", bits) if has_tags else b""
            columns[4] += struct.pack("<Q", key) if has_keys else b""
            payload += header + sent.body
        content = b"".join(columns) + payload
        records += struct.pack("<HHHHIIIIQ", number, 0, 0, 0, len(run), len(data), len(content), crc32c(content), 0)
        data += content
    table = msgpack.packb({"source": bytes(19) + b"\x08\x00shop-api", "subjects": [run[0].subject for run in runs]})
    head = struct.pack(
        "<IBBHIIIIQQQH6s16sQI", 0x62514D51, 1, 0, flags, 96 + len(records) + len(table) + len(data),
        len(table), sum(map(len, runs)), len(runs), 0, 0, CREATED_US, 0, bytes(6), PRODUCER, 7, crc32c(data),
    )  # fmt: skip
    return head + struct.pack("<I", crc32c(head + records + table)) + bytes(8) + records + table + data


def pack_header(sent: object) -> bytes:
    _, _, keys, tags, properties = sent  # type: ignore[misc]
    fields: dict[str, object] = {}
    if keys:
        fields["k"] = list(keys)
    if tags:
        fields["t"] = list(tags)
    if properties:
        fields["p"] = dict(properties)
    return msgpack.packb(fields) if fields else b""


@BOTH_ROADS
@given(runs=contents(), bare=st.booleans())
def test_batches_are_what_the_page_says(road: str, runs: Contents, bare: bool) -> None:
    assert bytes(batch_of(runs, bare=bare)) == by_the_page(runs)


@pytest.mark.parametrize("runs", [1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_every_number_of_runs_and_messages(runs: int, count: int) -> None:
    made = [rich(f"s.{number}", count) if number % 2 else plain(f"s.{number}", count) for number in range(runs)]
    assert bytes(batch_of(made)) == by_the_page(made)


@given(contents())
def test_the_header_has_flags_and_counts(runs: Contents) -> None:
    view = batch_of(runs, sequence=99)
    header = parse_header(view)
    assert header.size == len(view)
    assert (header.messages, header.runs) == (sum(map(len, runs)), len(runs))
    assert (header.created_at_us, header.producer_id, header.producer_sequence) == (CREATED_US, PRODUCER, 99)
    assert (header.position, header.stored_at_us, header.partition) == (0, 0, 0)
    assert (header.store_id, header.mark) == (bytes(6), bytes(8))
    assert stored_names(view, header) == tuple(run[0].subject for run in runs)
    records = runs_of(view, header)
    assert records["count"].tolist() == [len(run) for run in runs]
    assert not records["first_sequence"].any()
    assert bool(header.flags & HAS_TAGS) == any(sent.tags for run in runs for sent in run)
    assert bool(header.flags & HAS_KEY_HASH) == any(sent.keys for run in runs for sent in run)
    assert bool(header.flags & HAS_MORE_KEYS) == any(len(sent.keys) > 1 for run in runs for sent in run)


def test_column_bytes_are_what_columns_take() -> None:
    for made, flags in (([plain("a", 3)], 0), ([rich("a", 3)], HAS_TAGS | HAS_KEY_HASH)):
        view = batch_of(made)
        header = parse_header(view)
        assert header.flags == flags
        (record,) = runs_of(view, header).tolist()
        payload = sum(len(pack_header(sent)) + len(sent.body) for sent in made[0])
        assert record[6] == COLUMN_BYTES[flags] * 3 + payload
    assert [flag for flag, _ in OPTIONAL_COLUMNS][:2] == [HAS_TAGS, HAS_KEY_HASH]


def test_message_bytes_counts_headers_and_bodies() -> None:
    assert message_bytes(RunContent("a", [b"123", b""], None)) == 3
    header = make_header("k", ["t"], {"p": "v"})
    assert message_bytes(RunContent("a", [b"123", b""], [header, NO_HEADER])) == 3 + len(header.packed)


class Gathered:
    """A run that is no RunContent."""

    def __init__(self, subject: str, bodies: list[bytes]) -> None:
        self.subject = subject
        self.bodies = bodies
        self.headers = None
        self.lane = 0


@pytest.mark.parametrize("count", [1, 3])
def test_any_object_with_the_fields_of_a_run_is_taken(count: int) -> None:
    names = [f"s.{number}" for number in range(count)]
    fields = {"created_at_us": 1, "producer_id": PRODUCER, "producer_sequence": 1}
    gathered = build_batch([Gathered(name, [b"1", b"2"]) for name in names], **fields)  # type: ignore[arg-type]
    given_as_tuples = build_batch([RunContent(name, [b"1", b"2"], None) for name in names], **fields)  # type: ignore[arg-type]
    assert gathered == given_as_tuples


def test_buffers_may_be_views() -> None:
    body = memoryview(b"0123456789")
    header = make_header("k")
    for headers in (None, [header, header]):
        made = build_batch(
            [RunContent("a", [body[:4], body[4:]], headers)],  # type: ignore[list-item]
            created_at_us=1,
            producer_id=PRODUCER,
            producer_sequence=1,
        )
        assert b"".join(made).endswith(header.packed + b"456789" if headers else b"0123456789")


# ---------------------------------------------------------------------------------------------------------------------
# Message headers


@given(
    key=st.none() | keys | st.lists(keys, max_size=4),
    tags=st.none() | st.lists(texts, max_size=4),
    properties=st.none() | st.dictionaries(texts, texts, max_size=4),
)
def test_headers_have_the_given_values(
    key: str | list[str] | None, tags: list[str] | None, properties: dict[str, str] | None
) -> None:
    header = make_header(key, tags, properties)
    unique = [key] if isinstance(key, str) else list(dict.fromkeys(key or ()))
    fields = {name: value for name, value in (("k", unique), ("t", tags), ("p", properties)) if value}
    assert header.packed == (msgpack.packb(fields) if fields else b"")
    assert header.tags == tag_bits(tags or ())
    assert header.key == (key_hash(unique[0]) if unique else 0)
    assert header.more_keys == (len(unique) > 1)
    assert (header is NO_HEADER) == (not fields)


@pytest.mark.parametrize("size", [1, 31, 32, 255, 256, MAX_KEY_BYTES])
def test_keys_of_every_msgpack_length(size: int) -> None:
    key = "é" * (size // 2) + "x" * (size % 2)
    assert make_header(key).packed == msgpack.packb({"k": [key]})


def test_golden_headers() -> None:
    header = make_header("order-4421", ["vip"], {"price": "125"})
    assert header.packed.hex() == "83a16b91aa6f726465722d34343231a17491a3766970a17081a57072696365a3313235"
    assert (header.tags, header.key) == (0x100, 0x8993E492FDCCD224)


def test_several_keys_are_packed_once_each_in_their_order() -> None:
    header = make_header(["order-4421", "user-7", "order-4421"])
    assert header.packed == msgpack.packb({"k": ["order-4421", "user-7"]})
    assert (header.key, header.more_keys) == (key_hash("order-4421"), True)
    assert make_header(["k"]) == make_header(("k", "k")) == make_header("k")
    assert make_header([]) is NO_HEADER
    assert make_header([], ["t"]) == make_header(None, ["t"])
    many = [f"k{number}" for number in range(MAX_KEYS)]
    packed = msgpack.packb({"k": many, "t": ["t"], "p": {"p": "v"}})
    assert make_header(many * 2, ["t"], {"p": "v"}, 5, 7).packed == packed


def test_a_key_is_given_alone_or_in_a_list() -> None:
    assert (either_of("k", None), either_of(None, ["a", "b"]), either_of(None, None)) == ("k", ["a", "b"], None)
    with pytest.raises(UsageError, match=r"key='k' and keys=\['a'\] are given: put all of them into keys"):
        either_of("k", ["a"])
    with pytest.raises(UsageError, match="keys must be a list of str, not 'k'; a single one is key="):
        either_of(None, "k")


def test_tags_may_be_any_sequence() -> None:
    assert make_header(tags=["a", "b"]) == make_header(tags=("a", "b"))


@pytest.mark.parametrize(
    ("key", "tags", "properties", "reason"),
    [
        (5, None, None, "keys must be str that UTF-8 can hold, in a list if there are several, not 5"),
        (b"k", None, None, "keys must be str that UTF-8 can hold"),
        ("\ud800", None, None, "keys must be str that UTF-8 can hold, in a list if there are several, not "),
        (["k", 5], None, None, "keys must be str"),
        (["k", None], None, None, "keys must be str"),
        ([["k"]], None, None, "keys must be str"),
        (["k", "\ud800"], None, None, "keys must be str"),
        ({"k"}, None, None, "keys must be str"),
        ("", None, None, "a key has 1 to 1,024 bytes as UTF-8, not 0"),
        (["k", ""], None, None, "a key has 1 to 1,024 bytes as UTF-8, not 0"),
        ("é" * 512 + "x", None, None, "a key has 1 to 1,024 bytes as UTF-8, not 1,025"),
        (["k"] * 3 + ["k" * 1_025], None, None, "not 1,025"),
        ([f"k{number}" for number in range(17)], None, None, "a message has at most 16 keys, not 17; leave some out"),
        ("k", "vip", None, "tags must be a list of str that UTF-8 can hold, not 'vip'"),
        ("k", [1], None, "tags must be a list of str"),
        ("k", [["a"]], None, "tags must be a list of str"),
        ("k", ["\ud800"], None, "tags must be a list of str"),
        ("k", 7, None, "tags must be a list of str"),
        (None, None, {"a": 1}, "properties must be a dict of str to str that UTF-8 can hold, not {'a': 1}"),
        (None, None, {1: "a"}, "properties must be a dict of str to str"),
        (None, None, {"a": "\ud800"}, "properties must be a dict of str to str"),
        (None, None, [("a", "b")], "properties must be a dict of str to str"),
        (None, ["x"], "a=b", "properties must be a dict of str to str"),
    ],
)
def test_values_that_no_message_can_have_are_refused_by_name(
    key: object, tags: object, properties: object, reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        make_header(key, tags, properties)  # type: ignore[arg-type]
    assert make_header("k", None, {"a": "b"}).packed == msgpack.packb({"k": ["k"], "p": {"a": "b"}})


def test_an_error_does_not_repeat_a_large_value() -> None:
    with pytest.raises(InvalidOption) as caught:
        make_header(b"x" * 100_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("key", "tags", "properties"),
    [
        (None, ["t" * 1_000] * 70, None),
        (None, None, {"p": "v" * MAX_HEADER_BYTES}),
        ("k" * 1_000, ["t" * 35_000], {"p": "v" * 30_000}),
        ([f"{number:04}" * 256 for number in range(16)], ["t" * 30_000], {"p": "v" * 30_000}),
    ],
)
def test_a_header_over_its_column_is_refused(
    key: str | list[str] | None, tags: list[str] | None, properties: dict[str, str] | None
) -> None:
    with pytest.raises(MessageTooLarge, match=r"take \d+ bytes, at most 65535 are allowed"):
        make_header(key, tags, properties)


def test_the_largest_header_fits() -> None:
    room = MAX_HEADER_BYTES - len(msgpack.packb({"k": ["k"], "p": {"p": "v" * 300}})) + 300
    header = make_header("k", None, {"p": "v" * room})
    assert len(header.packed) == MAX_HEADER_BYTES
    build_batch([RunContent("a", [b""], [header])], created_at_us=1, producer_id=PRODUCER, producer_sequence=1)
    with pytest.raises(MessageTooLarge):
        make_header("k", None, {"p": "v" * (room + 1)})


# ---------------------------------------------------------------------------------------------------------------------
# Refused input


def build(runs: list[RunContent]) -> bytes:
    return b"".join(build_batch(runs, created_at_us=1, producer_id=PRODUCER, producer_sequence=1))


def test_headers_and_bodies_go_together() -> None:
    one = make_header("k")
    with pytest.raises(ValueError, match="1 headers for 2 bodies"):
        build([RunContent("a", [b"1", b"2"], [one])])
    with pytest.raises(ValueError, match="2 headers for 1 bodies of 'a'"):
        build([RunContent("a", [b"1"], [one, one]), RunContent("b", [b"1", b"2"], [one])])


def test_more_subjects_than_a_batch_can_number() -> None:
    runs = [RunContent(f"s.{number}", [b""], None) for number in range(MAX_RUNS + 1)]
    with pytest.raises(MessageTooLarge, match="65536 subjects in one batch, at most 65535"):
        build(runs)
    made = memoryview(build(runs[:-1]))
    assert parse_header(made).runs == MAX_RUNS


@given(st.integers(0, 65_535), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1))
def test_a_fold_shows_every_single_bit(header_size: int, tags: int, key: int) -> None:
    fold = fold_of(header_size, tags, key)
    assert 0 <= fold < 1 << 32
    assert fold_of(0, 0, 0) == 0
    for bit in range(16):
        assert fold_of(header_size ^ (1 << bit), tags, key) != fold
    for bit in range(32):
        assert fold_of(header_size, tags ^ (1 << bit), key) != fold
    for bit in range(64):
        assert fold_of(header_size, tags, key ^ (1 << bit)) != fold


def test_little_is_little_endian_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert little("I", [1, 2]) == b"\1\0\0\0\2\0\0\0"
    assert little("H", [258]) == b"\2\1"
    monkeypatch.setattr("qmq.format.build.sys.byteorder", "big")
    assert little("H", [258]) == b"\1\2", "a machine that keeps the large byte first turns each integer around"


def test_no_header_is_nothing() -> None:
    assert MessageHeader(b"", 0, 0) == NO_HEADER == make_header() == make_header(tags=[], properties={})


ASCII = st.characters(max_codepoint=127)
KEYS_OF_ONE_SIZE = st.integers(1, 40).flatmap(
    lambda size: st.lists(st.text(ASCII, min_size=size, max_size=size), min_size=1, max_size=40)
)
ZERO_KEY = "order-0000086416R5QPH15t"


@given(st.lists(st.text(ASCII, min_size=1, max_size=300), min_size=1, max_size=40) | KEYS_OF_ONE_SIZE)
@example([ZERO_KEY])
@example([ZERO_KEY, "k"])
@example([ZERO_KEY, "order-0000086416R5QPH15u"] * 20)
def test_short_keys_stand_for_their_headers(given_keys: list[str]) -> None:
    bodies = [b"%d" % number for number in range(len(given_keys))]
    headers = [make_header(key) for key in given_keys]
    short: list[AnyHeader] = [key if is_short_key(key) else make_header(key) for key in given_keys]
    several = [RunContent("a", bodies, headers)]
    expected = build(several)
    fields: dict[str, Any] = {"created_at_us": 1, "producer_id": PRODUCER, "producer_sequence": 1}
    assert b"".join(build_flat(["a"], [len(bodies)], bodies, short, **fields)) == expected
    lengths = little("I", map(len, bodies))
    assert b"".join(build_flat(["a"], [len(bodies)], bodies, short, lengths=lengths, **fields)) == expected
    assert are_short_keys(given_keys) == all(map(is_short_key, given_keys))
    assert all(header_bytes(one) >= len(header.packed) for one, header in zip(short, headers, strict=True))
    if len(bodies) > 2:
        mixed = [NO_HEADER, *short[1:]]
        whole = build([RunContent("a", bodies, [NO_HEADER, *headers[1:]])])
        assert b"".join(build_flat(["a"], [len(bodies)], bodies, mixed, **fields)) == whole


KEYS = st.none() | st.text(ASCII | st.just("é"), min_size=1, max_size=300) | st.text(ASCII, min_size=1, max_size=40)


@given(KEYS, KEYS, st.sampled_from([(), ("eu",)]), st.sampled_from([0, 5]), st.sampled_from([LANE_NORMAL, LANE_HIGH]))
def test_a_header_is_shortened_where_a_text_stands_for_it(
    key: str | None, order_key: str | None, tags: tuple[str, ...], expire_at: int, lane: int
) -> None:
    header = make_header(key, tags, None, 0, expire_at, lane, order_key)
    is_short = is_short_key(key if order_key is None else order_key) and not (key and order_key)
    expected = key if order_key is None else order_key
    assert shortened(header) == (expected if is_short and not tags and not expire_at else header)


@pytest.mark.parametrize("key", ["", "é", "k" * 256, b"k", None, 5, ["k"]])
def test_other_keys_have_headers(key: object) -> None:
    assert not is_short_key(key)
    assert not are_short_keys(["k", key])
