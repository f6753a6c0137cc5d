"""The errors of QMQ. A message says what happened, to what, and what to do; ``retryable``: whether a retry can help.

An error that a broker answers with has a ``code``: a stable word on the wire, listed in docs/PROTOCOL.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from datetime import timedelta


class QmqError(Exception):
    """The base class of all errors of QMQ."""

    retryable: bool = False
    code: ClassVar[str] = "error"


# --- arguments -------------------------------------------------------------------------------------------------------


class UsageError(QmqError, ValueError):
    """The program calls the client in a way that can never work: the call must be changed, not repeated."""

    code = "usage_error"


class InvalidName(UsageError):
    """A name of a subject, prefix, group, consumer or producer is not allowed."""

    code = "invalid_name"


class InvalidOption(UsageError):
    """An option, setting or argument has a value that is not allowed."""

    code = "invalid_option"


class MissingExtra(UsageError):
    """The packages of an extra of QMQ are not installed; the message says which ones, and how to install them."""

    code = "missing_extra"


class MessageTooLarge(QmqError, ValueError):
    """A message, its header or its batch is larger than the broker allows."""

    code = "message_too_large"


class BadBatch(QmqError):
    """The sizes, indexes, checksums or table of a batch contradict each other."""

    code = "bad_batch"


# --- the wire --------------------------------------------------------------------------------------------------------


class ProtocolError(QmqError):
    """The other side sent something that the protocol forbids; the connection is closed."""

    code = "protocol_error"


class UnsupportedVersion(ProtocolError):
    """The other side speaks a version of the protocol that this side does not know."""

    code = "unsupported_version"


class ConnectionLost(QmqError):
    """The connection to the broker ended, or could not be made."""

    retryable = True
    code = "connection_lost"


class TlsFailed(QmqError):
    """No connection by TLS can be made: one side does not trust the other's certificate, or does not speak TLS."""

    code = "tls_failed"


class BrokerStopping(QmqError):
    """The broker is shutting down. Another broker may answer, or this one after its restart."""

    retryable = True
    code = "broker_stopping"


class Overloaded(QmqError):
    """A limit of the broker is reached: connections, waiting pulls, or bytes in flight."""

    retryable = True
    code = "overloaded"


class InternalError(QmqError):
    """The broker has a bug; its log has the details."""

    code = "internal_error"


class RemoteError(QmqError):
    """The broker answered with an error whose code this client does not know."""

    code = "remote_error"

    def __init__(self, message: str, retryable: bool = False) -> None:
        super().__init__(message, retryable)
        self.retryable = retryable

    def __str__(self) -> str:
        return str(self.args[0])


class Unauthorized(QmqError):
    """The broker does not let this client in: it has no token, or one that is wrong, expired or revoked."""

    code = "unauthorized"


class Forbidden(QmqError):
    """The token lacks the right to do this; the message says which right."""

    code = "forbidden"


# --- sending ---------------------------------------------------------------------------------------------------------


class SendFailed(QmqError):
    """Messages were not stored, or may not be. ``failures`` has a SendFailure for each."""

    code = "send_failed"

    def __init__(self, message: str, failures: list[SendFailure] | None = None) -> None:
        super().__init__(message)
        self.failures: list[SendFailure] = failures if failures is not None else []


class SendUnknown(SendFailed):
    """The messages may be stored or not: the answers were lost, and the time for retries is over."""

    code = "send_unknown"


class SendFailure:
    """One message that was not stored, or may not be. ``ticket`` is its ticket, or its index in ``send_many``."""

    __slots__ = ("error", "key", "outcome", "subject", "ticket")

    def __init__(self, ticket: int, subject: str, key: str | None, error: QmqError, outcome: str) -> None:
        self.ticket = ticket
        self.subject = subject
        self.key = key
        self.error = error
        #: "refused" (the message is not stored) or "unknown"
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"SendFailure({self.ticket}, {self.subject!r}, {self.key!r}, {self.error!r}, {self.outcome!r})"


