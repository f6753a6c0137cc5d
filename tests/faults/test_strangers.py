"""A real broker under attack: who attacks is told so, nobody else notices, and its memory stays bounded."""

from __future__ import annotations

import os
import random
import re
import struct
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_DTYPE, BATCH_HEADER_SIZE, RUN_DTYPE, RUN_SIZE
from qmq.format.pieces import read_answer
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, MAX_HELLO_BYTES, FrameKind, decode_error
from tests.certificates import active
from tests.effort import part_of
from tests.faults.brokers import TIMEOUT_S, until
from tests.faults.strangers import BUFFERED, HELLO_FRAME, KIB, MIB, Siege, UntrustedClient, connections_at_most, siege
from tests.format.contents import Contents, batch_of, plain, reseal, rich, with_table
from tests.net.frames import batch, frame, pull

#: Long, and others pass the same lines: several times as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

# --- many, and slow --------------------------------------------------------------------------------------------------


async def test_ten_thousand_who_say_nothing_are_told_and_closed(tmp_path: Path) -> None:
    """A third of them by default, all with QMQ_EXAMPLES=100."""
    wanted = connections_at_most(part_of(10_000))
    settings = {"first_frame_timeout_ms": 8_000, "max_connections": wanted + 10}
    async with siege(tmp_path / "data", wanted + 500, wanted, **settings) as s:
        print(f"{sum(not untrusted.ended for untrusted in s.untrusted_clients)} at the same time")
        await until(lambda: all(untrusted.ended for untrusted in s.untrusted_clients), "all silent ones are closed")
        told = Counter(
            untrusted.last_word()[0] if untrusted.frames() else "nothing" for untrusted in s.untrusted_clients
        )
        print(dict(told))
        assert wanted > 1_000
        assert told["protocol_error"] > wanted // 2


async def test_who_stays_beyond_max_connections_is_told_and_the_others_stay(tmp_path: Path) -> None:
    async with siege(tmp_path / "data", max_connections=50) as s:
        inside = await s.crowd(40, hello=True)
        await s.crowd(1_000)
        await until(
            lambda: sum(untrusted.ended for untrusted in s.untrusted_clients) >= 991,
            "those who are too many are closed",
        )
        refused = [untrusted for untrusted in s.untrusted_clients if untrusted.ended]
        assert not any(untrusted.ended for untrusted in inside)
        told = [untrusted.last_word()[0] for untrusted in refused if untrusted.frames()]
        print(f"{len(told)} of {len(refused)} were told")
        assert set(told) == {"overloaded"}


async def test_who_comes_and_goes_all_the_time_changes_nothing(tmp_path: Path) -> None:
    async with siege(tmp_path / "data") as s:
        for _ in range(15):
            for untrusted in await s.crowd(200):
                untrusted.leave()
            s.untrusted_clients.clear()
        await s.regular.goes_on()


async def test_a_hello_byte_by_byte_ends_and_disturbs_nobody(tmp_path: Path) -> None:
    """When it ends, tests/net/server/test_accept.py says, by a clock that is set."""
    hello = frames.FRAME.pack(MAX_HELLO_BYTES, FrameKind.HELLO, 0, MAX_HELLO_BYTES - FRAME_SIZE, 1)
    async with siege(tmp_path / "data", first_frame_timeout_ms=1_000) as s:
        await s.crowd(200)
        sent = 0
        while not all(untrusted.ended for untrusted in s.untrusted_clients):
            if sent < MAX_HELLO_BYTES - 1:
                for untrusted in s.untrusted_clients:
                    if not untrusted.ended:
                        untrusted.send(hello[sent : sent + 1] or b"\0")
                sent += 1
            await s.regular.goes_on(1)
        for untrusted in s.untrusted_clients:
            code, text = untrusted.last_word()
            assert code == "protocol_error"
            assert "no HELLO within 1 s" in text


