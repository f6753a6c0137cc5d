"""A checkpoint whose checksum fits and whose state makes no sense is reported by its path and not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.broker.broker import Broker
from qmq.broker.journal.record_types import whole
from qmq.broker.ports.commands import Now
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.startup.checkpoint import BadState
from qmq.daemon.startup import open_broker
from qmq.format.layout import CHECKPOINT_MAGIC, CHECKPOINT_VERSION
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import pack_envelope, unpack_envelope
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints
from qmq.storage.store import Store, StoreOptions
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, many

Fields = dict[str, Any]


def forge(path: Path, change: Callable[[Fields], None]) -> None:
    """Change the state of a checkpoint, with a checksum that fits."""
    content = unpack_envelope(path.read_bytes(), CHECKPOINT_MAGIC, CHECKPOINT_VERSION, path.name)
    change(content["state"])
    path.write_bytes(b"".join(pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content)))


def of_ledger(change: Callable[[Fields], None]) -> Callable[[Fields], None]:
    """Apply *change* to the state of the only group's messages."""

    def changed(state: Fields) -> None:
        groups = msgpack.unpackb(state["groups"], strict_map_key=False)
        ((name, (number, come, ledger)),) = groups.items()
        fields = msgpack.unpackb(ledger, strict_map_key=False)
        change(fields)
        state["groups"] = msgpack.packb({name: (number, come, msgpack.packb(fields))})

    return changed


def _without_runs(fields: Fields) -> None:
    del fields["retries"]["runs"]


def _with_half_an_item(fields: Fields) -> None:
    fields["retries"]["kept"] += b"half"


def _with_members_of_another_shape(fields: Fields) -> None:
    fields["members"] = [[1, "c"]]


def _with_a_text_for_a_count(fields: Fields) -> None:
    fields["retries"]["count"] = "many"


def _with_a_negative_ack_floor(fields: Fields) -> None:
    fields["members"][0][14][0] = -1


def _without_producers(state: Fields) -> None:
    state["producers"] = msgpack.packb(7)


def _with_no_map(state: Fields) -> None:
    state["groups"] = b"\xc1"


def _with_no_runs_of_files(state: Fields) -> None:
    state["group_files"] = msgpack.packb([1, 2])


FORGERIES = (
    of_ledger(_without_runs),
    of_ledger(_with_half_an_item),
    of_ledger(_with_members_of_another_shape),
    of_ledger(_with_a_text_for_a_count),
    of_ledger(_with_a_negative_ack_floor),
    _without_producers,
    _with_no_map,
)


def stopped(directory: Path) -> list[Path]:
    """Return the two checkpoints of a store, the last one first: a group has four of six messages, and one of them
    failed.
    """
    driven = filled(directory, 6)
    consumer = Consumer(driven, "c")
    consumer.pull(3)
    consumer.back(1, 2)
    driven.checkpoint()
    consumer.pull(1)
    driven.checkpoint()
    driven.store.close(clean=True)
    return [checkpoint_path(directory, number) for number in list_checkpoints(Disk(), directory)]


@pytest.mark.parametrize("change", FORGERIES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("several", [1, 2])
def test_the_checkpoint_before_counts_or_the_whole_log(
    tmp_path: Path, change: Callable[[Fields], None], several: int, caplog: pytest.LogCaptureFixture
) -> None:
    paths = stopped(tmp_path)
    for path in paths[:several]:
        forge(path, change)
    now = Now(1, 1_800_000_000_000_000)
    store, broker = open_broker(tmp_path, StoreOptions(), Disk(), BrokerLimits(), now)
    assert [str(path) in caplog.text for path in paths] == [True, several == 2]
    assert caplog.text.count("makes no sense") == several
    assert store.state_path == (paths[1] if several == 1 else None)
    checkpoint = store.begin_checkpoint(broker.checkpoint_state(now))
    checkpoint.write()
    store.finish_checkpoint(checkpoint)
    store.close()
    assert not verify(tmp_path, Disk()).faults
    driven = Driven(tmp_path)
    driven.now = now
    consumer = Consumer(driven, "c", nonce=b"another program!")
    driven.advance(6_000)
    while consumer.pull():
        pass
    assert sorted(body for body, _ in consumer.got.values()) == many(6)
    driven.close()


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_what_changes_after_the_preparation_is_in_the_checkpoint(tmp_path: Path, changes: int) -> None:
    driven = filled(tmp_path, 6)
    consumer = Consumer(driven, "c")
    for _ in driven.broker.prepare_checkpoint():
        if changes > 0:
            consumer.pull(3)  # the group's cursors
        if changes > 1:
            consumer.back(2, 3)  # its retries
    group = driven.broker.groups["g"]
    assert group.is_changed() == (changes > 0)
    driven.broker.checkpoint_state(driven.now)
    assert not group.is_changed()
    assert group.ledger is not None
    made, group.dirty, group.ledger.changed = group.row, True, True
    driven.broker.checkpoint_state(driven.now)
    assert group.row == made, "as if all of it were packed anew"
    driven.close()


def test_the_state_of_group_files_is_checked_on_reading(tmp_path: Path) -> None:
    last, before = stopped(tmp_path)
    forge(last, _with_no_runs_of_files)
    assert [one.file for one in verify(tmp_path, Disk()).findings if one.severity == "fault"] == [last]
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    assert store.state_path == before
    assert any(str(last) in note for note in store.recovery.notes)
    store.close(clean=False)


def test_bad_state_names_its_file(tmp_path: Path) -> None:
    path = stopped(tmp_path)[0]
    forge(path, FORGERIES[0])
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    with pytest.raises(BadState, match="makes no sense") as caught:
        Broker(store, BrokerLimits(), Now(1, 1))
    assert caught.value.path == path
    store.close(clean=False)


def test_whole_numbers() -> None:
    assert whole(7) == 7
    for value in (-1, 1 << 64, True, "7", 7.0, None):
        with pytest.raises(ValueError, match="no whole number"):
            whole(value)
