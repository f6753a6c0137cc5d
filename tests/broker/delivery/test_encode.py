"""The lookup of an answer finds the same places as a lookup of each range."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.delivery import encode
from qmq.broker.delivery.encode import RangeLookup
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import MessageParts, parts_of, ranges_of
from qmq.broker.journal.record_types import MessageRange
from qmq.storage.store import Store
from tests.broker.groups.test_message_ranges import chosen, filled, followed, places_of
from tests.broker.harness import Driven
from tests.effort import part_of


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
@pytest.mark.parametrize("seed", range(part_of(6)))
def test_each_range_is_found_where_it_lies(tmp_path: Path, prefix: str, seed: int) -> None:
    driven, chance = filled(tmp_path, seed, 1 + seed % 2), random.Random(seed)
    store = driven.store
    following = followed(store, prefix)
    ranges = ranges_of(store, chosen(store, following, 1_000), [following])
    found, group = RangeLookup(store, following.group), following.group
    for _ in range(300):
        messages = chance.choice(ranges)
        start = chance.randrange(messages.total)
        part = messages.part(start, min(start + chance.randrange(1, 4), messages.total))
        assert places_of(found.parts(part)) == places_of(parts_of(store, group, part))
    driven.close()


def test_messages_of_one_run_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"m"] * 100}))
    store = driven.store
    following = followed(store, "a.")
    (messages,) = ranges_of(store, chosen(store, following, 1_000), [following])
    looked = list[MessageRange]()

    def counted(store: Store, group: Group, one: MessageRange) -> MessageParts:
        looked.append(one)
        return parts_of(store, group, one)

    monkeypatch.setattr(encode, "parts_of", counted)
    found = RangeLookup(store, following.group)
    for at in range(0, 100, 10):
        (part,) = found.parts(messages.part(at, at + 1))
        assert places_of([part]) == places_of(parts_of(store, following.group, messages.part(at, at + 1)))
    assert len(looked) == 1
    driven.close()