async def test_frames_that_never_end_share_a_bounded_room(tmp_path: Path) -> None:
    """A large frame begun on each of 200 connections, a byte now and then: 200 MiB, had all of them their room."""
    large = frames.FRAME.pack(1 * MIB, FrameKind.SEND, 0, 0, 9) + bytes(100)
    small = frame(FrameKind.SEND, 9, batch(b"x" * 1_000))
    async with siege(tmp_path / "data") as s:
        some = await s.crowd(300, hello=True)
        for place in range(100):
            for untrusted in some:
                if not untrusted.ended:
                    untrusted.send(small[place : place + 1])
            for untrusted in await s.crowd(2, hello=True):
                untrusted.send(large[:FRAME_SIZE])
            for untrusted in s.untrusted_clients[len(some) :]:
                if not untrusted.ended:
                    untrusted.send(b"\0")
            await s.regular.goes_on(1)
        ended = [untrusted for untrusted in s.untrusted_clients if untrusted.ended]
        print(f"{len(ended)} of {len(s.untrusted_clients)} made room")
        assert len(s.untrusted_clients) - len(ended) - len(some) <= BUFFERED // MIB
        for untrusted in ended:
            code, text = untrusted.last_word()
            assert code == "overloaded"
            assert "max_buffered_bytes" in text


# --- who does not read -----------------------------------------------------------------------------------------------


#: Messages under ``large.``, four in a MiB: more than systems keep for a connection that does not read.
LARGE: Final = 48
#: Pulls that take all of them.
PULLS: Final = LARGE // 4


def pulls(subscription: int) -> bytes:
    """As many as are needed for all messages."""
    payload = frames.PULL.pack(subscription, 100, 1, 1 * MIB, 0, frames.NOT_EXPECTED)
    return b"".join(frame(FrameKind.PULL, 3 + number, payload) for number in range(PULLS))


async def filled(s: Siege) -> None:
    """LARGE messages are stored."""
    untrusted = await s.untrusted(hello=True)
    for number in range(LARGE):
        untrusted.send(frame(FrameKind.SEND, 1 + number, batch(b"x" * 250_000, subject="large.one", sequence=number)))
    await until(lambda: len(untrusted.frames()) == LARGE, "the messages are stored")
    assert {answer.kind for answer in untrusted.frames()} == {FrameKind.SENT}
    s.untrusted_clients.clear()
    untrusted.leave()


async def test_who_pulls_and_never_reads_waits_or_goes(tmp_path: Path) -> None:
    async with siege(tmp_path / "data") as s:
        await filled(s)
        deaf = [await pulling(s) for _ in range(40)]
        await s.regular.goes_on(200)
        await some_are_answered(deaf)


async def pulling(s: Siege) -> UntrustedClient:
    """One that has pulled all of ``large.`` and does not read."""
    untrusted, subscription = await s.solo(receive_bytes=64 * KIB)
    untrusted.transport.pause_reading()
    untrusted.send(pulls(subscription))
    return untrusted


async def some_are_answered(pulled: list[UntrustedClient]) -> None:
    """They read on: some get all that they pulled, the others were cut off."""
    for untrusted in pulled:
        untrusted.transport.resume_reading()
    await until(
        lambda: all(untrusted.ended or len(untrusted.frames()) == PULLS for untrusted in pulled), "they read in the end"
    )
    stayed = [untrusted for untrusted in pulled if len(untrusted.frames()) == PULLS]
    print(f"{len(stayed)} of {len(pulled)} were answered, the others had to go")
    assert 0 < len(stayed) < len(pulled)
    for untrusted in stayed:
        runs = [run for answer in untrusted.frames() for run in read_answer(answer.payload)[0]]
        assert sum(run.count for run in runs) == LARGE


async def test_who_sends_and_never_reads_is_not_read_from(tmp_path: Path) -> None:
    again = frame(FrameKind.SEND, 5, batch(b"x")) * 5_000  # stored once, answered each time
    async with siege(tmp_path / "data") as s:
        deaf = await s.untrusted(hello=True, receive_bytes=4 * KIB)
        deaf.transport.pause_reading()
        unsent = before = 0
        for _ in range(500):
            if deaf.unsent() < len(again):
                deaf.send(again)
            await s.regular.goes_on(5)
            before, unsent = unsent, deaf.unsent()
            if unsent == before >= len(again):
                break
        assert unsent == before >= len(again)
        assert not deaf.ended
        deaf.transport.resume_reading()
        await until(lambda: deaf.unsent() == 0, "one that reads again is read from again")
        answers = deaf.frames()
        refused = [decode_error(answer) for answer in answers if answer.kind == FrameKind.ERROR]
        assert {type(error) for error in refused} <= {qmq.Overloaded}  # a slow machine reads many frames at once
        assert {answer.kind for answer in answers} - {FrameKind.ERROR} == {FrameKind.SENT}


