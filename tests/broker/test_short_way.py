"""The short way against the general way: the same random histories of frames, byte for byte.

Two servers get the same reads at the same times; one of them has no short way. Every operation on disk must be the
same, in the same order, and every answer the same, after the same operations. So a kill or a loss of power finds the
same files at every moment, and no answer leaves earlier than before. Only a pull whose time is up, and an ack that may
wait, may be answered some milliseconds apart: a server looks at timers every 5 ms after its last look, and small frames
cause no look.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.bare_server import START_US, BareServer
from qmq.broker import short_way
from qmq.broker.groups.message_ranges import range_of_run
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.build import NO_HEADER, RunContent, build_batch, build_flat, make_header, with_unique
from qmq.format.unique import hash_of
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind, decode_error, encode_frame, pack_numbers
from qmq.net.protocol.messages import decode_head
from qmq.net.protocol.types import Disposition
from qmq.storage.store import Store, StoreOptions
from tests.fake_disk import Killed, Operation
from tests.sim.disk import SimulatedDisk

ROOT = Path("/data")
SUBJECTS = ("orders.created", "orders.paid", "stock", "~odd")
Answer = tuple[int, tuple[Any, ...]]  # the connection, and the fields of the frame
LIMITS = BrokerLimits(max_message_bytes=2_000, max_pull_count=6, max_pull_bytes=3_000, producer_window=4)


class Side:
    """One of the two servers, with what it did: operations on disk, and bytes that it wrote to connections."""

    def __init__(self, disk: SimulatedDisk, options: StoreOptions, *, takes_short_way: bool) -> None:
        self.disk = disk
        self.events: list[Any] = []
        self.takes_short_way, self.options = takes_short_way, options
        self.open()

    def open(self) -> None:
        """Start, with clients that connect."""
        self.disk.before = self._note
        self.server = BareServer(ROOT, self.disk, LIMITS, self.options, takes_short_way=self.takes_short_way)
        self.connections = [self.server.connect() for _ in range(3)]

    def _note(self, operation: Operation) -> None:
        self.events.append(operation)

    def taken(self) -> list[Answer]:
        """Return the frames that each connection was written since the last call. Answers to different requests may
        come in any order.
        """
        found = []
        for number, connection in enumerate(self.connections):
            found += sorted((number, (*one[:3], bytes(one[3]), bytes(one[4]))) for one in connection.read())
        return found

    def look(self) -> None:
        """Have the server look at its timers now."""
        self.server.server.clock_moved()
        self.server.settle()

    def done(self) -> list[tuple[Any, ...]]:
        """Return the operations on disk since the last call, without the numbers of open files."""
        events, self.events = self.events, []
        return [(one.kind, one.path, [_plain(value) for value in one.arguments[1:]]) for one in events]

    @property
    def short_frames(self) -> int:
        small = self.server.server._small_frames
        return 0 if small is None else small.served


class History:
    """One random history of both sides. *chance* decides; the state of the clients follows the answers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        options = StoreOptions(segment_bytes=self.chance.choice((24 << 10, 1 << 20)), max_frame_bytes=20 << 10)
        disk = SimulatedDisk(seed)
        Store.open(ROOT, options, disk, START_US).close(clean=True)  # one identity and one secret for both
        self.sides = [Side(disk.clone(seed), options, takes_short_way=takes) for takes in (True, False)]
        self.seen = Counter[str]()
        self.short_frames = 0
        self.is_faulty = False  # writes fail, so the short way's is tried again the general way
        self.produced = Counter[int]()
        self._begin()

    def _begin(self) -> None:
        self.lost = set[int]()  # connections that the server has ended
        self.request = 1
        self.sent: list[tuple[int, bytes]] = []
        #: by (connection, subscription): the next delivery sequence, those in flight, and waiting pulls
        self.next: dict[tuple[int, int], int] = {}
        self.in_flight: dict[tuple[int, int], list[int]] = {}
        self.pulls: dict[tuple[int, int], tuple[int, int]] = {}  # by (connection, request)
        self.until_us: dict[tuple[int, int], int] = {}  # when the time of these is up
        self.subscribing: dict[tuple[int, int], str] = {}
        self.may_wait = set[tuple[int, int]]()  # acks whose answer may wait, by (connection, request)

    # --- what happens on both sides ----------------------------------------------------------------------------------

    def write(self, connection: int, *several: bytes) -> None:
        """Have both servers read these frames at once."""
        for side in self.sides:
            side.connections[connection].write(b"".join(several))
            side.server.settle()
        self.compare()

    def advance(self, microseconds: int) -> None:
        """Let time pass on both."""
        for side in self.sides:
            side.server.advance(microseconds)
            side.server.settle()
        short, general = self.sides
        is_up = any(until_us <= short.server.now.monotonic_us for until_us in self.until_us.values())
        # A time is up: what comes next meets the same pulls. Or one has looked at its timers, and written what was due.
        if is_up or len(short.events) != len(general.events):
            for side in self.sides:
                side.look()
        self.compare()

    def compare(self) -> None:
        """All that was done and answered since the last time is the same on both sides."""
        short, general = (side.taken() for side in self.sides)
        if short != general and all(map(self._is_due, _apart(short, general))):
            self.seen["answered apart"] += 1
            for side in self.sides:
                side.look()
            short, general = (
                sorted(answers + side.taken()) for answers, side in zip((short, general), self.sides, strict=True)
            )
        assert short == general, self.seen
        short_did, general_did = (side.done() for side in self.sides)
        assert short_did == general_did or self.is_faulty, self.seen
        for connection, (*head, meta, payload) in short:
            self._answered(connection, Frame(*head, memoryview(meta), memoryview(payload)))

    def _is_due(self, answer: Answer) -> bool:
        """Return whether it comes because a time is up: that of a pull, or that for which acks may wait."""
        connection, (kind, _, request, _, _) = answer
        return _is_empty(answer) or (kind == FrameKind.ACKED and (connection, request) in self.may_wait)

    def _answered(self, connection: int, frame: Frame) -> None:
        self.seen[FrameKind(frame.kind).name] += 1
        self.until_us.pop((connection, frame.request), None)
        if frame.kind == FrameKind.ERROR:
            code = decode_error(frame).code
            self.seen[code] += 1
            if not frame.request:
                self.lost.add(connection)
            elif code == "fenced":
                self._forget(lambda key: key[0] == connection)
        if frame.kind == FrameKind.SUBSCRIBED:
            fields = frames.unpack_meta(frame.meta)
            key = connection, fields["subscription"]
            state = fields.get("consumer_state")
            self.next[key], self.in_flight[key] = state[3] if state else 0, []
        elif frame.kind == FrameKind.MESSAGES:
            key = self.pulls.pop((connection, frame.request), (connection, 0))
            ranges = decode_head(frame.meta).ranges
            for first, count, _ in zip(ranges[::3], ranges[1::3], ranges[2::3], strict=True):
                self.in_flight.setdefault(key, []).extend(range(first, first + count))
                self.next[key] = max(self.next.get(key, 0), first + count)

    # --- frames ------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        self.request += 1
        return self.request

    def send(self, connection: int) -> bytes:
        """Return a SEND; now and then a repeat, a wrong or a rare one."""
        chance = self.chance
        if self.sent and chance.random() < 0.08:
            flags, batch = chance.choice(self.sent)
            return encode_frame(FrameKind.SEND, self.number(), b"", len(batch), flags) + batch
        producer = chance.choice((connection, connection, 9))
        subjects = [chance.choice(SUBJECTS[:3])] if chance.random() < 0.95 else list(SUBJECTS[:2])
        count = chance.choice((1, 1, 1, 1, 2, 3, 20))
        size = chance.choice((0, 5, 90, 90, 700, 2_100 if chance.random() < 0.1 else 30))
        options: list[dict[str, Any]] = [{}] * 6 + [{"keys": "k"}, {"keys": ("k", "l")}, {"tags": ("red",)}]
        rare = chance.random()
        header = make_header(**chance.choice(options)) if rare > 0.2 else None
        if rare < 0.02:
            header = make_header(expire_at=1)
        bodies = [bytes([chance.randrange(256)]) * size for _ in range(count)]
        headers = None if header is None else [header] * (count * len(subjects))
        has_unique = chance.random() < 0.2
        if has_unique:
            texts = [hash_of(chance.choice("abcdefgh")) for _ in range(count * len(subjects))]
            headers = [with_unique(header or NO_HEADER, text) for text in texts]
        parts = build_flat(
            subjects,
            [count] * len(subjects),
            bodies * len(subjects),
            headers,
            created_at_us=self.request,
            producer_id=bytes([producer]) * 16,
            producer_sequence=self.produced[producer] + (0 if chance.random() > 0.03 else 5),
            has_unique=has_unique,
        )
        batch = b"".join(parts)
        if chance.random() < 0.03:
            at = chance.randrange(len(batch))
            batch = batch[:at] + bytes([batch[at] ^ 1 << chance.randrange(8)]) + batch[at + 1 :]
        else:
            self.produced[producer] += count * len(subjects)
        flags = frames.FLUSH if chance.random() < 0.15 else 0
        self.sent = [*self.sent[-5:], (flags, batch)]
        return encode_frame(FrameKind.SEND, self.number(), b"", len(batch), flags) + batch

    def subscribe(self, connection: int) -> bytes:
        chance = self.chance
        settings: dict[str, Any] = {}
        group = chance.choice(("g", "g", "g", "h", "t"))
        if group == "t":
            settings = chance.choice(({"tags": ["red"]}, {"expire_after_us": 50_000}, {"ack_deadline_us": 40_000}))
        if group == "h":
            settings = chance.choice(({"max_unacked": 4}, {"max_unacked_bytes": 600}))
        fields = {
            "group": group if chance.random() < 0.9 else None,
            "prefixes": chance.choice((["orders.created"], ["orders."], [""], ["orders.paid", "stock"])),
            "consumer": f"c{connection}" if chance.random() < 0.8 else "shared",
            "nonce": bytes([connection]),
            "client": bytes([connection]),
            "settings": settings,
        }
        if fields["group"] is None:
            fields["consumer"] = ""
        request = self.number()
        return encode_frame(FrameKind.SUBSCRIBE, request, frames.pack_meta(fields))

    def pull(self, connection: int, subscription: int) -> bytes:
        chance, key = self.chance, (connection, subscription)
        expected = self.next.get(key, 0) if chance.random() < 0.9 else frames.NOT_EXPECTED
        if chance.random() < 0.03:
            expected = chance.randrange(5)
        request = self.number()
        self.pulls[connection, request] = key
        most = chance.choice((1_000, 1_000, 1_000, 2, 1))
        fields = most, chance.choice((1, 1, 1, 1, 0, 2)), chance.choice((1 << 20, 1 << 20, 300)), 20_000
        if chance.random() < 0.1:
            fields = *fields[:3], chance.choice((0, 1, 30))
            self.until_us[connection, request] = self.sides[0].server.now.monotonic_us + fields[3] * 1_000
        payload = frames.PULL.pack(subscription, *fields, expected)
        flags = frames.CHECK if chance.random() < 0.04 else 0
        return encode_frame(FrameKind.PULL, request, b"", len(payload), flags) + payload

    def ack(self, connection: int, subscription: int) -> bytes | None:
        chance, waiting = self.chance, self.in_flight.get((connection, subscription))
        if not waiting:
            return None
        count = len(waiting) if chance.random() < 0.8 else chance.randrange(1, len(waiting) + 1)
        if chance.random() < 0.06 and len(waiting) > 1:
            numbers = [waiting.pop()]
        else:
            numbers, waiting[:count] = waiting[:count], []
        start, end = numbers[0], numbers[-1] + 1
        if chance.random() < 0.03:
            end += 3  # some were never pulled
        packed, crc = pack_numbers([start, end])
        if chance.random() < 0.01:
            crc ^= 1
        payload = frames.ACK.pack(subscription, crc) + packed
        flags = frames.MAY_WAIT if chance.random() < 0.9 else 0
        if flags:
            self.may_wait.add((connection, self.request + 1))
        return encode_frame(FrameKind.ACK, self.number(), b"", len(payload), flags) + payload

    def hand_back(self, connection: int, subscription: int) -> bytes | None:
        waiting = self.in_flight.get((connection, subscription))
        if not waiting:
            return None
        number = waiting.pop(self.chance.randrange(len(waiting)))
        disposition = self.chance.choice((Disposition.NACK, Disposition.RELEASE, Disposition.REJECT))
        rows = frames.BACK.pack(number, number + 1, self.chance.choice((0, 5_000)), disposition, 0)
        payload = frames.HAND_BACK.pack(subscription, frames.crc32c(rows)) + rows
        meta = frames.pack_meta({"reasons": ["odd"]})
        return encode_frame(FrameKind.HAND_BACK, self.number(), meta, len(payload)) + payload

    def simple(self, kind: FrameKind, struct_: Any, *fields: int) -> bytes:
        payload = struct_.pack(*fields)
        return encode_frame(kind, self.number(), b"", len(payload)) + payload

    def administer(self) -> bytes:
        fields = self.chance.choice(
            (
                {"action": "seek_group", "group": "g", "to": "first"},
                {"action": "set_group", "group": "h", "settings": {"max_unacked": 3}},
                {"action": "set_group", "group": "g", "settings": {"tags": self.chance.choice(([], ["red"]))}},
                {"action": "delete_group", "group": "h"},
            )
        )
        payload = frames.pack_meta(dict(fields))
        return encode_frame(FrameKind.ADMINISTER, self.number(), payload)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing on both sides."""
        chance = self.chance
        self.advance(chance.choice((3, 50, 200, 900)) if chance.random() < 0.9 else chance.choice((6_000, 25_000)))
        connection = chance.randrange(3)
        if connection in self.lost:
            self.reconnect(connection)
        mine = [number for owner, number in self.next if owner == connection]
        kind = chance.random()
        if not mine and kind < 0.3:
            self.write(connection, self.subscribe(connection))
        elif kind < 0.45:
            self.write(connection, self.send(connection))
        elif kind < 0.9 and mine:
            number = chance.choice(mine)
            ack = self.ack(connection, number) if chance.random() < 0.9 else None
            waits = any(key == (connection, number) for key in self.pulls.values())
            pull = b"" if waits and chance.random() < 0.9 else self.pull(connection, number)
            several = [one for one in (ack, pull) if one]
            if several:
                self.write(connection, *several)
        else:
            self._rarely(connection, mine)

    def _rarely(self, connection: int, mine: list[int]) -> None:
        chance, kind = self.chance, self.chance.random()
        back = self.hand_back(connection, chance.choice(mine)) if mine else None
        if kind < 0.3 and back is not None:
            self.write(connection, back)
        elif kind < 0.4 and self.pulls:
            (owner, request), _ = chance.choice(list(self.pulls.items()))
            self.write(owner, self.simple(FrameKind.WITHDRAW, frames.WITHDRAW, request))
        elif kind < 0.45 and mine:
            number = chance.choice(mine)
            self.write(connection, self.simple(FrameKind.UNSUBSCRIBE, frames.UNSUBSCRIBE, number))
            self._forget(lambda key: key == (connection, number))
        elif kind < 0.6:
            self.write(connection, self.subscribe(connection))
        elif kind < 0.64:
            self.write(connection, self.administer())
        elif kind < 0.68:
            self.reconnect(connection)
        elif kind < 0.74 and not self.is_faulty:
            self.checkpoint()
        elif kind < 0.76:
            self.advance(31_000_000)

    def _forget(self, is_gone: Callable[[tuple[int, int]], bool]) -> None:
        for known in (self.next, self.in_flight):
            for key in [key for key in known if is_gone(key)]:
                del known[key]  # type: ignore[attr-defined]

    def reconnect(self, connection: int) -> None:
        for side in self.sides:
            side.connections[connection].protocol.connection_lost(None)
            side.server.settle()
            side.connections[connection] = side.server.connect()
        self.lost.discard(connection)
        self._forget(lambda key: key[0] == connection)
        for waiting in (self.pulls, self.until_us):
            for key in [key for key in waiting if key[0] == connection]:
                del waiting[key]  # type: ignore[attr-defined]
        self.compare()

    def checkpoint(self) -> None:
        for side in self.sides:
            side.look()  # a retry is due on both
        self.compare()
        for side in self.sides:
            side.disk.before = None  # the order of its files does not matter
            server = side.server
            checkpoint = server.store.begin_checkpoint(server.broker.checkpoint_state(server.now))
            checkpoint.write()
            server.store.finish_checkpoint(checkpoint)
            side.disk.before = side._note
        assert contents(self.sides[0].disk) == contents(self.sides[1].disk)

    def restart(self, *, power: bool = False) -> None:
        """Kill both, maybe with a loss of power, and start again on what is there."""
        self.short_frames += self.sides[0].short_frames
        fate = self.chance.random()
        for side in self.sides:
            side.disk.chance.seed(fate)
            side.disk.stop(power=power)
        assert contents(self.sides[0].disk) == contents(self.sides[1].disk)
        for side in self.sides:
            side.disk.kill_at(1 << 40)
            side.open()
        assert contents(self.sides[0].disk) == contents(self.sides[1].disk)
        self.compare()
        self._begin()

    def crash(self) -> None:
        """Kill both at the same operation on disk while they handle the same frames, and start again."""
        chance, connection = self.chance, self.chance.randrange(3)
        mine = [number for owner, number in self.next if owner == connection]
        several = [self.send(connection)]
        if mine and chance.random() < 0.5:
            number = chance.choice(mine)
            ack = self.ack(connection, number)
            several = [one for one in (ack, self.pull(connection, number)) if one]
        at, power = chance.choice((0, 0, 1, 1, 2, 5)), chance.random() < 0.5
        for side in self.sides:
            side.disk.chance.seed(at)
            side.disk.kill_at(at)
            with suppress(Killed):
                side.connections[connection].write(b"".join(several))
                side.server.settle()
                side.server.advance(30_000)
                side.server.settle()
        short, general = ([one for one in side.taken() if not _is_empty(one)] for side in self.sides)
        early = [answer for answer in short if answer not in general]
        assert [answer for answer in short if answer in general] == general
        assert all(answer[0] == FrameKind.SENT for _, answer in early)  # it does not wait for the record of a pull
        self.restart(power=power)

    def fail(self) -> None:
        """Let writes of both fail for some steps."""
        chance = self.chance
        code, part = chance.choice((errno.ENOSPC, errno.EIO)), chance.choice(("", "/pulls/", "/partition"))
        is_sync = chance.random() < 0.2  # then nothing is stored any more
        self.is_faulty = True
        for side in self.sides:
            if is_sync:
                side.disk.fail_always("fdatasync", errno.EIO, "/partition")
            else:
                side.disk.fail_always("pwritev", code, part)
        for _ in range(chance.choice((1, 3, 10))):
            self.step()
        for side in self.sides:
            side.disk.heal()
            side.look()  # a turn tries again to write records that no answer waits for
        self.advance(300_000)
        if is_sync:
            for _ in range(5):
                self.step()
            self.restart()
        self.is_faulty = False


def _apart(several: list[Answer], others: list[Answer]) -> Counter[Answer]:
    """Return the answers that only one side has given."""
    return (Counter(several) - Counter(others)) + (Counter(others) - Counter(several))


def _is_empty(answer: Answer) -> bool:
    """Return whether it answers a pull with no messages."""
    _, (kind, _, _, meta, _) = answer
    return kind == FrameKind.MESSAGES and not decode_head(memoryview(meta)).ranges


def _plain(value: object) -> object:
    return [bytes(one) for one in value] if isinstance(value, list | tuple) else value


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    """Return the bytes of all files by path."""
    found = {}
    for directory, names in disk.files.directories.items():
        for name in names.names:
            path = Path("/", directory, name)
            if names.names[name] is not None:
                fd = disk.files.open(path, 0)
                found[str(path)] = disk.files.pread(fd, disk.files.size(fd), 0)
                disk.files.close(fd)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_do_the_same(seed: int) -> None:
    history = History(seed)
    for number in range(400):
        history.step()
        if number % 150 == 149:
            history.checkpoint()
            history.restart()
    history.advance(1_000_000)
    history.checkpoint()
    history.restart()
    assert history.short_frames > 20, history.seen


@pytest.mark.parametrize("seed", range(100, 105))
def test_a_kill_or_a_loss_of_power_finds_the_same_on_both_ways(seed: int) -> None:
    history = History(seed)
    for _ in range(20):
        for _ in range(history.chance.randrange(40)):
            history.step()
        history.crash()
    assert history.short_frames > 20, history.seen


@pytest.mark.parametrize("seed", range(200, 205))
def test_both_ways_answer_the_same_while_writes_fail(seed: int) -> None:
    history = History(seed)
    for _ in range(8):
        for _ in range(20):
            history.step()
        history.fail()
    history.restart()
    assert history.short_frames > 5, history.seen


def _lone(history: History, connection: int, number: int, subject: str = "orders.paid", flags: int = 0) -> bytes:
    """Return a SEND of one message."""
    parts = build_batch(
        [RunContent(subject, [b"%d" % number], None)], created_at_us=1, producer_id=b"p" * 16,
        producer_sequence=number,
    )  # fmt: skip
    batch = b"".join(parts)
    return encode_frame(FrameKind.SEND, history.number(), b"", len(batch), flags) + batch


def _several(history: History, sequence: int, count: int, size: int = 3) -> bytes:
    """Return a SEND of *count* messages, of *size* bytes each."""
    parts = build_batch(
        [RunContent("orders.paid", [bytes(size)] * count, None)], created_at_us=1, producer_id=b"p" * 16,
        producer_sequence=sequence,
    )  # fmt: skip
    batch = b"".join(parts)
    return encode_frame(FrameKind.SEND, history.number(), b"", len(batch)) + batch


def test_the_frames_of_one_read_are_handled_one_by_one() -> None:
    history = History(1)
    fields = {"group": "g", "prefixes": ["orders."], "consumer": "c", "nonce": b"n", "client": b"c"}
    history.write(0, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
    for number in range(3):  # new producers, subjects and cursors take the general way
        history.write(1, _lone(history, 1, number))
        pull = history.simple(FrameKind.PULL, frames.PULL, 1, 9, 1, 999, 20_000, history.next[0, 1])
        history.pulls[0, history.request] = 0, 1
        history.write(0, pull)
    several = [_lone(history, 1, number) for number in range(3, 9)]
    short, general = history.sides
    before = short.short_frames
    short.connections[1].write(b"".join(several))
    assert short.short_frames == before + len(several)  # before any turn
    short.server.settle()
    for one in several:
        general.connections[1].write(one)
        general.server.settle()
    history.compare()
    assert history.seen["SENT"] == 9
    assert history.in_flight[0, 1]


def test_a_message_of_another_subject_that_nobody_waited_for_delays_no_pull() -> None:
    history = History(3)
    fields = {"group": "g", "prefixes": ["orders.paid"], "consumer": "c", "nonce": b"n", "client": b"c"}
    history.write(0, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))

    def pull() -> bytes:
        frame = history.simple(FrameKind.PULL, frames.PULL, 1, 9, 1, 999, 20_000, history.next[0, 1])
        history.pulls[0, history.request] = 0, 1
        return frame

    for number in range(0, 6, 2):  # new producers, subjects and cursors take the general way
        history.write(1, _lone(history, 1, number))
        history.write(1, _lone(history, 1, number + 1, "stock"))
        history.write(0, pull())
    short = history.sides[0]
    history.write(0, pull())
    history.write(1, _lone(history, 1, 6))
    history.write(1, _lone(history, 1, 7, "stock"))  # nobody waits
    before = short.short_frames
    history.write(0, pull())
    assert history.pulls, "the pull waits"
    history.write(1, _lone(history, 1, 8))
    assert not history.pulls, "the message was handed to the pull"
    assert short.short_frames == before + 2, "both went the short way"


def _waiting(seed: int, prefix: str = "orders.") -> History:
    """Return a history in which a pull of connection 0 waits, after messages 1 to 3 of connection 1: what follows is
    simple.
    """
    history = History(seed)
    fields = {"group": "g", "prefixes": [prefix], "consumer": "c", "nonce": b"n", "client": b"c"}
    history.write(0, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
    for number in range(1, 4):  # new producers, subjects and cursors take the general way
        history.write(0, _pull(history, 20_000))
        history.write(1, _lone(history, 1, number))
    history.write(0, _pull(history, 20_000))
    return history


def _pull(history: History, timeout_ms: int) -> bytes:
    pull = history.simple(FrameKind.PULL, frames.PULL, 1, 9, 1, 999, timeout_ms, history.next[0, 1])
    history.pulls[0, history.request] = 0, 1
    return pull


def _ack(history: History) -> bytes:
    """Return an ACK of all in flight, whose answer may wait."""
    numbers, history.in_flight[0, 1] = history.in_flight[0, 1], []
    packed, crc = pack_numbers([numbers[0], numbers[-1] + 1])
    payload = frames.ACK.pack(1, crc) + packed
    return encode_frame(FrameKind.ACK, history.number(), b"", len(payload), frames.MAY_WAIT) + payload


@pytest.mark.parametrize(
    ("settings", "limits", "count", "size"),
    [
        ({"max_unacked": 4}, (9, 1, 1 << 20), 2, 9),
        ({"max_unacked_bytes": 900}, (9, 1, 1 << 20), 2, 300),
        ({}, (2, 1, 1 << 20), 3, 9),
        ({}, (9, 3, 1 << 20), 2, 9),
        ({}, (9, 1, 300), 2, 200),
        ({}, (9, 1, 1 << 20), 7, 9),  # max_pull_count is 6
        ({}, (9, 1, 1 << 20), 4, 900),  # max_pull_bytes is 3,000
    ],
)
def test_a_pull_that_waits_gets_what_both_ways_allow(
    settings: dict[str, int], limits: tuple[int, int, int], count: int, size: int
) -> None:
    history = History(5)
    fields = {"group": "g", "prefixes": ["orders."], "consumer": "c", "nonce": b"n", "client": b"c"}
    history.write(0, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta({**fields, "settings": settings})))
    for number in range(1, 4):
        history.write(0, _pull(history, 20_000))
        history.write(1, _lone(history, 1, number))
    before = history.sides[0].short_frames
    pull = history.simple(FrameKind.PULL, frames.PULL, 1, *limits, 20_000, history.next[0, 1])
    history.pulls[0, history.request] = 0, 1
    history.write(0, pull)
    assert history.sides[0].short_frames == before + 1, "it waits"
    history.write(1, _several(history, 4, count, size))
    assert len(history.in_flight[0, 1]) < 3 + count or history.pulls


def _pull_of(history: History, most: int, least: int, expected: int) -> bytes:
    pull = history.simple(FrameKind.PULL, frames.PULL, 1, most, least, 1 << 20, 20_000, expected)
    history.pulls[0, history.request] = 0, 1
    return pull


def _handed(seed: int, settings: dict[str, int]) -> History:
    """Return a history in which connection 0 was handed messages 1 to 3, and no pull waits: what follows is simple."""
    history = History(seed)
    fields = {"group": "g", "prefixes": ["orders."], "consumer": "c", "nonce": b"n", "client": b"c"}
    history.write(0, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta({**fields, "settings": settings})))
    for number in range(1, 4):  # new producers, subjects and cursors take the general way
        history.write(0, _pull(history, 20_000))
        history.write(1, _lone(history, 1, number))
    assert len(history.in_flight[0, 1]) == 3
    return history


def test_a_pull_that_waits_for_several_gets_them_in_order() -> None:
    history = _handed(10, {})
    history.write(0, _pull_of(history, 9, 2, history.next[0, 1]))
    history.write(1, _lone(history, 1, 4))
    assert history.pulls, "one is too few"
    history.write(1, _several(history, 5, 2))
    assert len(history.in_flight[0, 1]) == 6


@pytest.mark.parametrize(("most", "least", "ahead"), [(0, 0, 0), (1, 2, 0), (9, 1, 2)])
def test_a_wrong_pull_is_refused_on_both_ways(most: int, least: int, ahead: int) -> None:
    history = _handed(11, {})
    before = history.sides[0].short_frames
    history.seen.clear()
    history.write(0, _pull_of(history, most, least, history.next[0, 1] + ahead))
    assert history.seen["ERROR"] == 1, history.seen
    assert history.sides[0].short_frames == before


@pytest.mark.parametrize(("settings", "least", "count"), [({"max_unacked": 4}, 1, 1), ({}, 3, 0)])
def test_a_pull_that_finds_more_gets_what_both_ways_allow(settings: dict[str, int], least: int, count: int) -> None:
    history = _handed(12, settings)
    history.write(1, _lone(history, 1, 4))
    history.write(1, _lone(history, 1, 5))
    history.write(0, _pull_of(history, 9, least, history.next[0, 1]))
    assert len(history.in_flight[0, 1]) == 3 + count


def test_a_pull_that_finds_more_gets_max_pull_count_at_most() -> None:
    history = _handed(12, {})
    history.write(1, _several(history, 4, 7))
    history.write(0, _pull_of(history, 9, 1, history.next[0, 1]))
    assert len(history.in_flight[0, 1]) == 3 + 6


def _nacked(history: History, delay_ms: int) -> bytes:
    """Return a HAND_BACK that nacks the first message of connection 0."""
    number = history.in_flight[0, 1].pop(0)
    rows = frames.BACK.pack(number, number + 1, delay_ms, Disposition.NACK, 0)
    payload = frames.HAND_BACK.pack(1, frames.crc32c(rows)) + rows
    meta = frames.pack_meta({"reasons": ["odd"]})
    return encode_frame(FrameKind.HAND_BACK, history.number(), meta, len(payload)) + payload


def test_a_retry_comes_before_new_messages_on_both_ways() -> None:
    """A record of the group says that it has one: what was plain before is not any more."""
    history = _handed(15, {})
    history.write(0, _nacked(history, 0))
    history.write(1, _lone(history, 1, 4))
    history.write(0, _pull_of(history, 9, 1, history.next[0, 1]))
    assert len(history.in_flight[0, 1]) == 2 + 1, "the retry alone: no answer has both"


def test_a_consumer_that_is_to_have_a_quarantined_message_alone_gets_no_other() -> None:
    history = _handed(16, {})
    fields = {"group": "g", "prefixes": ["orders."], "consumer": "d", "nonce": b"m", "client": b"d"}
    history.write(2, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
    ((_, subscription),) = [key for key in history.next if key[0] == 2]

    def pull(timeout_ms: int) -> bytes:
        wanted = 9, 1, 1 << 20, timeout_ms, history.next[2, subscription]
        found = history.simple(FrameKind.PULL, frames.PULL, subscription, *wanted)
        history.pulls[2, history.request] = 2, subscription
        return found

    history.write(1, _lone(history, 1, 4))
    history.write(2, pull(20_000))
    assert len(history.in_flight[2, subscription]) == 1
    for _ in range(4):  # the other consumer is silent, and its session expires
        history.advance(9_000_000)
        history.write(2, pull(0))
    history.write(2, pull(20_000))
    history.write(1, _lone(history, 1, 5))
    assert len(history.in_flight[2, subscription]) == 1, "it is to have nothing in flight first"


def _two_wait(groups: tuple[str, str], prefixes: str) -> History:
    """Return a history in which pulls of connections 0 and 2 wait, the first for two subjects: it is not simple."""
    history = History(19)
    for connection, group, several in ((2, groups[1], [prefixes]), (0, groups[0], ["orders.paid", "stock"])):
        fields = {"group": group, "prefixes": several, "consumer": f"c{connection}", "nonce": b"n", "client": b"c"}
        history.write(connection, encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
    numbers = dict(history.next.keys())

    def pull(connection: int) -> None:
        wanted = 9, 1, 1 << 20, 20_000, history.next[connection, numbers[connection]]
        frame = history.simple(FrameKind.PULL, frames.PULL, numbers[connection], *wanted)
        history.pulls[connection, history.request] = connection, numbers[connection]
        history.write(connection, frame)

    for number in range(3):  # new producers, subjects and cursors take the general way
        pull(2)
        history.write(1, _lone(history, 1, number))
    pull(0)
    if groups[0] != groups[1]:  # it gets what was sent so far
        pull(0)
    pull(2)
    history.seen.clear()
    before = history.sides[0].short_frames
    history.write(1, _lone(history, 1, 3))
    assert history.sides[0].short_frames == before + 1
    return history


def test_a_pull_that_is_left_to_the_turn_loses_no_message_to_a_later_one_of_its_group() -> None:
    history = _two_wait(("g", "g"), "orders.")
    assert history.seen["MESSAGES"] == 1
    assert [connection for connection, _ in history.pulls.values()] == [2], "the other has waited for longer"


def test_the_turn_writes_the_records_of_all_pulls_if_one_is_left_to_it() -> None:
    history = _two_wait(("h", "g"), "orders.paid")
    assert history.seen["MESSAGES"] == 2, "by one write on both ways"


@pytest.mark.parametrize("prefix", ["orders.", "orders.paid"])
def test_a_pull_that_does_not_account_for_what_it_passes_is_left_to_the_turn(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = _waiting(21, prefix)

    def shorter(*run: Any) -> MessageRange:
        messages = range_of_run(*run)
        return messages._replace(total=messages.total - 1)

    monkeypatch.setattr(short_way, "range_of_run", shorter)
    history.write(1, _several(history, 4, 3))
    assert len(history.in_flight[0, 1]) == 3 + 3, "it has them all, and a record says so"


def test_a_refused_ack_is_told_with_messages_that_come_at_once() -> None:
    """An ack that may wait is answered with the next messages, also by a send of another connection."""
    history = _handed(17, {})
    sequence = history.next[0, 1]
    packed, crc = pack_numbers([sequence + 5, sequence + 6])
    payload = frames.ACK.pack(1, crc) + packed
    wrong = encode_frame(FrameKind.ACK, history.number(), b"", len(payload), frames.MAY_WAIT) + payload
    history.write(0, wrong, _pull_of(history, 9, 1, sequence))
    before = history.sides[0].short_frames
    history.write(1, _lone(history, 1, 4))
    assert history.sides[0].short_frames == before + 1
    assert history.seen["ACKED"] == 1, "it says how many were refused"


def test_nothing_is_stored_after_a_failed_sync_on_both_ways() -> None:
    history = _handed(18, {})
    for side in history.sides:
        side.disk.fail("fdatasync", 1, errno.EIO)
    history.write(1, _lone(history, 1, 4, flags=frames.FLUSH))
    history.seen.clear()
    history.write(1, _lone(history, 1, 5))
    assert history.seen["SENT"] == 0
    assert history.seen["ERROR"] == 1, history.seen


def test_acks_that_wait_are_answered_in_time() -> None:
    history = _waiting(7)
    history.write(1, _lone(history, 1, 4))
    history.write(0, _ack(history), _pull(history, 20_000))
    history.advance(100_000)
    history.seen.clear()
    history.write(1, _lone(history, 1, 5))
    short = history.sides[0]
    before = short.short_frames
    history.write(0, _ack(history), _pull(history, 20_000))
    assert short.short_frames == before + 2
    for _ in range(19):
        history.advance(1_000)
        history.write(1, _lone(history, 1, 0, "stock"))  # a repeat, for nobody
        assert not history.seen["ACKED"]
    history.advance(1_000)
    assert history.seen["ACKED"] == 1


def test_a_consumer_that_gets_a_message_is_alive() -> None:
    history = _waiting(9)
    history.advance(3_000_000)
    before = history.sides[0].short_frames
    history.write(1, _lone(history, 1, 4))
    assert history.sides[0].short_frames == before + 1
    history.advance(1_000)
    asked = frames.pack_meta({"action": "consumers", "group": "g"})
    history.seen.clear()
    history.write(2, encode_frame(FrameKind.ADMINISTER, history.number(), asked))  # for how long it has been silent
    assert history.seen["ADMINISTERED"] == 1


@pytest.mark.parametrize("timeout_ms", [0, 1, 19, 20, 50])
def test_a_pull_is_answered_when_its_time_is_up(timeout_ms: int) -> None:
    history = _waiting(8)
    history.write(1, _lone(history, 1, 4))
    history.advance(100_000)
    before = history.sides[0].short_frames
    history.seen.clear()
    history.write(0, _ack(history), _pull(history, timeout_ms))
    assert history.sides[0].short_frames == before + (1 if timeout_ms < 20 else 2)
    if timeout_ms:
        history.advance(timeout_ms * 1_000 - 1)
        assert not history.seen["MESSAGES"]
        history.advance(10_000)  # timers are rounded up, and looked at every 5 ms
    assert history.seen["MESSAGES"] == 1


def test_an_answer_that_waits_for_the_disk_keeps_its_bytes() -> None:
    history = _waiting(6)
    history.is_faulty = True
    for side in history.sides:
        side.disk.fail_always("pwritev", errno.ENOSPC, "/pulls/")
    short = history.sides[0]
    before = short.short_frames
    history.write(1, _lone(history, 1, 4))
    assert short.short_frames == before + 1
    history.write(1, _lone(history, 1, 5))  # received into the same bytes
    assert history.pulls
    for side in history.sides:
        side.disk.heal()
    history.advance(300_000)
    assert not history.pulls, "the answers were the same"


def test_an_answer_that_waits_for_the_disk_is_tried_again_in_the_next_turn() -> None:
    history = _waiting(6)
    short = history.sides[0]
    before = short.short_frames
    short.disk.fail("pwritev", 2, errno.ENOSPC)  # the batch is written, the record of the pull is not
    short.connections[1].write(_lone(history, 1, 4))
    short.server.settle()
    assert short.short_frames == before + 1
    assert [frame[0] for _, frame in short.taken()] == [FrameKind.MESSAGES, FrameKind.SENT], "without a timer"


def test_timers_are_not_looked_at_while_nothing_is_due() -> None:
    history = History(5)
    server = history.sides[0].server
    for number in range(3):
        history.write(1, _lone(history, 1, number))
    history.advance(100_000)
    ticks, tick = list[int](), server.broker.tick
    server.broker.tick = lambda now: ticks.append(now.monotonic_us) or tick(now)  # type: ignore[method-assign,func-returns-value]
    for number in range(3, 103):
        history.advance(1_000)
        history.write(1, _lone(history, 1, number))
    assert history.sides[0].short_frames >= 100
    assert not ticks
    history.write(0, _lone(history, 9, 0, "other"))  # a new subject takes the general way
    history.advance(5_000)
    assert ticks, "a turn that something else causes looks at them"


def test_a_batch_waits_for_those_that_are_staged_before_it() -> None:
    history = History(4)
    for number in range(3):
        history.write(1, _lone(history, 1, number))
    server = history.sides[0].server
    way = server.broker.short_way
    assert way is not None
    staged, next_one = (memoryview(bytearray(_lone(history, 1, number)[frames.FRAME_SIZE :])) for number in (3, 4))
    server.broker.handle(Send(1, 9, staged, False), server.now)
    assert way.send(1, 10, next_one, len(next_one), False, server.now) is None
    server.broker.turn(server.now)
    assert way.send(1, 10, next_one, len(next_one), False, server.now) is not None
    sent = [effect for effect in server.broker.take_effects() if isinstance(effect, Sent)]
    assert [one.request for one in sent] == [9]


def test_a_pull_waits_for_the_sync_of_the_batch_before() -> None:
    history = _waiting(13)
    short = history.sides[0]
    before = short.short_frames
    short.connections[1].write(_lone(history, 1, 4, flags=frames.FLUSH) + _lone(history, 1, 5))
    short.server.loop.settle()
    assert short.short_frames == before + 2
    assert FrameKind.MESSAGES not in [frame[0] for _, frame in short.taken()], "the sync has not run"
    short.server.settle()
    assert FrameKind.MESSAGES in [frame[0] for _, frame in short.taken()]


def test_a_write_that_fails_leaves_nothing_behind_the_end() -> None:
    history = History(14)
    for number in range(3):
        history.write(1, _lone(history, 1, number))
    disk, server = history.sides[0].disk, history.sides[0].server
    way = server.broker.short_way
    assert way is not None
    batch = memoryview(bytearray(_several(history, 3, 1, 1_900)[frames.FRAME_SIZE :]))
    before = contents(disk)
    for _ in range(9):  # nothing, a part, or all of the bytes are there when a write fails
        disk.fail("pwritev", 1, errno.ENOSPC)
        assert way.send(1, 9, batch, len(batch), False, server.now) is None
        assert contents(disk) == before
    assert way.send(1, 9, batch, len(batch), False, server.now) is not None


def test_a_broker_that_stops_takes_nothing_the_short_way() -> None:
    history = History(2)
    for number in range(2):
        history.write(1, _lone(history, 1, number))
    for side in history.sides:
        side.server.broker.stop()
    history.write(1, _lone(history, 1, 2))
    assert history.seen["broker_stopping"] == 1, history.seen
