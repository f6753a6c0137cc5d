"""The error tree. Every error says what happened, to what, and what to do; ``retryable`` says whether it can pass.

Errors that a broker answers with carry a ``code``: a stable word that stands in docs/PROTOCOL.md and on the wire.
"""

from __future__ import annotations

from typing import ClassVar


class QmqError(Exception):
    """The root of all errors of QMQ."""

    retryable: bool = False
    code: ClassVar[str] = "error"


# --- what a caller handed over ---------------------------------------------------------------------------------------


class InvalidName(QmqError, ValueError):
    """A subject, prefix, group, consumer or producer name that QMQ does not accept."""

    code = "invalid_name"


class InvalidOption(QmqError, ValueError):
    """An option, setting or argument outside what is allowed."""

    code = "invalid_option"


class MessageTooLarge(QmqError, ValueError):
    """A message, its header or its batch is over a limit of the broker."""

    code = "message_too_large"


class BadBatch(QmqError):
    """The bytes of a batch contradict themselves: sizes, indexes, checksums, table."""

    code = "bad_batch"


# --- the wire --------------------------------------------------------------------------------------------------------


class ProtocolError(QmqError):
    """The other side broke the protocol; the connection is closed."""

    code = "protocol_error"


class UnsupportedVersion(ProtocolError):
    """The other side speaks a version of the protocol that this one does not."""

    code = "unsupported_version"


class ConnectionLost(QmqError):
    """The connection to the broker ended or could not be made."""

    retryable = True
    code = "connection_lost"


class BrokerStopping(QmqError):
    """The broker is shutting down; another one, or the same one in a moment, will answer."""

    retryable = True
    code = "broker_stopping"


class Overloaded(QmqError):
    """A bound of the broker is reached (connections, waiting pulls, bytes in flight)."""

    retryable = True
    code = "overloaded"


class InternalError(QmqError):
    """The broker failed in a way that nobody foresaw; its log has the details."""

    code = "internal_error"


class RemoteError(QmqError):
    """The broker answered with an error that this client has no class for, and said whether trying again can help."""

    code = "remote_error"

    def __init__(self, message: str, retryable: bool = False) -> None:
        super().__init__(message, retryable)
        self.retryable = retryable

    def __str__(self) -> str:
        return str(self.args[0])


# --- sending ---------------------------------------------------------------------------------------------------------


class SendFailed(QmqError):
    """Messages were not acknowledged. ``failures`` lists (ticket or index, subject, key, error, outcome)."""

    code = "send_failed"

    def __init__(self, message: str, failures: list[SendFailure] | None = None) -> None:
        super().__init__(message)
        self.failures: list[SendFailure] = failures if failures is not None else []


class SendUnknown(SendFailed):
    """Nobody can say whether the messages were stored: the answers were lost and the time to try again is up."""

    code = "send_unknown"


class SendFailure:
    """One message that was not acknowledged."""

    __slots__ = ("error", "key", "outcome", "subject", "ticket")

    def __init__(self, ticket: int, subject: str, key: str | None, error: QmqError, outcome: str) -> None:
        self.ticket = ticket
        self.subject = subject
        self.key = key
        self.error = error
        #: "refused" (certainly not stored) or "unknown"
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"SendFailure({self.ticket}, {self.subject!r}, {self.key!r}, {self.error!r}, {self.outcome!r})"


class QueueFull(QmqError):
    """More is queued with ``send_nowait`` than ``max_queued_bytes``; await ``drain()``."""

    retryable = True
    code = "queue_full"


class SequenceForgotten(QmqError):
    """A batch comes with a producer sequence so old that the broker cannot tell any more whether it has it."""

    code = "sequence_forgotten"


class TooManyProducers(QmqError):
    """The broker remembers as many producers as it may."""

    retryable = True
    code = "too_many_producers"


class ProducerInUse(QmqError):
    """Another client that is connected sends under the same ``producer`` name."""

    code = "producer_in_use"


class TooManySubjects(QmqError):
    """``max_subjects`` is reached."""

    code = "too_many_subjects"


class TooManyGroups(QmqError):
    """``max_groups`` is reached."""

    code = "too_many_groups"


# --- consuming -------------------------------------------------------------------------------------------------------


class TooManyConsumers(QmqError):
    """A client has ``max_consumers_per_connection`` consumers, or a group as many as it may have."""

    code = "too_many_consumers"


class GroupMismatch(QmqError):
    """The group exists with another mode."""

    code = "group_mismatch"


class UnknownGroup(QmqError):
    """There is no such group (any more)."""

    code = "unknown_group"


class BrokersMissed(QmqError):
    """A call that is for every broker did not reach all of them: the same call again completes it."""

    retryable = True
    code = "brokers_missed"


class Retry(QmqError):
    """Raised by a handler: the message comes again after *after* seconds (None: the group's delay)."""

    code = "retry"

    def __init__(self, reason: str = "", *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Fenced(QmqError):
    """Another epoch of this consumer took over."""

    code = "fenced"


class UnknownSubscription(QmqError):
    """A call names a subscription that this connection does not have."""

    code = "unknown_subscription"


# --- the files -------------------------------------------------------------------------------------------------------


class StorageError(QmqError):
    """Something about the files of a data directory."""

    code = "storage_error"


class DirectoryInUse(StorageError):
    """Another process holds the data directory."""

    code = "directory_in_use"


class ForeignFile(StorageError):
    """A file of another store, of a newer format version, or not of QMQ at all stands where one of ours must."""

    code = "foreign_file"


class BadBytes(StorageError):
    """Bytes on disk that are not what was written."""

    code = "bad_bytes"


class StorageFull(StorageError):
    """No room: the disk or a quota is full. Nothing was stored; sends are taken again when there is room."""

    retryable = True
    code = "storage_full"


class StorageFailed(StorageError):
    """The operating system refused a read or write."""

    retryable = True
    code = "storage_failed"


class SyncFailed(StorageError):
    """An fsync failed: nothing more is acknowledged from that log until the broker has been restarted."""

    code = "sync_failed"