async def test_who_reads_a_byte_now_and_then_gets_right_bytes_or_goes(tmp_path: Path) -> None:
    async with siege(tmp_path / "data") as s:
        await filled(s)
        if active():
            return  # a byte of TLS is none of the answer; pieces by TLS have tests of their own
        slow = [await pulling(s) for _ in range(40)]
        sockets = [untrusted.transport.get_extra_info("socket").fileno() for untrusted in slow]
        sipped = 0
        for _ in range(300):
            for untrusted, fd in zip(slow, sockets, strict=True):
                try:
                    untrusted.data_received(os.read(fd, 1))
                    sipped += 1
                except (BlockingIOError, ConnectionError):
                    pass
            await s.regular.goes_on(1)
        print(f"{sipped} bytes, one by one")
        assert sipped > 300
        await some_are_answered(slow)


# --- what they say ---------------------------------------------------------------------------------------------------

FOREIGN: Final = {
    "http": b"GET /metrics HTTP/1.1\r\nHost: broker\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "tls 1.3": bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "kafka": bytes.fromhex("0000002300120003000000010006636f6e736f6c65000b6170616368652d6b61666b6106332e372e3000"),
    "redis": b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
    "redis inline": b"PING\r\n",
    "amqp 0-9-1": b"AMQP\x00\x00\x09\x01",
    "amqp 1.0": b"AMQP\x00\x01\x00\x00",
    "mqtt": bytes.fromhex("101000044d5154540402003c000474657374"),
    "nats": b'CONNECT {"verbose":false}\r\nPING\r\n',
    "stomp": b"CONNECT\naccept-version:1.2\nhost:broker\n\n\0",
    "postgres": bytes.fromhex("0000000804d2162f"),
    "postgres start": bytes.fromhex("00000015000300007573657200706f73746772657300") + b"\0",
    "memcached": b"get a\r\n",
    "smtp": b"EHLO untrusted client\r\n",
    "rocketmq": struct.pack(">II", 40, 36) + b'{"code":105,"language":"JAVA","opaque":0}',
    "pulsar": struct.pack(">II", 30, 26) + b"\x08\x02\x12\x16\x0a\x05pulsar",
    "telnet": b"\xff\xfb\x1f\xff\xfb\x20",
    "rdp": bytes.fromhex("030000130ee000000000000100080003000000"),
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "an answer": frame(FrameKind.WELCOME, 1, meta={"protocol": 1}),
}


async def test_other_protocols_are_told_what_this_is(tmp_path: Path) -> None:
    async with siege(tmp_path / "data", first_frame_timeout_ms=2_000) as s:
        for words in FOREIGN.values():
            before = await s.untrusted()
            before.send(words * 3)
            after = await s.untrusted(hello=True)
            after.send(words * 200)
        await until(lambda: all(untrusted.ended for untrusted in s.untrusted_clients), "all are closed")
        codes = {name: s.untrusted_clients[2 * number].last_word()[0] for number, name in enumerate(FOREIGN)}
        tls = {name: code for name, code in codes.items() if code == "tls_failed"}
        assert set(tls) == (set() if active() else {"tls 1.3"})
        assert set(codes.values()) - {"tls_failed"} == {"protocol_error"}, codes
        codes = {name: s.untrusted_clients[2 * number + 1].last_word()[0] for number, name in enumerate(FOREIGN)}
        assert set(codes.values()) == {"protocol_error"}, codes


HUGE: Final = 0xFFFFFFFF
BOMBS: Final = {
    "lists in lists": b"\x91" * 60_000,
    "maps in maps": b"\x81\xa1a" * 20_000,
    "nested and more behind": b"\x91" * 1_000 + b"\x90more",
    "a list of four billion": b"\xdd" + struct.pack(">I", HUGE),
    "a map of four billion": b"\xdf" + struct.pack(">I", HUGE),
    "a text of 4 GiB": b"\xdb" + struct.pack(">I", HUGE),
    "bytes of 4 GiB": b"\xc6" + struct.pack(">I", HUGE),
    "an extension of 4 GiB": b"\xc9" + struct.pack(">IB", HUGE, 1),
    "lists of many in a map": b"\x81\xa8subjects" + (b"\xdd" + struct.pack(">I", 4_000)) * 10_000,
    "nil 60,000 times": b"\xdc" + struct.pack(">H", 60_000) + b"\xc0" * 60_000,
    "a timestamp": b"\x81\xa1a\xd6\xff" + bytes(4),
    "a map with lists for names": b"\x81\x91\x01\x01",
    "a number for a name": b"\x81\x01\x01",
    "half a text": b"\x81\xa5abc",
    "no utf-8": b"\x81\xa2\xff\xfe\x01",
    "a reserved byte": b"\xc1",
}