class QueueFull(QmqError):
    """``send_nowait`` has queued ``max_queued_bytes``; call ``drain()`` before the next one."""

    retryable = True
    code = "queue_full"


class SequenceForgotten(QmqError):
    """The producer sequence of a batch is so old that the broker no longer knows whether it has stored the batch."""

    code = "sequence_forgotten"


class TooManyProducers(QmqError):
    """The broker remembers ``max_producers`` producers already, and all of them are connected."""

    retryable = True
    code = "too_many_producers"


class ProducerInUse(QmqError):
    """Another connected client sends under the same ``producer`` name."""

    code = "producer_in_use"


class TooManySubjects(QmqError):
    """The broker has ``max_subjects`` subjects with messages already, or a token has its share of them."""

    code = "too_many_subjects"


class TooManyGroups(QmqError):
    """The broker has ``max_groups`` groups already."""

    code = "too_many_groups"


# --- consuming -------------------------------------------------------------------------------------------------------


class TooManyConsumers(QmqError):
    """A client has ``max_consumers_per_connection`` consumers already, or a group the most that it may have."""

    code = "too_many_consumers"


class GroupMismatch(QmqError):
    """The group exists with another mode, or with other settings than ``on_difference="raise"`` allows."""

    code = "group_mismatch"


class UnknownGroup(QmqError):
    """The group does not exist, or was deleted."""

    code = "unknown_group"


class BrokersMissed(QmqError):
    """A call for all brokers did not reach all of them; repeat it to complete it."""

    retryable = True
    code = "brokers_missed"


class Retry(QmqError):
    """Raise it in a handler to get the message again after *after*, a duration (None: after the group's delay).

        raise qmq.Retry("the shop is closed", after="10m")
        raise qmq.Retry("the order is not paid yet", after="10m", counts=False)

    With *counts* False it was no attempt: ``max_attempts`` stays as far away as before.
    """

    code = "retry"

    def __init__(self, reason: str = "", *, after: float | timedelta | str | None = None, counts: bool = True) -> None:
        super().__init__(reason)
        self.after = after
        self.counts = counts


class Fenced(QmqError):
    """This consumer no longer has the messages: they may have been handed to other consumers."""

    code = "fenced"


class UnknownMessage(QmqError):
    """No broker that answered has the message: it was never stored there, or is not kept any more."""

    code = "unknown_message"


class UnknownSubscription(QmqError):
    """A request names a subscription that its connection does not have."""

    code = "unknown_subscription"


# --- databases -------------------------------------------------------------------------------------------------------


class DatabaseFailed(QmqError):
    """A database lacks the tables of QMQ, has those of another version, cannot be reached, or refuses a statement."""

    code = "database_failed"


class RowRejected(QmqError):
    """A row of a database can be no message: its subject is no name, or it is too large."""

    code = "row_rejected"


class QueryFailed(QmqError):
    """A query of `qmq sql` could not be carried out."""

    code = "query_failed"


# --- the files -------------------------------------------------------------------------------------------------------


class StorageError(QmqError):
    """The files of a data directory are not as they must be."""

    code = "storage_error"


class DirectoryInUse(StorageError):
    """Another process uses the data directory."""

    code = "directory_in_use"


class ForeignFile(StorageError):
    """A file in a data directory is of another store, of a newer format version, or not of QMQ."""

    code = "foreign_file"


class BadBytes(StorageError):
    """Bytes on disk are not those that were written."""

    code = "bad_bytes"


class StorageFull(StorageError):
    """The disk or a quota is full. Nothing was stored; sends succeed again when there is free space."""

    retryable = True
    code = "storage_full"


class StorageFailed(StorageError):
    """The operating system refused to read or write a file."""

    retryable = True
    code = "storage_failed"


class SyncFailed(StorageError):
    """An fsync failed. The broker acknowledges nothing more from that log until it is restarted."""

    code = "sync_failed"
