"""Messages copied for one group keep everything except where and when they are stored."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qmq.format.batch import BatchLimits, Header, check_batch, parse_header
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.copies.for_group import Origin, copied_batch, is_copy, origin_of
from qmq.format.layout import (
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_TAGS,
    KNOWN_FLAGS,
    RUN_REPLAYED,
)
from qmq.format.pieces import bad_messages, stored_runs
from qmq.format.run import Run

STORED_US = 1_700_000_000_000_000
ORIGIN = Origin(7, 9)


def run_of(bodies: list[bytes], expire_at: list[int] | None = None) -> Run:
    """Return a run as stored at position 1000 of partition 2."""
    times = expire_at if expire_at is not None else [0] * len(bodies)
    headers = [make_header(f"key{at}", ["vip"], {"p": "v"}, expire_at=time) for at, time in enumerate(times)]
    content = RunContent("a.b", bodies, headers)
    parts = build_batch([content], created_at_us=5, producer_id=bytes(16), producer_sequence=9)
    batch = memoryview(b"".join(parts))
    header = parse_header(batch)._replace(position=1_000, partition=2, store_id=b"store!", stored_at_us=STORED_US)
    (run,) = stored_runs(batch, header)
    return run


def copy_of(run: Run, origin: Origin = ORIGIN) -> Run:
    """Return the copy as a broker stores it."""
    made = memoryview(copied_batch(run, "billing", run.stored_at_us, origin))
    checked = check_batch(made, BatchLimits(flags=KNOWN_FLAGS & ~HAS_DELIVER_AT, run_flags=RUN_REPLAYED))
    assert is_copy(checked.header.producer_id)
    assert origin_of(checked.header) == origin
    assert checked.names == ("~billing~a.b",)
    assert checked.header.created_at_us == run.created_at_us
    header = checked.header._replace(position=7_000, partition=0, store_id=b"store!", stored_at_us=STORED_US + 50)
    (copy,) = stored_runs(made, header)
    assert bad_messages(copy) == []
    return copy


@pytest.mark.parametrize("count", [1, 2, 100])
def test_ids_bodies_headers_and_columns_stay(count: int) -> None:
    rng = random.Random(count)
    run = run_of([rng.randbytes(rng.randrange(0, 40)) for _ in range(count)])
    for _ in range(3):  # also a copy of a copy
        copy = copy_of(run)
        assert copy.bodies() == run.bodies()
        assert [copy.header(at) for at in range(count)] == [run.header(at) for at in range(count)]
        assert [copy.id(at) for at in range(count)] == [run.id(at) for at in range(count)]
        assert copy.flags == run.flags | HAS_ORIGIN_ID
        for flag in (HAS_TAGS, HAS_KEY_HASH):
            assert np.array_equal(copy.column(flag), run.column(flag))  # type: ignore[arg-type]
        run = copy
    run.run_flags = RUN_REPLAYED
    assert copy_of(run).run_flags == RUN_REPLAYED
    part = run_of([b"0", b"1", b"2"]).slice(1, 2)
    assert copy_of(part).bodies() == [b"1"]
    assert copy_of(part).id(0) == part.id(0)


@pytest.mark.parametrize("origin", [Origin(1 << 51, (65_535 << 32) + 4_095), Origin(5, 0, True)])
def test_it_says_where_its_original_lay(origin: Origin) -> None:
    copy_of(run_of([b"0", b"1"]), origin)


def test_what_came_from_elsewhere_has_its_own_place() -> None:
    """So has a copy that an older program made."""
    for producer_id in (bytes(range(16)), b"qmq: carrying on"):
        header = run_of([b"0"]).origin
        assert isinstance(header, Header)
        assert origin_of(header._replace(producer_id=producer_id, producer_sequence=3)) == Origin(STORED_US, 0, True)


def test_it_expires_when_it_did() -> None:
    run = run_of([b"0", b"1", b"2"], expire_at=[0, 30, STORED_US + 70])
    assert run.flags & HAS_EXPIRE_AT
    column = copy_of(run).column(HAS_EXPIRE_AT)
    assert column is not None
    assert column.tolist() == [0, STORED_US + 30, STORED_US + 70]
