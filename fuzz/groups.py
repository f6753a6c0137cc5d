"""Files of groups, changed at will: the pull log, runs of error logs, of dead letters and of what is delayed.

What a group has not handled, as far as anything tells of it, comes again; whatever the files say, its consumers are
served, and the broker stops and starts again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from unittest import mock

from fuzz.files import MOST_PULLS, NOW, OPTIONS, Files, answers, checkpoint, files_of, send
from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Ack, Administer, Command, DispositionRange, HandBack, Now, Pull, Send, Subscribe
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.build import RunContent, build_batch, make_header
from qmq.net.protocol.types import Disposition
from qmq.storage.error_log import item_file as item_log
from qmq.storage.error_log import timer_queue as schedule
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk

#: When all that waits is due.
_LATER: Final = Now(NOW.monotonic_us + 7_200_000_000, NOW.wall_us + 7_200_000_000)
#: What is in memory only, so that a few items are runs on disk.
_MEMORY_ITEMS: Final = 4
_NAMES: Final = ("pulls/", "groups/", "due/", "delayed/", "checkpoint-")


def _ask(store: Store, broker: Broker, command: Command, now: Now = NOW) -> list[Effect]:
    broker.handle(command, now)
    return answers(store, broker)


def _join(store: Store, broker: Broker, group: str, mode: str = "reliable") -> int:
    said = _ask(store, broker, Subscribe(1, 1, group, ("s.",), "c", None, b"nonce of client", b"client", mode=mode))
    (answer,) = [one for one in said if isinstance(one, Subscribed | Refused)]
    if isinstance(answer, Refused):
        return 0
    return answer.subscription


def _pull(store: Store, broker: Broker, subscription: int, count: int = 1_000) -> PulledMessages | Refused:
    said = _ask(store, broker, Pull(1, 2, subscription, count, 1, 1 << 20, 0))
    (answer,) = [one for one in said if isinstance(one, PulledMessages | Refused)]
    return answer


def _delayed(sequence: int) -> memoryview:
    headers = [make_header(None, deliver_at=delay) for delay in (60_000_000, 1_000_000, 3_600_000_000)]
    content = RunContent("s.later", [b"1", b"2", b"3"], headers)
    parts = build_batch([content], created_at_us=1, producer_id=b"d" * 16, producer_sequence=sequence)
    return memoryview(bytearray(b"".join(parts)))


def template(directory: Path, clean: bool) -> dict[str, bytes]:
    """A store with runs of every kind, records before and behind the checkpoint, and groups of two modes."""
    store = Store.open(directory, OPTIONS, FakeDisk(), NOW.wall_us)
    broker = Broker(store, BrokerLimits(), NOW)
    reliable, once = _join(store, broker, "g"), _join(store, broker, "once", "at_most_once")
    for sequence in range(0, 64, 2):
        send(store, broker, sequence, 50)
    for sequence in range(0, 9, 3):
        _ask(store, broker, Send(1, sequence, _delayed(sequence), False))
    _pull(store, broker, reliable, 30)
    for number in range(16):
        disposition = Disposition.REJECT if number % 2 else Disposition.NACK
        _ask(
            store, broker, HandBack(1, 3, reliable, [DispositionRange(number, number + 1, disposition, None, "broken")])
        )
    _pull(store, broker, once, 5)
    checkpoint(store, broker)
    checkpoint(store, broker)
    _ask(store, broker, Ack(1, 4, reliable, (16, 18, 20, 22)))
    _pull(store, broker, reliable, 3)
    _ask(store, broker, HandBack(1, 3, reliable, [DispositionRange(22, 23, Disposition.NACK, 0, "again")]))
    _pull(store, broker, reliable, 3)
    _pull(store, broker, once, 5)
    _ask(store, broker, Send(1, 9, _delayed(9), False))
    if clean:
        checkpoint(store, broker)
    store.close(clean=clean)
    return files_of(directory)


class Groups(Files):
    """As all files, with those of groups, and consumers that use them."""

    def template(self, directory: Path, clean: bool) -> dict[str, bytes]:
        few = mock.patch.object(schedule, "MEMORY_ITEMS", _MEMORY_ITEMS)
        few_dead = mock.patch.object(item_log, "MEMORY_ITEMS", _MEMORY_ITEMS)
        with few, few_dead:
            files = template(directory, clean)
        for part in ("pulls/", "groups/1/retries/", "groups/1/dead/", "due/", "delayed/"):
            assert any(name.startswith(part) for name in files), part
        return files

    def names(self, files: dict[str, bytes]) -> list[str]:
        return [name for name in super().names(files) if name.startswith(_NAMES)]

    def use(self, store: Store, broker: Broker) -> None:
        for group, mode in (("g", "reliable"), ("once", "at_most_once")):
            subscription = _join(store, broker, group, mode)
            if subscription:
                self._pull_group(store, broker, subscription)
        broker.tick(_LATER)
        answers(store, broker)
        for action, fields in self._questions():
            (answer,) = _ask(store, broker, Administer(1, 5, action, fields))
            assert isinstance(answer, Administered | Refused), answer
        super().use(store, broker)

    def _pull_group(self, store: Store, broker: Broker, subscription: int) -> None:
        for _ in range(MOST_PULLS):
            broker.tick(_LATER)
            answer = _pull(store, broker, subscription)
            if isinstance(answer, Refused) or not answer.messages:
                return
            pairs = tuple(one for first, count, _ in answer.ranges for one in (first, first + count))
            if pairs:
                _ask(store, broker, Ack(1, 6, subscription, pairs))
        raise AssertionError("pulls bring messages for ever")

    def _questions(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            ("groups", {}),
            ("consumers", {"group": "g"}),
            ("dead_letters", {"group": "g"}),
            ("redrive", {"group": "g"}),
        ]
