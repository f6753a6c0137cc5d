"""QMQ: a message broker. This is its client; `qmq --help` is its command line.

async with qmq.connect("qmq://127.0.0.1:20881", name="billing") as client:
    receipt = await client.send("hotel.order.created", b"...", key="order-4421")
    async with client.subscribe("hotel.order.", group="billing") as consumer:
        async for message in consumer:
            ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qmq.errors import (
    BadBatch,
    BrokersMissed,
    BrokerStopping,
    ConnectionLost,
    Fenced,
    Forbidden,
    GroupMismatch,
    InvalidName,
    InvalidOption,
    MessageTooLarge,
    Overloaded,
    ProducerInUse,
    ProtocolError,
    QmqError,
    QueueFull,
    Retry,
    SendFailed,
    SendFailure,
    SendUnknown,
    StorageError,
    StorageFailed,
    StorageFull,
    TlsFailed,
    TooManyConsumers,
    TooManyGroups,
    TooManyProducers,
    TooManySubjects,
    Unauthorized,
    UnknownGroup,
    UnknownMessage,
    UnsupportedVersion,
    UsageError,
)

if TYPE_CHECKING:
    from os import PathLike

    from qmq.durations import Duration
    from qmq.logs import log_to_stderr
    from qmq.net.client.admin.admin import Admin
    from qmq.net.client.admin.broker_info import BrokerInfo, ConnectionInfo, DiskInfo, Problem
    from qmq.net.client.admin.results import (
        BlockedSlot,
        ConsumerInfo,
        DeadLetter,
        GroupInfo,
        ResendCount,
        SealedLog,
        SubjectInfo,
        TokenRights,
    )
    from qmq.net.client.admin.statistics import (
        ArchiveStats,
        BrokerStats,
        GroupStats,
        GroupTotals,
        Histogram,
        SubjectStats,
    )
    from qmq.net.client.client import Client
    from qmq.net.client.consumer.consumer import Consumer
    from qmq.net.client.consumer.message import Message, MessageBatch
    from qmq.net.client.consumer.run import Handler
    from qmq.net.client.find.consumer_trace import ConsumerEvent, ConsumerTrace
    from qmq.net.client.find.finder import Finder, FindProgress
    from qmq.net.client.find.stored_message import StoredMessage
    from qmq.net.client.find.trace import GroupTrace, Trace, TraceEvent
    from qmq.net.client.group_settings import ChangedSettings, GroupSettings, OnDifference
    from qmq.net.client.options import Durability, Priority
    from qmq.net.client.producer.receipts import Receipt, Receipts
    from qmq.net.client.sync.admin import SyncAdmin
    from qmq.net.client.sync.client import SyncClient
    from qmq.net.client.sync.consumer import SyncConsumer, SyncMessage, SyncMessageBatch
    from qmq.net.client.sync.finder import SyncFinder
    from qmq.net.protocol.types import Mode

__all__ = [
    "Admin",
    "ArchiveStats",
    "BadBatch",
    "BlockedSlot",
    "BrokerInfo",
    "BrokerStats",
    "BrokerStopping",
    "BrokersMissed",
    "ChangedSettings",
    "Client",
    "ConnectionInfo",
    "ConnectionLost",
    "Consumer",
    "ConsumerEvent",
    "ConsumerInfo",
    "ConsumerTrace",
    "DeadLetter",
    "DiskInfo",
    "Durability",
    "Duration",
    "Fenced",
    "FindProgress",
    "Finder",
    "Forbidden",
    "GroupInfo",
    "GroupMismatch",
    "GroupSettings",
    "GroupStats",
    "GroupTotals",
    "GroupTrace",
    "Handler",
    "Histogram",
    "InvalidName",
    "InvalidOption",
    "Message",
    "MessageBatch",
    "MessageTooLarge",
    "Mode",
    "OnDifference",
    "Overloaded",
    "Priority",
    "Problem",
    "ProducerInUse",
    "ProtocolError",
    "QmqError",
    "QueueFull",
    "Receipt",
    "Receipts",
    "ResendCount",
    "Retry",
    "SealedLog",
    "SendFailed",
    "SendFailure",
    "SendUnknown",
    "StorageError",
    "StorageFailed",
    "StorageFull",
    "StoredMessage",
    "SubjectInfo",
    "SubjectStats",
    "SyncAdmin",
    "SyncClient",
    "SyncConsumer",
    "SyncFinder",
    "SyncMessage",
    "SyncMessageBatch",
    "TlsFailed",
    "TokenRights",
    "TooManyConsumers",
    "TooManyGroups",
    "TooManyProducers",
    "TooManySubjects",
    "Trace",
    "TraceEvent",
    "Unauthorized",
    "UnknownGroup",
    "UnknownMessage",
    "UnsupportedVersion",
    "UsageError",
    "connect",
    "connect_sync",
    "log_to_stderr",
]

#: The default of ``max_queued_bytes``.
_MAX_QUEUED_BYTES: Final = 64 << 20

#: Names that are imported at their first use, as they import numpy and asyncio.
_LAZY: Final = {
    "Admin": "qmq.net.client.admin.admin",
    "BrokerInfo": "qmq.net.client.admin.broker_info",
    "ArchiveStats": "qmq.net.client.admin.statistics",
    "BrokerStats": "qmq.net.client.admin.statistics",
    "GroupStats": "qmq.net.client.admin.statistics",
    "GroupTotals": "qmq.net.client.admin.statistics",
    "Histogram": "qmq.net.client.admin.statistics",
    "SubjectStats": "qmq.net.client.admin.statistics",
    "ChangedSettings": "qmq.net.client.group_settings",
    "Client": "qmq.net.client.client",
    "ConnectionInfo": "qmq.net.client.admin.broker_info",
    "Consumer": "qmq.net.client.consumer.consumer",
    "BlockedSlot": "qmq.net.client.admin.results",
    "ConsumerEvent": "qmq.net.client.find.consumer_trace",
    "ConsumerInfo": "qmq.net.client.admin.results",
    "ConsumerTrace": "qmq.net.client.find.consumer_trace",
    "DeadLetter": "qmq.net.client.admin.results",
    "DiskInfo": "qmq.net.client.admin.broker_info",
    "Durability": "qmq.net.client.options",
    "Duration": "qmq.durations",
    "FindProgress": "qmq.net.client.find.finder",
    "Finder": "qmq.net.client.find.finder",
    "GroupInfo": "qmq.net.client.admin.results",
    "GroupSettings": "qmq.net.client.group_settings",
    "GroupTrace": "qmq.net.client.find.trace",
    "Handler": "qmq.net.client.consumer.run",
    "Message": "qmq.net.client.consumer.message",
    "MessageBatch": "qmq.net.client.consumer.message",
    "Mode": "qmq.net.protocol.types",
    "OnDifference": "qmq.net.client.group_settings",
    "Priority": "qmq.net.client.options",
    "Problem": "qmq.net.client.admin.broker_info",
    "Receipt": "qmq.net.client.producer.receipts",
    "Receipts": "qmq.net.client.producer.receipts",
    "ResendCount": "qmq.net.client.admin.results",
    "SealedLog": "qmq.net.client.admin.results",
    "StoredMessage": "qmq.net.client.find.stored_message",
    "SubjectInfo": "qmq.net.client.admin.results",
    "TokenRights": "qmq.net.client.admin.results",
    "SyncAdmin": "qmq.net.client.sync.admin",
    "SyncClient": "qmq.net.client.sync.client",
    "SyncConsumer": "qmq.net.client.sync.consumer",
    "SyncFinder": "qmq.net.client.sync.finder",
    "SyncMessage": "qmq.net.client.sync.consumer",
    "SyncMessageBatch": "qmq.net.client.sync.consumer",
    "Trace": "qmq.net.client.find.trace",
    "TraceEvent": "qmq.net.client.find.trace",
    "log_to_stderr": "qmq.logs",
}


if not TYPE_CHECKING:  # a type checker would accept every name of qmq because of it

    def __getattr__(name: str) -> Any:
        module = _LAZY.get(name)
        if module is None:
            raise AttributeError(f"module 'qmq' has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(module), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def connect(
    url: str | None = None,
    *,
    name: str | None = None,
    app: str | None = None,
    wait: Duration = 0,
    durability: Durability = "flush",
    linger: Duration = 0,
    producer: str | None = None,
    send_timeout: Duration = 30,
    max_queued_bytes: int = _MAX_QUEUED_BYTES,
    failover_after: Duration | None = 5,
    admin_timeout: Duration = 10,
    token: str | None = None,
    token_file: str | PathLike[str] | None = None,
    tls_ca: str | PathLike[str] | None = None,
    tls_cert: str | PathLike[str] | None = None,
    tls_key: str | PathLike[str] | None = None,
) -> Client:
    """Return a client of the broker at *url* (several brokers: comma separated); use it with ``async with``.

    Without *url* it is the environment variable QMQ_SERVER, or ``qmq://127.0.0.1:20881``.

    *name* of the client and *app* (the program; by default its file name) show in ``qmq info`` and in the broker's log.
    *wait*: for so long the client tries to reach a broker when it connects; with 0 it tries once.
    *durability*: with "flush" a message is on disk when its send returns; with "append" it survives a crash of the
    broker, but not power loss. *linger*: messages are collected for so long and sent as one batch; 0: for one turn of
    the event loop, or until the broker has answered one of two batches in flight. *producer*: a name whose sequence
    continues after a restart. One client at a time may use it; another one gets ProducerInUse. *send_timeout*: after
    this time a send is not repeated. *failover_after*: a send that its broker may have stored waits so long for that
    broker before it goes to another one (None: it never does, and may end as SendUnknown). *admin_timeout*: each
    broker has so long for each answer to a call of ``client.admin`` or ``client.subjects``.

    *token*: what lets the client in where the broker asks for one, NAME:SECRET as `qmq tokens create` has shown it;
    *token_file*: a file that has it. Without these it is the environment variable QMQ_TOKEN, or what the file
    QMQ_TOKEN_FILE has. The file is read again for each connection; a client that its broker lets in no more waits up to
    a minute for another token there.

    At a URL with ``qmqs://`` the client speaks TLS, and checks the broker's certificate and its name. Paths of PEM
    files: *tls_ca* has the CAs to trust (default: those of the system); *tls_cert* and *tls_key* are the client's
    certificate, for brokers that ask for one. Without an argument it is the environment variable QMQ_TLS_CA,
    QMQ_TLS_CERT, QMQ_TLS_KEY. The files are read again when they have changed.

    Durations are seconds, timedeltas, or texts such as "250ms" and "5m". Raises InvalidOption and InvalidName at once,
    and ConnectionLost, TlsFailed or Unauthorized when the client connects.

    Where a block does not fit, ``await`` connects and ``close`` ends::

        client = await qmq.connect("qmq://10.0.0.5", name="billing", wait="30s")
        try:
            await client.send("shop.order.created", b"...")
        finally:
            await client.close()
    """
    from qmq.net.client.address import hidden
    from qmq.net.client.client import Client, make_parts
    from qmq.net.client.options import check_options

    token = hidden(token)  # type: ignore[assignment]  # no error shows it
    options = check_options(
        url, durability, linger, producer, send_timeout, max_queued_bytes, failover_after, admin_timeout, name, app,
        wait, token, token_file, tls_ca, tls_cert, tls_key,
    )  # fmt: skip
    return Client(make_parts(options))


def connect_sync(
    url: str | None = None,
    *,
    name: str | None = None,
    app: str | None = None,
    wait: Duration = 0,
    durability: Durability = "flush",
    linger: Duration = 0,
    producer: str | None = None,
    send_timeout: Duration = 30,
    max_queued_bytes: int = _MAX_QUEUED_BYTES,
    failover_after: Duration | None = 5,
    admin_timeout: Duration = 10,
    token: str | None = None,
    token_file: str | PathLike[str] | None = None,
    tls_ca: str | PathLike[str] | None = None,
    tls_cert: str | PathLike[str] | None = None,
    tls_key: str | PathLike[str] | None = None,
) -> SyncClient:
    """Return a client as ``connect`` does, for code without asyncio: the same calls without ``await``, from any thread.

    Use it with ``with``. Without a block it connects at its first call, and ``close`` ends it::

        client = qmq.connect_sync("qmq://10.0.0.5", name="web")
        client.send("shop.order.created", b"...")
        client.close()
    """
    from qmq.net.client.address import hidden
    from qmq.net.client.options import check_options
    from qmq.net.client.sync.client import SyncClient

    token = hidden(token)  # type: ignore[assignment]  # no error shows it
    options = check_options(
        url, durability, linger, producer, send_timeout, max_queued_bytes, failover_after, admin_timeout, name, app,
        wait, token, token_file, tls_ca, tls_cert, tls_key,
    )  # fmt: skip
    return SyncClient(options)
