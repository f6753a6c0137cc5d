"""Send rows as messages: ``df.write.format("qmq").mode("append").save("qmq://host:port")``.

Each task sends its rows by a client of its own, and ends when all are acknowledged. A message that the client sends
again after a lost connection is stored once. A task that Spark repeats sends all its rows again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

import qmq
from qmq.errors import InvalidOption, QueueFull
from qmq_spark.options import TLS_NAMES, tls_options

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq.archive.broker_logs import TlsPaths

#: The types that each column of a message may have.
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "subject": (StringType,),
    "key": (StringType,),
    "keys": (ArrayType,),
    "priority": (StringType,),
    "order_key": (StringType,),
    "tags": (ArrayType,),
    "properties": (MapType,),
    "body": (BinaryType, StringType),
}


class _SendOptions(TypedDict):
    keys: Sequence[str] | None
    tags: Sequence[str] | None
    properties: dict[str, str] | None
    priority: qmq.Priority | None
    order_key: str | None


_NAMES: Final = ("subject", "durability", "send_timeout", *TLS_NAMES)
_DURABILITIES: Final[dict[str, Literal["flush", "append"]]] = {"flush": "flush", "append": "append"}
#: The rows that are queued before the task checks that the client has room.
_ROWS: Final = 1_000


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write. ``subject``: the subject of all rows if they have no such column. Times in seconds."""

    url: str
    subject: str | None
    durability: Literal["flush", "append"]
    send_timeout: float
    tls: TlsPaths = (None, None, None)


def write_options(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WriteOptions:
    """Return the options of a write, checked together with the columns. Raises InvalidOption."""
    found = {name.lower(): str(value) for name, value in given.items()}
    url = found.pop("path", "")
    if overwrite:
        raise InvalidOption('messages cannot be overwritten; append them: .mode("append")')
    if not url.startswith(("qmq://", "qmqs://")):
        raise InvalidOption(f"{url or 'nothing'} is no URL of a broker; give one: .save('qmq://127.0.0.1:20881')")
    unknown = sorted(found.keys() - set(_NAMES))
    if unknown:
        raise InvalidOption(f"there is no option {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    subject, durability = found.get("subject"), _DURABILITIES.get(found.get("durability", "flush"))
    if durability is None:
        raise InvalidOption(f"option durability is {found['durability']!r}; give one of {', '.join(_DURABILITIES)}")
    try:
        send_timeout = float(found.get("send_timeout", "30"))
    except ValueError:
        raise InvalidOption(f"option send_timeout is {found['send_timeout']!r}; give seconds") from None
    _check(schema, subject)
    return WriteOptions(url, subject, durability, send_timeout, tls_options(found, url))


def _check(schema: StructType, subject: str | None) -> None:
    for field in schema.fields:
        kinds = _COLUMNS.get(field.name)
        texts = not isinstance(field.dataType, ArrayType) or isinstance(field.dataType.elementType, StringType)
        if isinstance(field.dataType, MapType):
            texts = isinstance(field.dataType.keyType, StringType) and isinstance(field.dataType.valueType, StringType)
        if kinds is None or not isinstance(field.dataType, kinds) or not texts:
            raise InvalidOption(
                f"{field.name} {field.dataType.simpleString()} is no column of a message; select subject string, key "
                "string, keys array<string>, priority string, order_key string, tags array<string>, properties "
                "map<string,string>, body binary or string"
            )
    if "body" not in schema.names:
        raise InvalidOption("the rows have no column body")
    if (subject is None) == ("subject" not in schema.names):
        raise InvalidOption("give either a column subject, or the option subject for all rows")


class QmqWriter(DataSourceArrowWriter):
    """Sends rows as messages."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options = self._options
        tls_ca, tls_cert, tls_key = options.tls
        with qmq.connect_sync(
            options.url, durability=options.durability, send_timeout=options.send_timeout,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
        ) as client:  # fmt: skip
            for batch in iterator:
                for first in range(0, batch.num_rows, _ROWS):
                    _queue(client, batch.slice(first, _ROWS), options.subject)
                    client.drain()
            client.flush()
        return WriterCommitMessage()


def _queue(client: qmq.SyncClient, rows: pa.RecordBatch, subject: str | None) -> None:
    """Queue some rows. Raises InvalidOption, InvalidName, MessageTooLarge, SendFailed."""
    columns = {name: rows.column(name).to_pylist() for name in rows.schema.names}
    none = [None] * rows.num_rows
    subjects = columns.get("subject", none) if subject is None else [subject] * rows.num_rows
    of_rows = zip(
        subjects,
        columns["body"],
        columns.get("key", none),
        columns.get("keys", none),
        columns.get("tags", none),
        columns.get("properties", none),
        columns.get("priority", none),
        columns.get("order_key", none),
        strict=True,
    )
    for name, body, key, keys, tags, properties, priority, order_key in of_rows:
        if name is None or body is None:
            raise InvalidOption(f"a row has no {'subject' if name is None else 'body'}; leave it out, or fill it")
        body = body.encode() if isinstance(body, str) else body
        if order_key is not None and priority == "normal":  # as rows that were read have it
            priority = None
        pairs = None if properties is None else dict(properties)
        send(client, name, body, keys or key, tags, pairs, priority, order_key)


def send(
    client: qmq.SyncClient,
    subject: str,
    body: bytes,
    keys: str | Sequence[str] | None,
    tags: Sequence[str] | None,
    properties: dict[str, str] | None,
    priority: qmq.Priority | None = None,
    order_key: str | None = None,
) -> None:
    """Queue one message once the client has room for it."""
    several = [keys] if isinstance(keys, str) else keys
    options: _SendOptions = {
        "keys": several, "tags": tags, "properties": properties, "priority": priority, "order_key": order_key
    }  # fmt: skip
    try:
        client.send_nowait(subject, body, **options)
    except QueueFull:
        client.flush()
        client.send_nowait(subject, body, **options)