async def test_bombs_in_any_meta_end_their_connection_only(tmp_path: Path) -> None:
    kinds = (FrameKind.SUBSCRIBE, FrameKind.SUBJECTS, FrameKind.REPORT)
    async with siege(tmp_path / "data") as s:
        for name, bomb in BOMBS.items():
            first = await s.untrusted()
            first.send(frames.encode_frame(FrameKind.HELLO, 1, bomb[: MAX_HELLO_BYTES - FRAME_SIZE]))
            for kind in kinds:
                later = await s.untrusted(hello=True)
                report = frames.REPORT.pack(1, 0, 1, 0) if kind == FrameKind.REPORT else b""
                later.send(frames.encode_frame(kind, 7, bomb, len(report)), report)
            here = s.untrusted_clients[-1 - len(kinds) :]
            await until(lambda here=here: all(one.ended for one in here), f"{name} ends its connections")
            assert {one.last_word()[0] for one in here} == {"protocol_error"}, name
            assert max(len(text) for one in here for _, _, text in one.errors()) < 1_000
        assert len(s.untrusted_clients) == len(BOMBS) * (1 + len(kinds))


async def test_bombs_in_the_table_of_a_batch_are_refused(tmp_path: Path) -> None:
    async with siege(tmp_path / "data") as s:
        untrusted = await s.untrusted(hello=True)
        for number, bomb in enumerate(BOMBS.values()):
            for runs in ([plain("a", 1)], [plain("a", 1), plain("b", 2)]):
                lie = with_table(batch_of(runs), bomb)
                untrusted.send(frame(FrameKind.SEND, 1 + number, bytes(lie)))
        await until(lambda: len(untrusted.frames()) == 2 * len(BOMBS), "each is answered")
        assert {code for _, code, _ in untrusted.errors()} == {"bad_batch"}
        assert not untrusted.ended


async def test_cut_and_random_frames_harm_nobody(tmp_path: Path) -> None:
    seed = int(os.environ.get("QMQ_TEST_SEED", "20881"))
    print(f"QMQ_TEST_SEED={seed}")
    choose = random.Random(seed)
    subscribe = frame(FrameKind.SUBSCRIBE, 2, meta={"group": "g", "prefixes": ["a."], "consumer": "c"})
    talk = HELLO_FRAME + subscribe + frame(FrameKind.SEND, 3, batch(b"x")) + pull(4, 1) + frame(FrameKind.SUBJECTS, 5)
    async with siege(tmp_path / "data", first_frame_timeout_ms=1_000) as s:
        for end in range(0, len(talk), 3):  # cut anywhere, and gone without a word
            untrusted = await s.untrusted()
            untrusted.send(talk[:end])
            untrusted.end()
        for _ in range(300):
            untrusted = await s.untrusted(hello=choose.random() < 0.8)
            for _ in range(20):
                size, kind = choose.randrange(60), choose.choice([*range(1, 12), choose.randrange(256)])
                meta = choose.choice([0, 0, choose.randrange(size + 1), choose.randrange(1 << 16)])
                declared = FRAME_SIZE + size if choose.random() < 0.95 else choose.randrange(1 << 32)
                untrusted.send(frames.FRAME.pack(declared, kind, choose.choice([0, 1, 9]), meta, choose.randrange(3)))
                untrusted.send(choose.randbytes(size))
            untrusted.end()
        await until(lambda: all(untrusted.ended for untrusted in s.untrusted_clients), "all are closed")
        codes = Counter(code for untrusted in s.untrusted_clients for _, code, _ in untrusted.errors())
        print(dict(codes))
        assert codes["protocol_error"] >= 200 or active()  # a client by TLS that has ended reads no error
        assert codes.keys() <= {"protocol_error", "bad_batch", "invalid_name", "invalid_option", "unknown_subscription"}


# --- batches that lie ------------------------------------------------------------------------------------------------

RUNS: Final = {
    "one run": [plain("lie.a", 3)],
    "one message": [plain("lie.a", 1)],
    "several runs": [plain("lie.a", 2), plain("lie.b", 1), plain("lie.c", 3)],
    "columns": [rich("lie.a", 3), rich("lie.b", 2)],
}


