"""A message is found by its id, and has that id, whatever the batch it lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.find.trace.places import find_place, id_of
from qmq.format.ids import MessageId
from qmq.storage.consumer_log import active, partition_index, subject_order
from tests.broker.harness import Driven
from tests.broker.test_admin_turns import Opcodes


def test_a_message_has_its_id_wherever_a_block_of_rows_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (active, partition_index, subject_order):
        monkeypatch.setattr(module, "BLOCK_ROWS", 8)
    driven = Driven(tmp_path)
    contents = {f"a.{number}": [b"x"] * (1 + number % 2) for number in range(5)}
    sent = [driven.do(driven.send_command(contents))[0] for _ in range(10)]
    for position in [one.position for one in sent]:  # type: ignore[attr-defined]
        for ordinal in range(7):
            name = MessageId(driven.store.store_id, 0, position + ordinal)
            place = find_place(driven.store, 0, name.position)
            assert place is not None
            assert id_of(driven.store, 0, place.entry, place.ordinal) == str(name)
        assert find_place(driven.store, 0, position + 7) is None
    driven.close()


def test_other_runs_of_a_batch_cost_a_look_little(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    costs = []
    for count in (10, 3_000):
        (sent,) = driven.do(driven.send_command({f"a.{number}": [b"x"] for number in range(count)}))
        position = sent.position + count - 1  # type: ignore[attr-defined]
        place = find_place(driven.store, 0, position)
        assert place is not None
        entry = place.entry
        costs.append(Opcodes().of(lambda: find_place(driven.store, 0, position)))  # noqa: B023  # called at once
        costs[-1] += Opcodes().of(lambda: id_of(driven.store, 0, entry, 0))  # noqa: B023
    assert costs[1] < 2 * costs[0]
    driven.close()
