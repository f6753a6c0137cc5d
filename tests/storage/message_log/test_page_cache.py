"""Which bytes of a message log are in memory, and when the system is asked."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.fake_disk import FakeDisk


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
@pytest.mark.parametrize("count", [1, 10])
def test_the_system_is_asked_about_pages_in_memory_once_in_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, count: int
) -> None:
    """One message a batch, or ten in a batch that is pulled in parts."""
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk)
    for start in range(0, 10, count):
        driven.send("a.x", *[b"%d" % number for number in range(start, start + count)])
    log, asked, ask = driven.store.partitions[0].message_log.directory, list[str](), disk.residency

    def residency(mapped: mmap.mmap, offset: int, size: int) -> bytes:
        asked.append(disk._mapped[id(mapped)][1])
        return ask(mapped, offset, size)

    monkeypatch.setattr(disk, "residency", residency)
    subscription = driven.subscribe(prefix)
    driven.auto_read = False
    for number in range(5):
        assert bodies_of(driven.pull(subscription, max_count=1)) == [b"%d" % number]
    assert len([path for path in asked if Path(path).parent == log]) == 1
    driven.advance(99)
    disk.forget()
    assert bodies_of(driven.pull(subscription, max_count=1)) == [b"5"]
    driven.advance(1)
    assert driven.do(driven.pull_command(subscription, max_count=1)) == []
    (answer,) = driven.read()
    assert isinstance(answer, PulledMessages)
    assert bodies_of(runs_of_answer(answer)) == [b"6"]
    driven.auto_read = True
    driven.close()
