"""A token is revoked, or expires, in every state of a consumer's life: nothing is lost, and nothing goes on."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections import Counter
from typing import Any, Final

import msgpack
from crc32c import crc32c

from fuzz.core import Core, Wire
from qmq.broker.ports.rights import Rights
from qmq.format.build import RunContent, build_batch
from qmq.format.pieces import read_answer
from qmq.format.source import new_source
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.server.login.logins import Token
from tests.effort import part_of

HISTORIES: Final = 480
#: Longer than the session of a consumer without a connection, in seconds.
EXPIRED_S: Final = 31
STATES: Final = (
    "waiting pull", "in flight", "acking", "handing back", "heartbeating", "between connections", "reading a log",
    "solo",
)  # fmt: skip
WAIT_MS: Final = 20_000


class Party:
    """A client of raw frames."""

    def __init__(self, core: Core, name: str) -> None:
        self._core, self.wire, self._request, self._name = core, Wire(core), 0, name
        self.subscription = self.next_sequence = 0
        self.ask(FrameKind.HELLO, {"protocol": frames.PROTOCOL_VERSION, "client": "test", "token": f"{name}:{name}"})

    def put(self, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b"", flags: int = 0) -> None:
        """Send a request; the broker has read it, and not run a turn."""
        self._request += 1
        packed = b"" if meta is None else msgpack.packb(meta)
        self.wire.send(frames.encode_frame(kind, self._request, packed, len(payload), flags) + payload)

    def answers(self) -> list[Frame]:
        self._core.run()
        return list(self.wire.frames())

    def ask(self, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b"") -> Frame:
        self.put(kind, meta, payload)
        (answer,) = self.answers()
        return answer

    def subscribe(self, group: str | None, prefix: str) -> None:
        asked = {"group": group, "prefixes": [prefix], "consumer": self._name, "start": "first"}
        own = {} if group is None else {"nonce": self._name.encode(), "client": self._name.encode().ljust(16)}
        found = frames.unpack_meta(self.ask(FrameKind.SUBSCRIBE, asked | own).meta)
        self.subscription = found["subscription"]
        if group is not None:
            self.next_sequence = found["consumer_state"][3]

    def put_pull(self, count: int, timeout_ms: int) -> None:
        pull = frames.PULL.pack(self.subscription, count, 1, 1 << 16, timeout_ms, frames.NOT_EXPECTED)
        self.put(FrameKind.PULL, payload=pull)

    def pull(self, count: int) -> list[bytes]:
        self.put_pull(count, 0)
        return [body for answer in self.answers() for body in bodies_in(answer)]

    def take(self, count: int) -> list[bytes]:
        """Pull, and acknowledge what comes."""
        found = self.pull(count)
        if found:
            self.put_sequences(self.next_sequence, self.next_sequence + len(found))
            self.next_sequence += len(found)
            assert [answer.kind for answer in self.answers()] == [FrameKind.ACKED]
        return found

    def put_sequences(self, start: int, end: int) -> None:
        pairs = struct.pack("<2Q", start, end)
        self.put(FrameKind.ACK, payload=frames.ACK.pack(self.subscription, crc32c(pairs)) + pairs)

    def put_back(self, start: int, end: int) -> None:
        row = frames.BACK.pack(start, end, 0, 2, 0)
        head = frames.HAND_BACK.pack(self.subscription, crc32c(row))
        self.put(FrameKind.HAND_BACK, {"reasons": ["stops"]}, head + row)


def bodies_in(answer: Frame) -> list[bytes]:
    """Return the messages of an answer to a pull."""
    assert answer.kind == FrameKind.MESSAGES, frames.unpack_meta(answer.meta)
    return [bytes(body) for run in read_answer(answer.payload)[0] for body in run.bodies()]


def tokens(core: Core, worker: str) -> dict[str, Token]:
    """Return the tokens of the broker: that of the worker is there, gone or has expired."""

    def token(name: str, expires_us: int | None = None, **rights: Any) -> Token:
        return Token(Rights(name, **rights), (hashlib.sha256(name.encode()).digest(),), expires_us)

    found = {"boss": token("boss", is_admin=True)}
    if worker != "revoked":
        expires_us = core.loop.now().wall_us if worker == "expired" else None
        found["work"] = token("work", expires_us, consume=("",), group=("",), browse=("",))
    return found


def live(core: Core, number: int, state: str, choose: random.Random) -> None:
    """Live the life of a consumer up to *state*, end its token there, and count what another one gets."""
    subject, count = f"s.n{number}", choose.randrange(2, 12)
    sent = [b"%d" % body for body in range(count)]
    core.server.set_tokens(tokens(core, "there"))
    boss = Party(core, "boss")
    batch = build_batch(
        [RunContent(subject, sent, None)], created_at_us=1, producer_id=b"%016d" % number, producer_sequence=0,
        source=new_source(sender_bytes=4),
    )  # fmt: skip
    worker = Party(core, "work")
    group = None if state == "solo" else f"g{number}"
    worker.subscribe(group, subject)
    boss.subscribe(f"h{number}" if group is None else group, subject)
    stored = boss.ask(FrameKind.SEND, payload=b"".join(batch))
    assert stored.kind == FrameKind.SENT, frames.unpack_meta(stored.meta)
    first, taken = worker.next_sequence, worker.pull(count if state == "waiting pull" else choose.randrange(1, count))
    assert taken == sent[: len(taken)]
    acked: set[bytes] = set()
    part = choose.randrange(len(taken) + 1) if group is not None else 0
    if part:  # some are handled before
        worker.put_sequences(first, first + part)
        assert [answer.kind for answer in worker.answers()] == [FrameKind.ACKED]
        acked = set(taken[:part])
    asked: set[bytes] = set()
    match state:
        case "waiting pull" | "solo":
            worker.put_pull(5, WAIT_MS) if state == "waiting pull" else worker.pull(count)
            if state == "solo":
                worker.put_pull(5, WAIT_MS)
        case "acking":
            asked = set(taken[part:])
            if asked:
                worker.put_sequences(first + part, first + len(taken))
        case "handing back":
            if part < len(taken):
                worker.put_back(first + part, first + len(taken))
        case "heartbeating":
            worker.put(FrameKind.HEARTBEAT, payload=frames.HEARTBEAT.pack(b"work".ljust(16), 0))
        case "reading a log":
            worker.put(FrameKind.READ_LOG, payload=frames.READ_LOG.pack(0, 1 << 12, 0))
        case "between connections":
            worker.wire.hang_up()
            core.run()
    if choose.randrange(2):
        core.run()  # else the end comes in the same turn as the request
    core.server.set_tokens(tokens(core, choose.choice(("revoked", "expired"))))
    core.server.look_at_logins()
    if state != "between connections":
        *before, last = worker.answers()
        assert frames.unpack_meta(last.meta)["code"] == "unauthorized", state
        if asked and any(answer.kind == FrameKind.ACKED for answer in before):
            acked |= asked
        assert not any(answer.kind == FrameKind.MESSAGES and bodies_in(answer) for answer in before)
    assert core.server.tokens_in_use() == {"boss"}
    got = boss.take(count)
    if state == "between connections":
        assert got == sent[len(taken) :], "the others are its own until its session expires"
        boss.wire.hang_up()  # its session ends as well, since it sends no heartbeats
        core.loop.advance(EXPIRED_S)
        core.run()
        boss = Party(core, "boss")
        boss.subscribe(group, subject)
        got += boss.take(count)
    while more := boss.take(count):
        got += more
    assert not acked & set(got), "what was acknowledged does not come again"
    assert set(got) >= set(sent) - acked - asked, (state, got)
    late = Wire(core)
    hello = {"protocol": frames.PROTOCOL_VERSION, "client": "test", "token": "work:work"}
    late.send(frames.encode_frame(FrameKind.HELLO, 1, frames.pack_meta(hello), 0))
    core.loop.advance(6)
    core.run()
    (answer,) = late.frames()
    assert frames.unpack_meta(answer.meta)["code"] == "unauthorized"
    for wire in (boss.wire, late, worker.wire):
        wire.hang_up()
    core.run()


def test_a_token_ends_in_every_state_of_a_consumer() -> None:
    seed = int(os.environ.get("QMQ_TEST_SEED", "20881"))
    print(f"QMQ_TEST_SEED={seed}")
    lived = Counter[str]()
    core = Core()
    for number in range(max(part_of(HISTORIES), 10 * len(STATES))):
        if number % 80 == 79:  # it takes 100 groups
            core.close()
            core = Core()
        choose = random.Random(f"{seed} {number}")
        state = choose.choice(STATES)
        live(core, number, state, choose)
        lived[state] += 1
    core.close()
    print(dict(lived))
    assert all(lived[state] > 0 for state in STATES), lived
