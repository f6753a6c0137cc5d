"""Frames into a broker: several untrusted clients at once, and a good client beside them who must not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from fuzz.batches import make_batch
from fuzz.core import Core, Wire
from fuzz.target import GrowthCheck, Picks
from qmq.format.build import RunContent, build_batch
from qmq.format.layout import MESSAGE_ID
from qmq.format.pieces import read_answer
from qmq.format.source import new_source
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind

#: After so many frames the broker is stopped, its files verified, and another one made.
_FRAMES_A_BROKER: Final = 200_000
_ROUNDS_A_CHECK: Final = 8
_UNTRUSTED: Final = 3
_MOST_WAITS: Final = 100
_WAIT_S: Final = 0.01
_ANSWERS: Final = frozenset(kind for kind in FrameKind if kind >= 128)
#: What no untrusted client may cause.
_FAULTS: Final = frozenset(("internal_error", "storage_error", "bad_bytes", "sync_failed", "error"))
#: With room for the name of a token.
_SOURCE: Final = new_source(sender_bytes=4)
_HELLO: Final = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "fuzz"})
_NAMES: Final = ("a.", "m.", "", "a.b", "m.x1", "r.", "large", "never.", "bad..name", "é", "x" * 201)
_GROUPS: Final = (None, "g", "h", "bad group", 5, "", b"g")
_STARTS: Final[tuple[Any, ...]] = (
    None,
    "first",
    "new",
    ["time", 0],
    ["time", 1 << 62],
    ["sequence", 3],
    "never",
    ["time"],
    [],
)


def check_answer(frame: Frame) -> None:
    """An answer that docs/PROTOCOL.md knows, and no fault of the broker."""
    assert frame.kind in _ANSWERS, frame.kind
    if frame.kind == FrameKind.ERROR:
        fields = frames.unpack_meta(frame.meta)
        assert fields["code"] not in _FAULTS, fields


class GoodClient:
    """Who sends and pulls all the time, and gets each of its messages once."""

    def __init__(self, core: Core, hello: bytes) -> None:
        self._core = core
        self._wire = Wire(core)
        self._sent = 0
        self._send(FrameKind.HELLO, 1, hello)
        self._expect(FrameKind.WELCOME, 1)
        # Alone: a consumer of a group would have to send heartbeats.
        meta = msgpack.packb({"prefixes": ["good."], "consumer": "good"})
        self._send(FrameKind.SUBSCRIBE, 2, meta)
        self._subscription = frames.unpack_meta(self._expect(FrameKind.SUBSCRIBED, 2).meta)["subscription"]

    def check(self) -> None:
        """Send one message and pull it."""
        self._sent += 1
        request, body = 2 * self._sent + 1, b"%d" % self._sent
        pull = frames.PULL.pack(self._subscription, 10, 1, 1 << 16, 1_000, frames.NOT_EXPECTED)
        self._send(FrameKind.PULL, request, payload=pull)
        parts = build_batch(
            [RunContent("good.one", [body], None)],
            created_at_us=1,
            producer_id=b"good" * 4,
            producer_sequence=self._sent,
            source=_SOURCE,
        )
        self._send(FrameKind.SEND, request + 1, payload=b"".join(parts), flags=frames.FLUSH * (self._sent % 2))
        self._core.run()
        answers = {frame.kind: frame for frame in self._wire.frames()}
        assert set(answers) == {FrameKind.SENT, FrameKind.MESSAGES}, answers
        runs, damaged = read_answer(answers[FrameKind.MESSAGES].payload)
        assert [run.bodies() for run in runs] == [[body]]
        assert not damaged

    def _send(self, kind: FrameKind, request: int, meta: bytes = b"", payload: bytes = b"", flags: int = 0) -> None:
        self._wire.send(frames.encode_frame(kind, request, meta, len(payload), flags) + payload)

    def _expect(self, kind: FrameKind, request: int) -> Frame:
        self._core.run()
        (frame,) = self._wire.frames()
        assert (frame.kind, frame.request) == (kind, request), frame
        return frame


class Wires:
    """One broker after another; an input is a short story of what untrusted clients do to it."""

    _good_hello = _HELLO

    def __init__(self) -> None:
        self.frames = 0
        self._core: Core | None = None
        self._foreign_segments: list[Wire | None] = []
        self._rounds = 0
        self._subscribed = 1  # the last number that the broker gave
        self._stored = 0  # where it put the last batch
        sends, pulls, one_frame = self._batch, self._pull, self._frame
        self._acts: tuple[Callable[[Picks, Wire], None], ...] = (
            self._bytes, self._hello, one_frame, sends, sends, pulls, pulls, self._subscribe, self._numbers,
            self._subjects, self._silence, self._behave, sends, pulls, one_frame, self._hello,
        )  # fmt: skip

    def once(self, data: bytes) -> int:
        """The story of some untrusted clients."""
        if self._core is None:
            self._core, self.frames = Core(), 0
            self._begin(self._core)
            self._good = GoodClient(self._core, self._good_hello)
            self._subscribed = 1
        core, picks, before = self._core, Picks(data), self.frames
        with GrowthCheck():
            self._foreign_segments = [None] * _UNTRUSTED
            while picks.left:
                act = picks.number(1)
                self._acts[act & 15](picks, self._untrusted(act >> 4))
                if act & 128:
                    core.run()
            self._end()
            self._rounds += 1
            if self._rounds % _ROUNDS_A_CHECK == 0:
                self._good.check()
        frames = self.frames - before
        if self.frames >= _FRAMES_A_BROKER:
            self.close()
        return frames

    def close(self) -> None:
        if self._core is not None:
            self._good.check()
            self._core.close()
            self._core = None

    def _begin(self, core: Core) -> None:
        """Prepare a new broker."""

    def _untrusted(self, number: int) -> Wire:
        place = number % _UNTRUSTED
        untrusted = self._foreign_segments[place]
        if untrusted is None or not untrusted.open:
            assert self._core is not None
            self._collect(untrusted)
            untrusted = self._foreign_segments[place] = Wire(self._core)
        return untrusted

    def _end(self) -> None:
        """The untrusted clients go; everything that was said to them was right."""
        assert self._core is not None
        for untrusted in self._foreign_segments:
            if untrusted is not None:
                untrusted.reads = True
                untrusted.read_all()
        self._core.run()
        for _ in range(_MOST_WAITS):  # what was wrong has to be waited for
            if not any(untrusted is not None and untrusted.unsent for untrusted in self._foreign_segments):
                break
            self._core.loop.advance(_WAIT_S)
            self._core.run()
        for untrusted in self._foreign_segments:
            self._collect(untrusted)
            if untrusted is not None:
                untrusted.hang_up()
        self._core.run()

    def _collect(self, untrusted: Wire | None) -> None:
        if untrusted is not None:
            for frame in untrusted.frames():
                self._check(untrusted, frame)
                if frame.kind == FrameKind.SENT:
                    self._stored = frames.SENT.unpack_from(frame.payload)[0]

    def _check(self, untrusted: Wire, frame: Frame) -> None:
        """Check what was said to a client."""
        check_answer(frame)

    # --- what an untrusted client does --------------------------------------------------------------------------------

    def _put(self, untrusted: Wire, kind: int, request: int, meta: bytes, payload: bytes, flags: int = 0) -> None:
        self.frames += 1
        untrusted.send(frames.encode_frame(kind, request, meta, len(payload), flags) + payload)

    def _bytes(self, picks: Picks, untrusted: Wire) -> None:
        self.frames += 1
        untrusted.send(picks.take(picks.number(1)))

    def _hello(self, picks: Picks, untrusted: Wire) -> None:
        self._put(untrusted, FrameKind.HELLO, 1, _HELLO, b"")

    def _frame(self, picks: Picks, untrusted: Wire) -> None:
        kind, how = picks.number(1) % 13, picks.number(1)
        meta, payload = picks.take(how & 15), picks.take(how >> 4)
        frame = bytearray(frames.encode_frame(kind, picks.number(1), meta, len(payload), picks.number(1) & 3) + payload)
        if how & 1:
            picks.edit(memoryview(frame)[:16])
        self.frames += 1
        untrusted.send(bytes(frame))

    def _batch(self, picks: Picks, untrusted: Wire) -> None:
        batch = bytes(make_batch(picks))
        self._put(untrusted, FrameKind.SEND, 1 + picks.number(1), b"", batch, frames.FLUSH * (picks.number(1) & 1))

    def _pull(self, picks: Picks, untrusted: Wire) -> None:
        last = self._a_subscription(picks)
        payload = frames.PULL.pack(
            last,
            picks.number(1),
            picks.number(1) & 3,
            picks.number(1) << 8 | 1,
            picks.number(1) << 4,
            picks.number(1) if picks.number(1) & 1 else frames.NOT_EXPECTED,
        )
        self._put(untrusted, FrameKind.PULL, 1 + picks.number(1), b"", payload)

    def _a_subscription(self, picks: Picks) -> int:
        """One of the last that the broker gave."""
        return max(self._subscribed - picks.number(1) % 4, 0)

    def _subscribe(self, picks: Picks, untrusted: Wire) -> None:
        names: list[Any] = [_NAMES[picks.number(1) % len(_NAMES)] for _ in range(picks.number(1) % 5)]
        fields = {
            "group": _GROUPS[picks.number(1) % len(_GROUPS)],
            "prefixes": names,
            "consumer": "c",
            "start": _STARTS[picks.number(1) % len(_STARTS)],
        }
        meta = memoryview(bytearray(msgpack.packb(fields)))
        if picks.number(1) & 128:
            picks.edit(meta)
        self._put(untrusted, FrameKind.SUBSCRIBE, 1 + picks.number(1), bytes(meta), b"")
        self._learn(untrusted)

    def _learn(self, untrusted: Wire) -> None:
        assert self._core is not None
        self._core.run()
        for frame in untrusted.frames():
            self._check(untrusted, frame)
            if frame.kind == FrameKind.SENT:
                self._stored = frames.SENT.unpack_from(frame.payload)[0]
            elif frame.kind == FrameKind.SUBSCRIBED:
                self._subscribed = frames.unpack_meta(frame.meta)["subscription"]

    def _find(self, picks: Picks, untrusted: Wire, request: int) -> None:
        fields: dict[str, Any] = {"prefix": _NAMES[picks.number(1) % len(_NAMES)], "newest": bool(picks.number(1) & 1)}
        choice = picks.number(1)
        if choice & 1:
            fields["key"] = "k" * min(picks.number(2), 60_000)  # meta has at most 65,535 bytes
        if choice & 2:
            fields["original"] = picks.take(16)
        if choice & 4:
            fields["after"] = [picks.number(8) >> 1, picks.number(2)]
        if choice & 8:
            fields["since_us"], fields["until_us"] = picks.number(2), picks.number(8) >> 1
        if choice & 16:
            fields["max_count"], fields["max_bytes"] = picks.number(1), picks.number(2)
        meta = memoryview(bytearray(msgpack.packb(fields)))
        if choice & 128:
            picks.edit(meta)
        self._put(untrusted, FrameKind.FIND, request, bytes(meta), b"")
        if choice & 64:
            assert self._core is not None
            name = MESSAGE_ID.pack(self._core.store.store_id, picks.number(2), self._stored)
            asked = {"id": name, "places": [picks.number(1), self._stored + picks.number(1)]}
            meta = memoryview(bytearray(msgpack.packb(asked)))
            if choice & 128:
                picks.edit(meta)
            self._put(untrusted, FrameKind.TRACE, request, bytes(meta), b"")

    def _numbers(self, picks: Picks, untrusted: Wire) -> None:
        request, which = 1 + picks.number(1), picks.number(1) % 9
        position = self._stored + picks.number(1) if picks.number(1) & 1 else self._stored
        if which == 8:
            assert self._core is not None
            name = MESSAGE_ID.pack(self._core.store.store_id, picks.number(2), position)
            self._put(untrusted, FrameKind.GET, request, b"", name)
        elif which == 7:
            self._find(picks, untrusted, request)
        elif which == 6:
            self._put(untrusted, FrameKind.SEGMENTS, request, b"", frames.SEGMENTS.pack(position, picks.number(1) & 1))
        elif which == 5:
            span = frames.BATCHES.pack(position, position + picks.number(2), picks.number(1) & 1)
            self._put(untrusted, FrameKind.BATCHES, request, b"", span)
        elif which == 4:
            read = frames.READ_LOG.pack(position, picks.number(2), picks.number(1) & 1)
            self._put(untrusted, FrameKind.READ_LOG, request, b"", read)
        elif which == 3:
            report = frames.REPORT.pack(position, picks.number(1) & 3, picks.number(1) & 3, picks.number(1) & 1)
            self._put(untrusted, FrameKind.REPORT, request, msgpack.packb({"reason": "fuzz"}), report)
        elif which == 0:
            self._put(untrusted, FrameKind.WITHDRAW, request, b"", frames.WITHDRAW.pack(1 + picks.number(1)))
        elif which == 1:
            number = self._a_subscription(picks)
            self._put(untrusted, FrameKind.UNSUBSCRIBE, request, b"", frames.UNSUBSCRIBE.pack(number))
        else:
            producer = picks.take(2).ljust(16, b"\0")
            if picks.number(1) & 1:
                self._put(untrusted, FrameKind.LAST_SEQUENCE, request, b"", producer)
            else:
                self._put(
                    untrusted,
                    FrameKind.CLAIM,
                    request,
                    b"",
                    frames.CLAIM.pack(producer, picks.take(1).ljust(16, b"\0")),
                )

    def _subjects(self, picks: Picks, untrusted: Wire) -> None:
        fields = {
            "prefix": _NAMES[picks.number(1) % len(_NAMES)],
            "after": picks.number(2),
            "limit": picks.number(2),
        }
        self._put(untrusted, FrameKind.SUBJECTS, 1 + picks.number(1), msgpack.packb(fields), b"")

    def _silence(self, picks: Picks, untrusted: Wire) -> None:
        assert self._core is not None
        self._core.run()
        self._core.loop.advance(picks.number(1) / 10)

    def _behave(self, picks: Picks, untrusted: Wire) -> None:
        which = picks.number(1) % 4
        if which == 0:
            untrusted.reads = False
        elif which == 1:
            untrusted.reads = True
            untrusted.read_all()
        elif which == 2:
            untrusted.hang_up()
        else:
            self._bytes(picks, untrusted)

    def seeds(self) -> list[bytes]:
        hello, subscribe = b"\x81", b"\x87\x01\x00\x01\x00\x00\x00\x05"
        send, pull = b"\x83\x00\x00\x00\x05\x01", b"\x85\x00\xff\x01\xff\x01\x07"
        stories = [
            hello + send + subscribe + pull,
            hello + subscribe + pull + send * 3 + b"\x8a\x50" + pull,
            hello + b"\x8b\x00" + subscribe + send * 4 + pull * 8 + b"\x8b\x01",
            hello + b"\x89\x02\x00\x00\x10\x00\x05" * 18,
            hello + subscribe * 10 + b"\x88\x05\x01\x00" + b"\x88\x06\x00\x01" + b"\x88\x07\x02\x00\x00",
            b"\x8a\xff" + b"\x90\x10GET / HTTP/1.1\r\n",
            hello + b"\x80\x10" + b"\xff" * 16 + hello,
        ]
        stories.append(hello + send + subscribe + b"\x88\x05\x03\x00\x00\x00\x00" * 18)
        stories += [
            hello + bytes([0x84, number, 0, how, 1, 30, 0, 7, 3]) for number in range(9) for how in range(0, 64, 7)
        ]
        return stories
