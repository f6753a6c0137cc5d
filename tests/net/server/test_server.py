"""Turns, answers, limits, failures of the broker, and the end of a server."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from qmq.broker.ports import commands, effects
from qmq.errors import StorageFull
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.server.admission import REQUEST_BYTES
from qmq.net.server.server import MAX_LISTINGS, MAX_REQUESTS
from tests.net.frames import RawClient, batch, frame, on_uvloop, pull, sent_fields
from tests.net.server.rules import OPTIONS, STORE, serving

LIST = frame(FrameKind.SUBJECTS, 6, meta={"prefix": "a."})


@on_uvloop
async def test_a_welcome_has_the_limits_of_the_broker() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address, hello=False)
        client.send(frame(FrameKind.HELLO, 3, meta={"protocol": 1, "client": "test 1"}))
        welcome = await client.read()
        assert (welcome.kind, welcome.request) == (FrameKind.WELCOME, 3)
        assert frames.unpack_meta(welcome.meta) == {
            "protocol": 1,
            "store_id": STORE,
            "version": "1.2.3",
            "max_frame_bytes": OPTIONS.max_frame_bytes,
            "max_batch_bytes": OPTIONS.max_batch_bytes,
            "max_message_bytes": OPTIONS.max_message_bytes,
            "producer_window": 64,
            "producer_ttl_ms": 3_600_000,
            "unique_for_ms": 3_600_000,
            "max_pull_count": 1_000,
            "max_pull_bytes": 1 << 20,
            "session_timeout_ms": 30_000,
        }
        await client.close()


ANSWERS: list[tuple[bytes, Any, int]] = [
    (
        pull(6, 1),
        lambda c: effects.PulledMessages(c.connection, c.request, [b"ab", memoryview(b"c")], 3, 1),
        FrameKind.MESSAGES,
    ),
    (
        frame(FrameKind.UNSUBSCRIBE, 6, bytes(4)),
        lambda c: effects.Unsubscribed(c.connection, c.request),
        FrameKind.UNSUBSCRIBED,
    ),
    (
        frame(FrameKind.SUBSCRIBE, 6, meta={"group": "g", "prefixes": ["a."], "consumer": "c"}),
        lambda c: effects.Subscribed(c.connection, c.request, 4),
        FrameKind.SUBSCRIBED,
    ),
    (
        frame(FrameKind.LAST_SEQUENCE, 6, bytes(16)),
        lambda c: effects.LastSequenceIs(c.connection, c.request, 5),
        FrameKind.LAST_SEQUENCE_IS,
    ),
    (frame(FrameKind.CLAIM, 6, bytes(32)), lambda c: effects.Claimed(c.connection, c.request), FrameKind.CLAIMED),
    (
        frame(FrameKind.REPORT, 6, frames.REPORT.pack(1, 2, 3, 4)),
        lambda c: effects.Reported(c.connection, c.request, "bad"),
        FrameKind.REPORTED,
    ),
    (
        LIST,
        lambda c: effects.SubjectList(c.connection, c.request, [("a.b", 0, 1, 1, 0, 0, 0, 0)], None),
        FrameKind.SUBJECT_LIST,
    ),
    (LIST, lambda c: effects.Refused(c.connection, c.request, StorageFull("no room")), FrameKind.ERROR),
]


@pytest.mark.parametrize(("request_", "answer", "kind"), ANSWERS, ids=[FrameKind(kind).name for _, _, kind in ANSWERS])
@on_uvloop
async def test_each_request_gets_its_answer(request_: bytes, answer: Any, kind: int) -> None:
    async with serving(max_buffered_bytes=400 * REQUEST_BYTES) as s:
        s.rules.answer = lambda command: None if isinstance(command, commands.Disconnected) else answer(command)
        client = await RawClient.connect(s.address)
        for _ in range(MAX_REQUESTS // 100):  # more than the limit, if answered requests still counted
            client.send(request_ * 200)
            for _ in range(200):
                got = await client.read()
                assert (got.kind, got.request) == (kind, 6)
        await client.close()


@on_uvloop
async def test_batches_that_arrive_together_are_one_turn_and_answered_in_order() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        client.send(
            *(frame(FrameKind.SEND, number, batch(b"x"), flags=frames.FLUSH * (number % 2)) for number in range(1, 101))
        )
        answers = [sent_fields(await client.read())[0] for _ in range(100)]
        assert answers == list(range(1, 101))
        assert sum(s.rules.turns) == 100
        assert len(s.rules.turns) <= 3
        assert [command.flush for command in s.rules.of(commands.Send)] == [number % 2 == 1 for number in range(1, 101)]
        await client.close()


@on_uvloop
async def test_more_than_the_buffer_holds_is_received_in_several_turns() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        payloads = [batch(bytes([number]) * 300_000) for number in range(60)]
        for number, payload in enumerate(payloads):
            client.send(frame(FrameKind.SEND, number + 1, payload))
        for number in range(60):
            assert (await client.read()).request == number + 1
        assert s.rules.batches == payloads
        await client.close()


@on_uvloop
async def test_a_batch_of_several_runs_gets_the_sequences_of_all() -> None:
    async with serving() as s:
        s.rules.answer = lambda command: (
            effects.Sent(command.connection, 99, 1, 2, 0, np.array([4, 5], np.uint64))
            if isinstance(command, commands.Send)
            else None
        )
        client = await RawClient.connect(s.address)
        client.send(frame(FrameKind.SEND, 1, batch(b"x")))
        assert sent_fields(await client.read())[4] == (4, 5)
        await client.close()


# --- limits ----------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_requests_without_an_answer_are_bounded() -> None:
    async with serving() as s:
        client, other = await RawClient.connect(s.address), await RawClient.connect(s.address)
        most = MAX_REQUESTS + OPTIONS.max_waiting_pulls
        client.send(*(pull(number, 1) for number in range(1, most + 1)))
        other.send(frame(FrameKind.SEND, 5, batch(b"x")))
        assert (await other.read()).request == 5
        client.send(frame(FrameKind.WITHDRAW, 1, frames.WITHDRAW.pack(1)))  # has no answer, so it does not count
        client.send(pull(most + 1, 1))
        assert await client.error() == (0, "overloaded")
        assert await client.ended()
        assert len(s.rules.of(commands.Pull)) <= most
        await client.close()
        await other.close()


@on_uvloop
async def test_lists_of_subjects_under_way_are_bounded() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        client.send(*(frame(FrameKind.SUBJECTS, number) for number in range(1, MAX_LISTINGS + 2)))
        assert await client.error() == (0, "overloaded")
        assert len(s.rules.of(commands.ListSubjects)) == MAX_LISTINGS
        await client.close()


@on_uvloop
async def test_while_sends_wait_only_senders_are_not_read() -> None:
    async with serving() as s:
        s.rules.answer = lambda command: (
            effects.PulledMessages(command.connection, command.request, [], 0, 0)
            if isinstance(command, commands.Pull)
            else None
        )
        sender, fresh, reader = [await RawClient.connect(s.address) for _ in range(3)]
        sender.send(frame(FrameKind.SEND, 1, batch(b"1")))
        await sender.read()
        s.server.hold_sends(True)
        sender.send(frame(FrameKind.SEND, 2, batch(b"2")))
        fresh.send(frame(FrameKind.SEND, 1, batch(b"3")))  # not known as a sender: its first batch passes
        assert (await fresh.read()).request == 1
        fresh.send(frame(FrameKind.SEND, 2, batch(b"4")))
        for request in range(1, 20):
            reader.send(pull(request, 1))
            assert (await reader.read()).kind == FrameKind.MESSAGES
        assert s.rules.batches == [batch(b"1"), batch(b"3")]
        s.server.hold_sends(False)
        assert (await sender.read()).request == 2
        assert (await fresh.read()).request == 2
        for client in (sender, fresh, reader):
            await client.close()


# --- failures of the broker ------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_refusal_answers_the_request_and_the_connection_lives() -> None:
    async with serving() as s:

        def refuse(command: commands.Command) -> None:
            if isinstance(command, commands.Pull):
                raise StorageFull("no room")

        s.rules.answer = refuse
        client = await RawClient.connect(s.address)
        client.send(pull(4, 1), frame(FrameKind.SEND, 5, batch(b"x")))
        assert await client.error() == (4, "storage_full")
        assert (await client.read()).request == 5
        await client.close()


@on_uvloop
async def test_a_request_of_a_bad_value_is_refused_and_the_connection_lives() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        for _ in range(5):
            client.send(frame(FrameKind.SUBSCRIBE, 4, meta={"prefixes": ["a."], "start": "now"}) * 200)
            for _ in range(200):
                assert await client.error() == (4, "invalid_option")
        client.send(frame(FrameKind.SEND, 5, batch(b"x")))
        assert (await client.read()).request == 5
        assert not s.rules.of(commands.Subscribe)
        await client.close()


@on_uvloop
async def test_an_unexpected_failure_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s:

        def fail(command: commands.Command) -> None:
            if isinstance(command, commands.Pull):
                raise ZeroDivisionError("a bug")

        s.rules.answer = fail
        client, other = await RawClient.connect(s.address), await RawClient.connect(s.address)
        client.send(pull(4, 1))
        assert await client.error() == (4, "internal_error")
        assert await client.error() == (0, "internal_error")
        assert await client.ended()
        assert "ZeroDivisionError: a bug" in caplog.text
        other.send(frame(FrameKind.SEND, 5, batch(b"x")))
        assert (await other.read()).request == 5
        await client.close()
        await other.close()


@on_uvloop
async def test_a_request_whose_answer_cannot_be_made_gets_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s, asyncio.timeout(30):
        client = await RawClient.connect(s.address)
        for number, wrong in enumerate(
            (
                lambda asked: effects.PulledMessages(asked.connection, asked.request, [], 1 << 70, 0),
                lambda asked: effects.Administered(asked.connection, asked.request, {"a": object()}),
                lambda asked: effects.Acked(asked.connection, asked.request, -1),
                lambda asked: effects.Sent(asked.connection, asked.request, -1, 1, 0, 0),
            )
        ):
            s.rules.answer = wrong
            client.send(pull(4 + number, 1))
            assert await client.error() == (4 + number, "internal_error")
        assert caplog.text.count("could not carry out") == 4
        s.rules.answer = lambda command: None
        (connection,) = s.server._connections.values()
        assert connection.in_flight == 0
        client.send(frame(FrameKind.SEND, 9, batch(b"x")))
        assert (await client.read()).request == 9
        await client.close()


@on_uvloop
async def test_a_turn_that_fails_ends_the_connections_that_sent_its_batches(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s:
        sender, other = await RawClient.connect(s.address), await RawClient.connect(s.address)

        def fail() -> None:
            s.rules.on_turn = lambda: None
            s.rules.effects.clear()
            raise ZeroDivisionError("a bug")

        s.rules.on_turn = fail
        sender.send(frame(FrameKind.SEND, 1, batch(b"x")))
        assert await sender.error() == (0, "internal_error")
        assert await sender.ended()
        other.send(frame(FrameKind.SEND, 5, batch(b"x")))
        assert (await other.read()).request == 5
        assert "the broker failed in a turn" in caplog.text
        await sender.close()
        await other.close()


@on_uvloop
async def test_nothing_is_logged_per_message(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        client.send(frame(FrameKind.SEND, 1, batch(b"x")))
        await client.read()
        caplog.clear()
        client.send(*(frame(FrameKind.SEND, number, batch(b"x")) for number in range(2, 50)))
        for _ in range(48):
            await client.read()
        assert caplog.records == []
        await client.close()
        await asyncio.sleep(0)
        assert all(record.levelno <= logging.DEBUG for record in caplog.records)


# --- time and syncs --------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_turn_comes_when_the_rules_asked_for_it() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        deadlines = [time.monotonic_ns() // 1_000 + 3_000]
        answered = asyncio.Event()

        def on_turn() -> None:
            if deadlines and time.monotonic_ns() // 1_000 >= deadlines[0]:
                s.rules.effects.append(effects.PulledMessages(1, 7, [], 0, 0))
                answered.set()

        s.rules.on_turn = on_turn
        s.rules.deadline_us = deadlines[0]
        client.send(pull(7, 1, timeout_ms=3))
        assert (await client.read()).request == 7
        assert answered.is_set()
        assert time.monotonic_ns() // 1_000 >= deadlines[0]
        deadlines.clear()
        await client.close()


@on_uvloop
async def test_turns_of_others_make_no_more_turns_of_a_loop_pass_while_work_is_left() -> None:
    async with serving() as s:
        turns = list[int]()
        s.rules.on_turn = lambda: turns.append(len(turns))
        s.rules.tick = lambda now: now.monotonic_us  # type: ignore[method-assign]  # there is always more to do
        for _ in range(10):
            s.server.turn()  # as at the end of a sync
            await asyncio.sleep(0)
        turns.clear()
        for _ in range(10):
            await asyncio.sleep(0)
        assert 9 <= len(turns) <= 11
        s.rules.tick = lambda now: None  # type: ignore[method-assign]


@on_uvloop
async def test_timers_are_checked_after_the_answers_and_not_in_every_turn() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        ticks: list[int] = []
        s.rules.tick = lambda now: ticks.append(now.monotonic_us)  # type: ignore[method-assign,func-returns-value]
        for number in range(1, 201):
            client.send(frame(FrameKind.SEND, number, batch(b"x")))
            await client.read()
        assert len(s.rules.turns) == 200
        assert all(later - earlier >= 5_000 for earlier, later in pairwise(ticks))
        ticked = asyncio.Event()
        s.rules.tick = lambda now: ticked.set()  # type: ignore[method-assign,func-returns-value]
        s.server.turn()
        async with asyncio.timeout(60):  # deferred requests follow without further input
            await ticked.wait()
        await client.close()


@on_uvloop
async def test_an_earlier_deadline_wins_over_a_timer_that_runs() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        s.rules.deadline_us = time.monotonic_ns() // 1_000 + 3_600_000_000
        client.send(frame(FrameKind.SEND, 1, batch(b"x")))
        await client.read()
        turned = asyncio.Event()
        s.rules.deadline_us = time.monotonic_ns() // 1_000 + 2_000
        s.server.turn()
        s.rules.on_turn = turned.set
        async with asyncio.timeout(60):
            await turned.wait()
        await client.close()


@on_uvloop
async def test_a_broker_that_is_not_finished_gets_another_turn_at_once() -> None:
    async with serving() as s:
        s.rules.deadline_us = time.monotonic_ns() // 1_000
        turned = asyncio.Event()
        s.rules.tick = lambda now: now.monotonic_us  # type: ignore[method-assign]
        s.server.turn()
        s.rules.on_turn = turned.set
        async with asyncio.timeout(60):
            await turned.wait()
        s.rules.tick = lambda now: None  # type: ignore[method-assign]


@on_uvloop
async def test_syncs_go_out_and_come_back() -> None:
    async with serving() as s:
        wanted = effects.SyncWanted(0, 4_096)
        s.rules.effects.append(wanted)
        s.server.turn()
        assert s.synced == [wanted]
        s.rules.answer = lambda command: effects.SyncWanted(0, 8_192) if isinstance(command, commands.Synced) else None
        begun: list[int] = []
        s.rules.on_turn = lambda: begun.append(len(s.synced))
        s.server.submit(commands.Synced(0, 4_096))
        assert s.synced == [wanted, effects.SyncWanted(0, 8_192)]
        assert begun == [2], "the next one has begun before the turn"


@on_uvloop
async def test_answers_for_connections_that_are_gone_are_dropped() -> None:
    async with serving() as s:
        s.rules.effects += [
            effects.Sent(77, 1, 1, 1, 0, 0),
            effects.PulledMessages(77, 1, [b"x"], 1, 1),
            effects.Subscribed(77, 1, 1),
            effects.Refused(77, 1, StorageFull("no room")),
        ]
        before = s.server.changes
        s.server.turn()
        assert s.rules.effects == []
        assert s.server.changes == before + 3  # they happened all the same


# --- the end ---------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_stop_sends_an_error_and_closes() -> None:
    async with serving() as s:
        client, idle = await RawClient.connect(s.address), await RawClient.connect(s.address)
        client.send(frame(FrameKind.SEND, 1, batch(b"x")))
        await client.read()
        s.server.stop_reading()
        client.send(frame(FrameKind.SEND, 2, batch(b"late")))
        closing = asyncio.create_task(s.server.close(5))
        for peer in (client, idle):
            assert await peer.error() == (0, "broker_stopping")
            assert await peer.ended()
            await peer.close()
        await closing
        assert s.rules.batches == [batch(b"x")]
        with pytest.raises(OSError):  # noqa: PT011  # refused or reset, as the system likes
            await RawClient.connect(s.address)


@on_uvloop
async def test_a_stop_does_not_wait_for_clients_that_do_not_close() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        client.writer.transport.pause_reading()
        s.server.stop_reading()
        async with asyncio.timeout(60):
            await s.server.close(0.02)
        await client.close()
