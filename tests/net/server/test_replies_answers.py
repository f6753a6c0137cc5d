"""Effects are encoded as the frames of docs/PROTOCOL.md."""

from __future__ import annotations

import msgpack
import numpy as np
from crc32c import crc32c

from qmq.broker.ports import effects
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind, split_frames, unpack_meta
from qmq.net.protocol.messages import decode_head
from qmq.net.protocol.selection import Boundary
from qmq.net.server import replies
from tests.net.frames import sent_fields

STORE = b"store!"


def only_frame(answer: bytes) -> Frame:
    (frame,) = split_frames(memoryview(answer), 1 << 20)
    assert frames.FRAME_SIZE + len(frame.meta) + len(frame.payload) == len(answer)
    return frame


def test_sent_of_one_run_and_of_several_have_one_layout() -> None:
    one = only_frame(replies.sent(effects.Sent(1, 9, 4_096, 77, 2, 11), STORE))
    assert (one.request, sent_fields(one)) == (9, (4_096, 77, 2, STORE, (11,)))
    firsts = np.array([5, 2**63, 7], np.uint64)
    many = only_frame(replies.sent(effects.Sent(1, 9, 4_096, 77, 2, firsts), STORE))
    assert (many.request, sent_fields(many)) == (9, (4_096, 77, 2, STORE, (5, 2**63, 7)))
    same = only_frame(replies.sent(effects.Sent(1, 9, 4_096, 77, 2, firsts[:1]), STORE))
    assert sent_fields(same)[4] == (5,)


def test_messages_counts_the_buffers_that_follow() -> None:
    buffers = [b"abc", memoryview(b"defg")]
    head = replies.messages(effects.PulledMessages(1, 9, buffers, 7, 2))
    frame = only_frame(head + b"".join(buffers))
    assert (frame.kind, frame.request, bytes(frame.payload)) == (FrameKind.MESSAGES, 9, b"abcdefg")
    assert only_frame(replies.messages(effects.PulledMessages(1, 9, [], 0, 0))).payload == b""
    assert decode_head(only_frame(replies.messages(effects.PulledMessages(1, 9, [], 0, 0, 77))).meta).left_us == 77


def test_answers_with_fields() -> None:
    subscribed = only_frame(replies.subscribed(effects.Subscribed(1, 9, 4)))
    assert (subscribed.kind, unpack_meta(subscribed.meta)) == (FrameKind.SUBSCRIBED, {"subscription": 4})
    alone = only_frame(replies.subscribed(effects.Subscribed(1, 9, 4, 77)))
    assert unpack_meta(alone.meta) == {"subscription": 4, "start_us": 77}
    unsubscribed = only_frame(replies.unsubscribed(effects.Unsubscribed(1, 9)))
    assert (unsubscribed.kind, unsubscribed.request, unpack_meta(unsubscribed.meta)) == (FrameKind.UNSUBSCRIBED, 9, {})
    for sequence in (None, 0, 2**64 - 1):
        last = only_frame(replies.last_sequence(effects.LastSequenceIs(1, 9, sequence)))
        assert (last.kind, unpack_meta(last.meta)) == (FrameKind.LAST_SEQUENCE_IS, {"sequence": sequence})


def test_found_messages_follow_their_header() -> None:
    buffers = [b"abc", memoryview(b"defg")]
    one = only_frame(replies.got(effects.GotMessage(1, 9, buffers)) + b"".join(buffers))
    assert (one.kind, one.request, one.meta, bytes(one.payload)) == (FrameKind.GOT, 9, b"", b"abcdefg")
    for after in (None, Boundary(5, 6)):
        found = effects.FoundMessages(1, 9, buffers, after, 4, 3, 2, 1)
        some = only_frame(replies.found(found) + b"".join(buffers))
        assert (some.kind, some.request, bytes(some.payload)) == (FrameKind.FOUND, 9, b"abcdefg")
        numbers = [4, 3, 2, 1, *(after or ())]
        assert unpack_meta(some.meta) == {"numbers": numbers, "crc": frames.pack_numbers(numbers)[1]}


def test_a_list_of_subjects_may_be_larger_than_meta() -> None:
    rows = [("s" * 190 + str(number), number, 2**60, 5, 0, 0, 0, 0) for number in range(1_000)]
    frame = only_frame(replies.subject_list(effects.SubjectList(1, 9, rows, 1_000)))
    assert frame.kind == FrameKind.SUBJECT_LIST
    assert len(frame.payload) > frames.MAX_META_BYTES
    assert msgpack.unpackb(frame.payload) == {"rows": [list(row) for row in rows], "after": 1_000}


def test_answers_about_the_log() -> None:
    rows = [(64, 4_096, True), (4_096, 5_000, False)]
    segments = only_frame(replies.segment_list(effects.SegmentList(1, 9, 2, rows, False)))
    assert (segments.kind, segments.request) == (FrameKind.SEGMENT_LIST, 9)
    assert unpack_meta(segments.meta) == {"crc": crc32c(segments.payload)}
    listed = msgpack.unpackb(segments.payload)
    assert listed == {"partitions": 2, "rows": [list(row) for row in rows], "more": False}
    batches = only_frame(replies.batch_list(effects.BatchList(1, 9, b"0123456789abcdef", 77)))
    assert (batches.kind, bytes(batches.payload)) == (FrameKind.BATCH_LIST, b"0123456789abcdef")
    assert unpack_meta(batches.meta) == {"crc": crc32c(b"0123456789abcdef"), "after": 77}
    data = only_frame(replies.log_bytes(effects.LogBytes(1, 9, b"raw")) + b"raw")
    assert (data.kind, data.meta, bytes(data.payload)) == (FrameKind.LOG_BYTES, b"", b"raw")
