"""Files of a data directory, changed at will, into opening, serving and verify.

A broker on such a directory says why it does not start, or it serves: then it takes and gives messages, stops, and
starts again.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Final

from crc32c import crc32c

from fuzz.core import Work, carry_out
from fuzz.target import GrowthCheck, Picks, scratch_directory
from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Now, Pull, Send, Subscribe
from qmq.broker.ports.effects import Effect, PulledMessages, Refused, Sent, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.daemon.startup import open_broker
from qmq.errors import QmqError
from qmq.format.build import RunContent, build_batch
from qmq.format.pieces import read_answer
from qmq.storage.store import Store, StoreOptions
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk

NOW: Final = Now(1_000_000, 1_700_000_000_000_000)
OPTIONS: Final = StoreOptions(segment_bytes=64 << 10, reserve_bytes=1 << 20, max_frame_bytes=32 << 10)
MOST_PULLS: Final = 400
_ZEROS: Final = 8
_ENVELOPES: Final = ("store-", "checkpoint-")


def _batch(subject: str, sequence: int, bodies: list[bytes]) -> memoryview:
    parts = build_batch(
        [RunContent(subject, bodies, None), RunContent(f"{subject}.more", [b"x"], None)][: 1 + sequence % 2],
        created_at_us=1,
        producer_id=b"p" * 16,
        producer_sequence=sequence,
    )
    return memoryview(bytearray(b"".join(parts)))


def send(store: Store, broker: Broker, sequence: int, size: int = 500) -> list[Effect]:
    """Send a batch; what the broker says."""
    broker.handle(
        Send(1, sequence, _batch(f"s.{sequence % 5}", sequence, [bytes([sequence & 255]) * size]), False), NOW
    )
    return answers(store, broker)


def answers(store: Store, broker: Broker) -> list[Effect]:
    """What the broker says, once all is done that it wants done before."""
    said: list[Effect] = []
    while True:
        broker.turn(NOW)
        effects = broker.take_effects()
        if not effects:
            return said
        for effect in effects:
            if isinstance(effect, Work):
                broker.handle(carry_out(store, effect), NOW)
            else:
                said.append(effect)


def checkpoint(store: Store, broker: Broker) -> None:
    """Take a checkpoint."""
    taken = store.begin_checkpoint(broker.checkpoint_state(NOW))
    taken.write()
    store.finish_checkpoint(taken)


def files_of(directory: Path) -> dict[str, bytes]:
    """All files of a data directory by their names, without the zeros that room is made with, but for a few: what is
    in front of them may end with some of its own.
    """
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    contents = {name: path.read_bytes() for name, path in files.items() if name != "lock"}
    return {name: content[: len(content.rstrip(b"\0")) + _ZEROS] for name, content in contents.items()}


def template(directory: Path, clean: bool) -> dict[str, bytes]:
    """The files of a small store: three segments, a group, remembered producers, and a tail behind the checkpoint."""
    store = Store.open(directory, OPTIONS, FakeDisk(), NOW.wall_us)
    broker = Broker(store, BrokerLimits(), NOW)
    broker.handle(Subscribe(1, 1, "g", ("s.", "s.1"), "c", None), NOW)
    for sequence in range(0, 32, 2):
        send(store, broker, sequence, 10_000)
    checkpoint(store, broker)
    for sequence in range(32, 44, 2):
        send(store, broker, sequence)
    if clean:
        checkpoint(store, broker)
    store.close(clean=clean)
    return files_of(directory)


class Files:
    """Into Store.open, Broker, pulls, sends, a stop, another start, and verify."""

    def __init__(self) -> None:
        self._scratch = scratch_directory()
        self._templates = [self.template(self._scratch / f"template-{clean}", bool(clean)) for clean in (0, 1)]
        self.opened = self.refused = 0

    def template(self, directory: Path, clean: bool) -> dict[str, bytes]:
        """The files that inputs change, by their names in the directory."""
        return template(directory, clean)

    def once(self, data: bytes) -> int:
        picks = Picks(data)
        files = dict(self._templates[picks.number(1) & 1])
        for _ in range(1 + picks.number(1) % 3):
            self._change(picks, files)
        directory = self._scratch / "data"
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            with GrowthCheck():
                self._use(directory)
        finally:
            shutil.rmtree(directory)
        return 1

    def names(self, files: dict[str, bytes]) -> list[str]:
        """The names of those that are changed."""
        return sorted(files)

    def _change(self, picks: Picks, files: dict[str, bytes]) -> None:
        names = self.names(files)
        name = names[picks.below(len(names))]
        content, how = bytearray(files[name]), picks.number(1)
        if not content:
            return
        if how & 1:
            # Often near the beginning or the end, where headers and last records are.
            window = min(len(content), 200)
            start = (0, max(len(content) - window, 0), picks.below(len(content)))[how >> 6 if how >> 6 < 3 else 0]
            picks.edit(memoryview(content)[start : start + window])
        if how & 2:
            del content[picks.below(len(content) + 1) :]
        if how & 4:
            content += picks.take(picks.number(1)) if how & 8 else bytes(picks.below(300))
        if how & 16 and name.rpartition("/")[2].startswith(_ENVELOPES) and len(content) >= 20:
            struct.pack_into("<I", content, 12, len(content) - 20)
            struct.pack_into("<I", content, 16, crc32c(bytes(content[20:]), crc32c(bytes(content[:16]))))
        elif how & 16 and len(content) >= 64:  # the header of a segment, an index, entries or their order
            struct.pack_into("<I", content, 60, crc32c(bytes(content[:60])))
        if how & 32 and how & 8:
            files[name] = files[names[picks.below(len(names))]]
        elif how & 32:
            del files[name]
        else:
            files[name] = bytes(content)

    def _use(self, directory: Path) -> None:
        try:
            verify(directory, FakeDisk())
        except QmqError:
            pass
        try:
            served = open_broker(directory, OPTIONS, FakeDisk(), BrokerLimits(), NOW)
        except QmqError:
            self.refused += 1
            return
        self.opened += 1
        self._serve(*served)
        self._serve(*open_broker(directory, OPTIONS, FakeDisk(), BrokerLimits(), NOW))

    def _serve(self, store: Store, broker: Broker) -> None:
        clean = False
        try:
            self.use(store, broker)
            checkpoint(store, broker)
            clean = True
        finally:
            store.close(clean=clean)

    def use(self, store: Store, broker: Broker) -> None:
        """Do with a broker what clients do."""
        self._pull_all(store, broker)
        (sent,) = send(store, broker, 1_000_000)
        assert isinstance(sent, Sent | Refused), sent

    def _pull_all(self, store: Store, broker: Broker) -> None:
        broker.handle(Subscribe(1, 1, None, ("",), "c", "first"), NOW)
        (subscribed,) = answers(store, broker)
        assert isinstance(subscribed, Subscribed), subscribed
        for request in range(MOST_PULLS):
            broker.handle(Pull(1, request, subscribed.subscription, 1_000, 1, 1 << 20, 0), NOW)
            (answer,) = answers(store, broker)
            assert isinstance(answer, PulledMessages), answer
            if not answer.messages:
                return
            runs, _ = read_answer(memoryview(b"".join(answer.buffers)))
            for run in runs:
                assert len(run.bodies()) == run.count
        raise AssertionError("pulls bring messages for ever")

    def seeds(self) -> list[bytes]:
        files = max(len(self.names(files)) for files in self._templates)
        return [
            bytes([clean, 0, number, 0, how, 1, 10, 0, 4, 40, 0, 3, 5])
            for clean in (0, 1)
            for number in range(files)
            for how in (1, 0x41, 0x11, 2, 4, 0x20, 0x28, 0x91)
        ]

    def close(self) -> None:
        shutil.rmtree(self._scratch)
