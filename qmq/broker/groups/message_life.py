"""The life of a message in a reliable group: its states, the events that change them, and the records that say so.

The broker never reads the table: group_state.py acts by it, and tests and the diagram of the docs are compared with it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, NamedTuple

from qmq.broker.journal.record_types import RecordKind


class MessageState(enum.Enum):
    """The states of one message for one reliable group."""

    STORED = "stored"  # in the message log; the group does not get it, or not any more
    READY = "ready"  # from the group's cursor on: no consumer had it yet
    IN_FLIGHT = "in_flight"
    RETRYING = "retrying"  # in the error log, due now or later
    QUARANTINED_RETRY = "quarantined_retry"  # in the error log, to be handed out alone: it may be deadly
    QUARANTINED_IN_FLIGHT = "quarantined_in_flight"  # its consumer has nothing else in flight
    ACKED = "acked"
    DEAD = "dead"  # a dead letter
    SKIPPED = "skipped"  # the cursor passed it, and no consumer had it
    DROPPED = "dropped"  # a seek ended it
    DELETED = "deleted"  # a dead letter that was deleted


class MessageEvent(enum.Enum):
    """The events that change the state of a message."""

    VISIBLE = "visible"  # it can be pulled (with flush: it is synced), or the group begins to follow its subject
    FILTER = "filter"  # it has none of the group's tags when a pull takes it
    RETENTION = "retention"  # its segment is dropped
    COPY_FAILED = "copy_failed"  # its segment is dropped, and retention could not read it to carry it forward
    SEEK_BACK = "seek_back"  # the cursor is set before it; another life of it, if any, goes on beside this one
    SEEK_PAST = "seek_past"  # the cursor is set behind it
    SEEK = "seek"  # the cursor is set anywhere: nothing stays in flight
    CLEAR_RETRIES = "clear_retries"  # a seek that also ends retries
    PULL = "pull"
    ACK = "ack"
    NACK = "nack"  # by the consumer, or by the broker at the ack deadline
    LAST_NACK = "last_nack"  # of attempt max_attempts
    RELEASE = "release"
    EARLIER_BACK = "earlier_back"  # an earlier message of its slot of order keys was nacked or released
    REJECT = "reject"  # by the consumer; by the broker: it is unreadable, or of a subject no longer followed
    EXPIRE = "expire"  # its time to live is over when a pull takes it, so the broker rejects it
    LEAVE = "leave"  # its consumer leaves
    SESSION_EXPIRY = "session_expiry"  # its consumer is silent, or is taken over again without progress
    LAST_SESSION_EXPIRY = "last_session_expiry"  # number max_session_expiries of a message that was in flight alone
    REDRIVE = "redrive"
    DELETE = "delete"
    HANDOVER = "handover"  # a consumer of another broker nacked it there
    LAST_HANDOVER = "last_handover"  # the same, with a reject or after the last attempt
    RESTORE = "restore"  # a restore to this group alone brings it back from an archive
    RESEND = "resend"  # somebody has the broker hand it out again


class Transition(NamedTuple):
    """The state that follows, and the kinds of records that say so: one of them is written; none where empty."""

    state: MessageState
    records: tuple[RecordKind, ...] = ()


def _message_life() -> Iterator[tuple[MessageState, MessageEvent, Transition]]:
    state, event, kind = MessageState, MessageEvent, RecordKind
    yield state.STORED, event.VISIBLE, Transition(state.READY)
    yield state.STORED, event.SEEK_BACK, Transition(state.READY, (kind.SEEK,))
    yield state.STORED, event.HANDOVER, Transition(state.RETRYING, (kind.OVER,))
    yield state.STORED, event.LAST_HANDOVER, Transition(state.DEAD, (kind.OVER,))
    yield state.STORED, event.RESTORE, Transition(state.RETRYING, (kind.RESTORED,))
    yield state.READY, event.PULL, Transition(state.IN_FLIGHT, (kind.PULL, kind.PASSED))
    yield state.READY, event.FILTER, Transition(state.SKIPPED, (kind.PASSED,))
    yield state.READY, event.RETENTION, Transition(state.SKIPPED, (kind.MOVED,))
    yield state.READY, event.SEEK_PAST, Transition(state.SKIPPED, (kind.SEEK,))
    yield state.RETRYING, event.PULL, Transition(state.IN_FLIGHT, (kind.AGAIN,))
    yield state.QUARANTINED_RETRY, event.PULL, Transition(state.QUARANTINED_IN_FLIGHT, (kind.AGAIN,))
    leave, expiry = (kind.LEAVE, kind.PART), (kind.LEAVE, kind.PART, kind.JOIN)  # PART: in several turns
    for in_flight, retry in (
        (state.IN_FLIGHT, state.RETRYING),
        (state.QUARANTINED_IN_FLIGHT, state.QUARANTINED_RETRY),
    ):
        yield in_flight, event.ACK, Transition(state.ACKED, (kind.ACK,))
        yield in_flight, event.NACK, Transition(state.RETRYING, (kind.BACK,))
        yield in_flight, event.LAST_NACK, Transition(state.DEAD, (kind.BACK,))
        yield in_flight, event.RELEASE, Transition(retry, (kind.BACK,))
        yield in_flight, event.EARLIER_BACK, Transition(retry, (kind.BACK,))
        yield in_flight, event.REJECT, Transition(state.DEAD, (kind.BACK,))
        yield in_flight, event.EXPIRE, Transition(state.DEAD, (kind.BACK,))
        yield in_flight, event.FILTER, Transition(state.SKIPPED, (kind.BACK,))
        yield in_flight, event.LEAVE, Transition(retry, leave)
        yield in_flight, event.SESSION_EXPIRY, Transition(state.QUARANTINED_RETRY, expiry)
        yield in_flight, event.LAST_SESSION_EXPIRY, Transition(state.DEAD, expiry)
        yield in_flight, event.SEEK, Transition(state.DROPPED, (kind.SEEK,))
        yield retry, event.CLEAR_RETRIES, Transition(state.DROPPED, (kind.SEEK,))
        yield retry, event.COPY_FAILED, Transition(state.DEAD, (kind.FORWARD,))
    for settled in (state.STORED, state.ACKED, state.SKIPPED, state.DROPPED, state.DELETED, state.DEAD):
        yield settled, event.RESEND, Transition(state.RETRYING, (kind.RESENT,))
    yield state.DEAD, event.REDRIVE, Transition(state.RETRYING, (kind.REDRIVE,))
    yield state.DEAD, event.DELETE, Transition(state.DELETED, (kind.FORGET,))


#: The life of a message: state x event -> next state and record of the pull log. No other transition exists.
MESSAGE_LIFE: Final = {(state, event): transition for state, event, transition in _message_life()}