def lies(runs: Contents) -> Iterator[tuple[str, bytes]]:
    """Every field of a batch with other values, checksums fitting and not; each with what was changed."""
    sound = batch_of(runs)
    header = parse_header(sound)
    start = BATCH_HEADER_SIZE + RUN_SIZE * header.runs
    parts = [("header", BATCH_HEADER_DTYPE, 0)]
    parts += [(f"run {number}", RUN_DTYPE, BATCH_HEADER_SIZE + RUN_SIZE * number) for number in range(header.runs)]
    for part, layout, place in parts:
        for name in layout.names or ():
            kind, offset = layout.fields[name][:2]
            yield from _with_field(f"{part} {name}", sound, place + offset, kind.itemsize)
    for place in range(start, header.data_start):
        yield from _with_field("table", sound, place, 1, few=True)
    for place in range(header.data_start, len(sound)):
        yield from _with_field("columns and bodies", sound, place, 1, few=True)
    for size in range(0, len(sound), 7):
        yield "cut", bytes(sound[:size])
    yield "longer", bytes(sound) + b"\0"


def _with_field(name: str, sound: memoryview, place: int, size: int, few: bool = False) -> Iterator[tuple[str, bytes]]:
    was = int.from_bytes(sound[place : place + size], "little")
    top = (1 << 8 * size) - 1
    values = (was ^ 1, top) if few else (0, 1, (was + 1) & top, (was - 1) & top, was ^ 1 << (8 * size - 1), top)
    for value in dict.fromkeys(values):
        for fits in (False, True):
            lie = memoryview(bytearray(sound))
            lie[place : place + size] = value.to_bytes(size, "little")
            if fits and parse_header(lie).data_start <= len(lie):
                reseal(lie)
            if lie != sound:
                yield name, bytes(lie)


@pytest.mark.parametrize("runs", RUNS.values(), ids=list(RUNS))
async def test_a_batch_that_lies_in_any_field_is_refused_or_harmless(tmp_path: Path, runs: Contents) -> None:
    """What is refused is told so, by its request; what is taken can be pulled and read, every message of it."""
    async with siege(tmp_path / "data", producer_window=4_096) as s:
        liar = await s.untrusted(hello=True)
        told = list(lies(runs))
        for number, (_, lie) in enumerate(told, 1):
            liar.send(frame(FrameKind.SEND, number, lie))
            if number % 200 == 0 or number == len(told):
                await until(lambda number=number: len(liar.frames()) >= number, "each is answered")
        answers = {answer.request: answer for answer in liar.frames()}
        assert len(answers) == len(told)
        refused = Counter(name for number, (name, _) in enumerate(told, 1) if answers[number].kind == FrameKind.ERROR)
        taken = Counter(name for number, (name, _) in enumerate(told, 1) if answers[number].kind == FrameKind.SENT)
        print(f"refused: {dict(refused)}\ntaken: {dict(taken)}")
        assert {code for _, code, _ in liar.errors()} <= {"bad_batch", "invalid_name", "sequence_forgotten"}
        assert {re.sub(r"run \d+", "run", name) for name in taken} == HARMLESS
        assert refused.keys() | taken.keys() == {name for name, _ in told}
        assert not liar.ended
        places = {
            frames.SENT.unpack_from(answer.payload)[0] for answer in liar.frames() if answer.kind == FrameKind.SENT
        }
        bodies = sorted(sent.body for run in runs for sent in run)
        assert sorted(await bodies_beside_the_regular(s.broker.url)) == sorted(bodies * len(places))


async def bodies_beside_the_regular(url: str) -> list[bytes]:
    """Of all that the broker has now, but for the good client's."""
    async with qmq.connect(url) as client, client.subscribe("", start="first") as consumer:
        await client.send("end", b"")
        bodies = []
        while True:
            for message in await consumer.pull(max_count=1_000, timeout=TIMEOUT_S):
                if message.subject == "end":
                    return bodies
                if message.subject != "regular.one":
                    assert message.created_at <= datetime.max.replace(tzinfo=UTC)
                    assert message.key is None or message.key.startswith("key-")
                    bodies.append(message.body)


#: Fields that say nothing that could be wrong, or that the broker writes itself; and a name may be another name, a lane
#: another lane.
HARMLESS: Final = {
    "header position", "header stored_at_us", "header created_at_us", "header partition", "header store_id",
    "header producer_id", "header producer_sequence", "run first_sequence", "run lane", "table",
}  # fmt: skip
