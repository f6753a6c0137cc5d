"""Answers to clients: encodes the effects of a turn as frames, and writes each connection's frames at once.

The functions return the bytes of one answer; MESSAGES and LOG_BYTES are followed by the buffers of their effect.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgpack
from crc32c import crc32c

from qmq.broker.ports import effects
from qmq.broker.ports.effects import Effect
from qmq.errors import BadBatch, InternalError, InvalidName, InvalidOption, MessageTooLarge, UnknownSubscription
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.messages import encode_messages
from qmq.net.server.admission import ANSWER_S, Admission, Throttle
from qmq.net.server.connection import ClientConnection
from qmq.net.server.login.audit import Audit
from qmq.net.server.options import Answers, internal_error

#: A whole SENT frame of a batch with one run: the most frequent answer.
_SENT_ONE: Final = struct.Struct("<IBBHQQQH6sIQ")
assert _SENT_ONE.size == frames.FRAME_SIZE + frames.SENT.size + 8


#: A plain integer: reading a member of an enum looks it up by name.
_SENT: Final = int(FrameKind.SENT)
_pack_sent: Final = _SENT_ONE.pack


def sent(effect: effects.Sent, store_id: bytes) -> bytes:
    """Encode SENT: the position of a batch, when it was stored, and the first sequence of each run."""
    _, request, position, stored_at_us, partition, firsts = effect
    if isinstance(firsts, int):
        return _SENT_ONE.pack(
            _SENT_ONE.size, _SENT, 0, 0, request, position, stored_at_us, partition, store_id, 1, firsts
        )
    payload = frames.SENT.pack(position, stored_at_us, partition, store_id, len(firsts))
    payload += firsts.astype("<u8", copy=False).tobytes()
    return frames.encode_frame(FrameKind.SENT, request, b"", len(payload)) + payload


def sent_duplicates(effect: effects.SentDuplicates, store_id: bytes) -> bytes:
    """Encode SENT of a batch of which some messages were left out: where the first messages of their texts are stands
    behind the first sequences.
    """
    _, request, position, stored_at_us, partition, firsts, duplicates = effect
    payload = frames.SENT.pack(position, stored_at_us, partition, store_id, len(firsts))
    payload += firsts.astype("<u8", copy=False).tobytes() + duplicates
    return frames.encode_frame(FrameKind.SENT, request, b"", len(payload)) + payload


def messages(effect: effects.PulledMessages, acked: Sequence[int] = ()) -> bytes:
    """Encode the header and head of MESSAGES; the buffers of the effect follow. It also answers the requests in
    *acked*.
    """
    _, request, _, size, _, left_us, ranges, tags = effect
    return encode_messages(request, size, ranges, acked, left_us, tags)


def reported(effect: effects.Reported) -> bytes:
    """Encode REPORTED: the result of the check."""
    return _with_meta(FrameKind.REPORTED, effect.request, {"found": effect.found})


def subscribed(effect: effects.Subscribed) -> bytes:
    """Encode SUBSCRIBED: the subscription number, and the time that it starts at, if it does."""
    fields: dict[str, Any] = {"subscription": effect.subscription}
    if effect.start_us is not None:
        fields["start_us"] = effect.start_us
    if effect.consumer_state is not None:
        fields["consumer_state"] = list(effect.consumer_state)
    if effect.tags:
        fields["tags"] = list(effect.tags)
    if effect.differing:
        fields["differing"] = dict(effect.differing)
    if effect.max_attempts:
        fields["max_attempts"], fields["retry_delays_us"] = effect.max_attempts, list(effect.retry_delays_us)
    return _with_meta(FrameKind.SUBSCRIBED, effect.request, fields)


def unsubscribed(effect: effects.Unsubscribed) -> bytes:
    """Encode UNSUBSCRIBED."""
    return frames.encode_frame(FrameKind.UNSUBSCRIBED, effect.request)


def acked(request: int, refused: int) -> bytes:
    """Encode ACKED: how many acks were refused."""
    return frames.encode_frame(FrameKind.ACKED, request, b"", frames.ACKED.size) + frames.ACKED.pack(refused)


def handed_back(effect: effects.HandedBack) -> bytes:
    """Encode HANDED_BACK: the indexes of the refused ranges."""
    payload = struct.pack(f"<{len(effect.refused)}I", *effect.refused)
    return frames.encode_frame(FrameKind.HANDED_BACK, effect.request, b"", len(payload)) + payload


def handed_over(effect: effects.HandedOver) -> bytes:
    """Encode HANDED_OVER."""
    return frames.encode_frame(FrameKind.HANDED_OVER, effect.request)


def restored(effect: effects.Restored) -> bytes:
    """Encode RESTORED: where the logs end."""
    return _with_meta(FrameKind.RESTORED, effect.request, {"ends": list(effect.ends)})


def heartbeat_seen(effect: effects.HeartbeatSeen) -> bytes:
    """Encode HEARTBEAT_SEEN."""
    return frames.encode_frame(FrameKind.HEARTBEAT_SEEN, effect.request)


def administered(effect: effects.Administered) -> bytes:
    """Encode ADMINISTERED: the fields are payload, since they may exceed the limit of meta."""
    payload: bytes = msgpack.packb(effect.fields)
    return frames.encode_frame(FrameKind.ADMINISTERED, effect.request, b"", len(payload)) + payload


def last_sequence(effect: effects.LastSequenceIs) -> bytes:
    """Encode LAST_SEQUENCE_IS: the number, or None."""
    return _with_meta(FrameKind.LAST_SEQUENCE_IS, effect.request, {"sequence": effect.sequence})


def claimed(effect: effects.Claimed) -> bytes:
    """Encode CLAIMED."""
    return frames.encode_frame(FrameKind.CLAIMED, effect.request)


def subject_list(effect: effects.SubjectList) -> bytes:
    """Encode SUBJECT_LIST: the rows are payload, since they may exceed the limit of meta."""
    payload: bytes = msgpack.packb({"rows": effect.rows, "after": effect.after})
    return frames.encode_frame(FrameKind.SUBJECT_LIST, effect.request, b"", len(payload)) + payload


def segment_list(effect: effects.SegmentList) -> bytes:
    """Encode SEGMENT_LIST: the rows are payload, since they may exceed the limit of meta."""
    payload: bytes = msgpack.packb({"partitions": effect.partitions, "rows": effect.rows, "more": effect.more})
    meta = frames.pack_meta({"crc": crc32c(payload)})
    return frames.encode_frame(FrameKind.SEGMENT_LIST, effect.request, meta, len(payload)) + payload


def batch_list(effect: effects.BatchList) -> bytes:
    """Encode BATCH_LIST: records of the sparse index, and the position to continue from."""
    meta = frames.pack_meta({"crc": crc32c(effect.records), "after": effect.after})
    return frames.encode_frame(FrameKind.BATCH_LIST, effect.request, meta, len(effect.records)) + effect.records


def traced(effect: effects.Traced) -> bytes:
    """Encode TRACED: the message and its groups are payload, since they may exceed the limit of meta."""
    payload: bytes = msgpack.packb({"message": effect.message, "groups": effect.rows, "partial": effect.is_partial})
    meta = frames.pack_meta({"crc": crc32c(payload)})
    return frames.encode_frame(FrameKind.TRACED, effect.request, meta, len(payload)) + payload


def log_bytes(effect: effects.LogBytes) -> bytes:
    """Encode the header of LOG_BYTES; the data of the effect follows."""
    return frames.encode_frame(FrameKind.LOG_BYTES, effect.request, b"", len(effect.data))


def got(effect: effects.GotMessage) -> bytes:
    """Encode the header of GOT; the buffers of the effect follow."""
    return frames.encode_frame(FrameKind.GOT, effect.request, b"", sum(map(len, effect.buffers)))


def found(effect: effects.FoundMessages) -> bytes:
    """Encode the header of FOUND, and where the search goes on; the buffers of the effect follow."""
    numbers = [effect.upto_us, effect.looked, effect.left, effect.unreadable, *(effect.after or ())]
    meta = frames.pack_meta({"numbers": numbers, "crc": frames.pack_numbers(numbers)[1]})
    return frames.encode_frame(FrameKind.FOUND, effect.request, meta, sum(map(len, effect.buffers)))


def _with_meta(kind: FrameKind, request: int, fields: dict[str, Any]) -> bytes:
    return frames.encode_frame(kind, request, frames.pack_meta(fields))


log = logging.getLogger("qmq.server")

#: Errors that a correct client does not cause.
_CLIENT_ERRORS: Final = (BadBatch, InvalidName, InvalidOption, MessageTooLarge, UnknownSubscription)

#: How many acks one MESSAGES answers.
_MOST_JOINED: Final = 64

DiskWork = (
    effects.SyncWanted
    | effects.ReadWanted
    | effects.CheckWanted
    | effects.FetchWanted
    | effects.CheckpointWanted
    | effects.InfoWanted
    | effects.StatsWanted
)


class ReplyWriter:
    """Gathers a turn's answers per connection, and writes them. *work* is called with effects that need the disk."""

    def __init__(
        self, store_id: bytes, admission: Admission, throttle: Throttle, work: Callable[[DiskWork], None]
    ) -> None:
        self._store_id = store_id
        self._admission = admission
        self._throttle = throttle
        #: by number
        self.connections: dict[int, ClientConnection] = {}
        self._answered: list[ClientConnection] = []  # connections with answers in this turn
        self._waited: list[ClientConnection] = []  # those whose answers begin with messages: they are written first
        self._joining: list[ClientConnection] = []  # connections with acks that the next MESSAGES of this turn answers
        self._invalid: dict[ClientConnection, int] = {}  # how many were refused in this turn
        #: How many effects so far changed the state that a checkpoint saves.
        self.changes = 0
        #: Messages that were handed out, again and again counted each time, their bytes, and refused requests by code.
        self.handed_messages = self.handed_bytes = 0
        self.refusals: Counter[str] = Counter()
        self._carry_out: dict[type, Callable[[Any], object]] = {
            effects.Sent: self._sent,
            effects.SentDuplicates: self._sent_duplicates,
            effects.PulledMessages: self._messages,
            effects.Subscribed: self._subscribed,
            effects.Unsubscribed: partial(self._answer, encode=unsubscribed),
            effects.Acked: self._acked,
            effects.HandedBack: self._handed_back,
            effects.HandedOver: self._handed_over,
            effects.Restored: self._restored,
            effects.HeartbeatSeen: partial(self._answer, encode=heartbeat_seen),
            effects.Administered: self._administered,
            effects.LastSequenceIs: partial(self._answer, encode=last_sequence),
            effects.Claimed: partial(self._answer, encode=claimed),
            effects.SubjectList: partial(self._answer, encode=subject_list),
            effects.Refused: self.refused,
            effects.SyncWanted: work,
            effects.ReadWanted: work,
            effects.CheckWanted: work,
            effects.FetchWanted: work,
            effects.CheckpointWanted: work,
            effects.InfoWanted: work,
            effects.StatsWanted: work,
            effects.SegmentList: partial(self._answer, encode=segment_list),
            effects.BatchList: partial(self._answer, encode=batch_list),
            effects.LogBytes: self._log_bytes,
            effects.Traced: partial(self._answer, encode=traced),
            effects.GotMessage: partial(self._found, encode=got),
            effects.FoundMessages: partial(self._found, encode=found),
            effects.Reported: partial(self._answer, encode=reported),
        }

    def carry_out(self, wanted: Sequence[Effect]) -> None:
        """Encode effects as answers, or start the disk work that they ask for."""
        for effect in wanted:
            try:
                self._carry_out[type(effect)](effect)
            except Exception:
                log.exception("could not carry out %s", type(effect).__name__)
                # its request gets an answer all the same: the client would ask again and again
                connection, request = getattr(effect, "connection", 0), getattr(effect, "request", 0)
                if request and not isinstance(effect, effects.Refused):
                    self.refused(effects.Refused(connection, request, internal_error()))

    def answer_at_once(self, connection: ClientConnection, answers: Answers) -> None:
        """Write the answers that the short way gives to the SEND of a connection, which was not counted."""
        sent_, handed, acks = answers
        if acks and (len(acks) > _MOST_JOINED or acks[0].refused or len(handed) > 1):
            self._answer_apart(connection, answers)
            return
        if sent_ is not None:
            self.changes += 1
            _, request, position, stored_at_us, partition, first = sent_
            connection.write_now(
                _pack_sent(
                    _SENT_ONE.size, _SENT, 0, 0, request, position, stored_at_us, partition, self._store_id, 1, first
                )
            )
        acked: Sequence[int] = ()
        if acks:
            acked = (acks[0].request,) if len(acks) == 1 else [ack.request for ack in acks]
        done = 1 + len(acks)
        for number, request, buffers, size, count, left_us, ranges, tags in handed:
            self.changes += done
            self.handed_messages += count
            self.handed_bytes += size
            puller = self.connections.get(number)
            if puller is not None:
                puller.in_flight -= done
                self._admission.requests(-done)
                puller.write_now(b"".join((encode_messages(request, size, ranges, acked, left_us, tags), *buffers)))

    def _answer_apart(self, connection: ClientConnection, answers: Answers) -> None:
        """Write answers that do not go in one frame each, as those of a turn."""
        sent_, handed, acks = answers
        for ack in acks:
            self._acked(ack)
        if sent_ is not None:
            connection.in_flight += 1
            self._admission.requests(1)
            self._sent(sent_)
        for one in handed:  # the buffers of a batch that was just received are used again
            self._messages(one._replace(buffers=[b"".join(one.buffers)]))
        self.write()

    def put(self, connection: ClientConnection, answer: bytes) -> None:
        """Write *answer* at the end of the turn."""
        if not connection.answers:
            self._answered.append(connection)
        connection.answers.append(answer)

    def refused(self, effect: effects.Refused) -> None:
        """Answer a request with an error; if the client is at fault, throttle its connection."""
        self.refusals[effect.error.code] += 1
        if (cause := effect.error.__cause__) is not None and isinstance(effect.error, InternalError):
            log.error("the broker failed to answer a request of connection %d", effect.connection, exc_info=cause)
        connection = self._answer(effect, lambda refused: frames.encode_error(refused.request, refused.error))
        if connection is not None and connection.audits:
            Audit.answered(connection, effect.request, effect.error)
        if connection is not None and isinstance(effect.error, _CLIENT_ERRORS):
            self._invalid[connection] = self._invalid.get(connection, 0) + 1

    def write(self) -> None:
        """Write each connection's answers in one call, and throttle the connections that sent invalid requests."""
        if self._joining:
            self._end_joining()
        answered, self._waited, self._answered = self._waited + self._answered, [], []
        for connection in answered:
            try:
                connection.write()
            except Exception:
                log.exception("could not write to connection %d", connection.number)
                connection.abort()
        if self._invalid:
            for connection, count in self._invalid.items():
                self._throttle.charge(connection.took_s + count * ANSWER_S)
                if not connection.ended:
                    connection.read_little()
                    self._throttle.wait(connection)
            self._invalid.clear()

    # --- one method per kind of effect -------------------------------------------------------------------------------

    def _sent(self, effect: effects.Sent) -> None:
        self.changes += 1
        connection = self.connections.get(effect.connection)
        if connection is not None:
            answer = sent(effect, self._store_id)
            self._count_off(connection)
            self.put(connection, answer)

    def _sent_duplicates(self, effect: effects.SentDuplicates) -> None:
        self.changes += 1
        self._answer(effect, lambda sent_: sent_duplicates(sent_, self._store_id))

    def _messages(self, effect: effects.PulledMessages) -> None:
        if effect.messages:
            self.changes += 1
            self.handed_messages += effect.messages
            self.handed_bytes += effect.size
        connection = self.connections.get(effect.connection)
        if connection is not None:
            acked = connection.acked
            head = messages(effect, acked)
            self._count_off(connection)
            if not connection.answers:
                self._waited.append(connection)
            connection.answers += (head, *effect.buffers)
            if acked:
                connection.acked = []

    def _log_bytes(self, effect: effects.LogBytes) -> None:
        connection = self._answer(effect, log_bytes)
        if connection is not None and len(effect.data):
            connection.answers.append(effect.data)

    def _found(self, effect: effects.GotMessage | effects.FoundMessages, encode: Callable[[Any], bytes]) -> None:
        connection = self._answer(effect, encode)
        if connection is not None:
            connection.answers += effect.buffers

    def _subscribed(self, effect: effects.Subscribed) -> None:
        self.changes += 1
        self._answer(effect, subscribed)

    def _acked(self, effect: effects.Acked) -> None:
        self.changes += 1
        connection = self.connections.get(effect.connection)
        if connection is None:
            return
        if effect.joins and len(connection.acked) < _MOST_JOINED:
            if not connection.acked:
                self._joining.append(connection)
            connection.acked.append(effect.request)
        else:
            self.put(connection, acked(effect.request, effect.refused))
        self._count_off(connection)

    def _end_joining(self) -> None:
        """Answer acks that no messages of this turn have answered."""
        for connection in self._joining:
            for request in connection.acked:
                self.put(connection, acked(request, 0))
            connection.acked = []
        self._joining.clear()

    def _handed_back(self, effect: effects.HandedBack) -> None:
        self.changes += 1
        self._answer(effect, handed_back)

    def _handed_over(self, effect: effects.HandedOver) -> None:
        self.changes += 1
        self._answer(effect, handed_over)

    def _administered(self, effect: effects.Administered) -> None:
        connection = self._answer(effect, administered)
        if connection is not None and connection.audits:
            Audit.answered(connection, effect.request)

    def _restored(self, effect: effects.Restored) -> None:
        self.changes += 1
        self._answer(effect, restored)

    def _answer(self, effect: Any, encode: Callable[[Any], bytes]) -> ClientConnection | None:
        connection = self.connections.get(effect.connection)
        if connection is not None:
            answer = encode(effect)  # before the count, as it may fail
            self._count_off(connection)
            connection.listings.discard(effect.request)
            self.put(connection, answer)
        return connection

    def _count_off(self, connection: ClientConnection) -> None:
        connection.in_flight -= 1
        self._admission.requests(-1)
